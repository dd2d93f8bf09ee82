"""Turns a Dockerfile's instructions into steps with everything substituted: files to write, commands to run.

The rule: a plan reads the build context's names and touches nothing.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, assert_never

from tmax.errors import BuildError
from tmax.sandbox import dockerfile
from tmax.sandbox.context import Context, Found
from tmax.sandbox.dockerfile import Arg, Copy, Env, From, Instruction, Recorded, Run, RunAs, Shell, Workdir

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


@dataclass(frozen=True)
class FileStep:
    """One thing to make in an image; the warden takes its fields."""

    kind: Literal["directory", "file", "own"]
    path: str
    owner: str = "root:root"
    """`user:group`, names or numbers."""
    mode: int | None = None
    """None keeps a file's own permissions."""
    name: str | None = None
    """The file's name where `path` turns out to be a directory; None where it is never taken for one."""
    source: str | None = None
    """Path within the build context."""
    link: str | None = None
    """Target of a symbolic link."""
    content: str | None = None
    shallow: bool = False
    """Whether `own` leaves what is in the directory alone."""

    def fields(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def shown(self) -> list[Any]:
        """What of it decides the layer's content, apart from the source's own."""
        return [value for key, value in asdict(self).items() if key != "source"]


@dataclass(frozen=True)
class Step:
    """Files to write, or a command to run, of the instruction at a line (0: none)."""

    line: int
    files: tuple[FileStep, ...] = ()
    run: tuple[str, ...] = ()
    script: str | None = None
    """The command is a file with these bytes that runs itself (`#!`)."""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"


@dataclass(frozen=True)
class Plan:
    """All steps, and what the image is to have."""

    steps: tuple[Step, ...]
    workdir: str
    env: dict[str, str]


def make_plan(instructions: Sequence[Instruction], context: Context) -> Plan:
    """Substitute variables and resolve sources and paths. Raises BuildError naming the line."""
    steps: list[Step] = []
    env = {"PATH": DEFAULT_PATH}
    args: dict[str, str] = {}
    early: dict[str, str] = {}
    cwd, user = "/", "root"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    started = False
    for item in instructions:
        known = {**args, **env} if started else early
        match item:
            case From():
                started = True
            case Arg(line, pairs):
                for name, value in pairs:
                    text = early.get(name) if value is None else dockerfile.expand(value, known, line)
                    if text is not None:
                        (args if started else early)[name] = text
            case Env(line, pairs):
                env |= {name: dockerfile.expand(value, known, line) for name, value in pairs}
            case Workdir(line, path):
                cwd = posixpath.normpath(posixpath.join(cwd, dockerfile.expand(path, known, line)))
                steps.append(Step(line, files=(FileStep("directory", cwd, mode=0o755),)))
            case RunAs(line, name):
                user = dockerfile.expand(name, known, line)
            case Shell():
                shell = item.command
            case Copy():
                steps.append(Step(item.line, files=tuple(_copy(item, context, cwd, known))))
            case Run():
                steps.append(_run(item, shell, {**args, **env}, cwd, user))
            case Recorded():
                pass
            case _:
                assert_never(item)
    return Plan(tuple(steps), cwd, env)


def _run(item: Run, shell: tuple[str, ...], env: dict[str, str], cwd: str, user: str) -> Step:
    if isinstance(item.command, tuple):
        return Step(item.line, (), item.command, None, env, cwd, user)
    script = item.command if item.is_script else None
    return Step(item.line, (), (*shell, item.command), script, env, cwd, user)


def _copy(item: Copy, context: Context, cwd: str, env: Mapping[str, str]) -> Iterator[FileStep]:
    target = dockerfile.expand(item.target, env, item.line)
    path = posixpath.normpath(posixpath.join(cwd, target))
    owner = dockerfile.expand(item.chown, env, item.line) if item.chown else "root:root"
    mode = _mode(item.chmod, item.line)
    sources = [dockerfile.expand(source, env, item.line) for source in item.sources]
    found = [one for source in sources for one in context.find(source, item.line)]
    into = target.endswith(("/", "/.")) or target == "." or len(found) + len(item.heredocs) > 1
    place = f"{path.rstrip('/')}/" if into else path
    for heredoc in item.heredocs:
        body = dockerfile.expand_body(heredoc.body, env, item.line) if heredoc.expand else heredoc.body
        yield FileStep("file", place, owner, 0o644 if mode is None else mode, heredoc.name, content=body)
    for one in found:
        if item.is_add and one.path.name.endswith(_ARCHIVES):
            raise BuildError(
                f"Dockerfile, line {item.line}: ADD of an archive is not supported", hint="COPY it and RUN tar"
            )
        if one.is_directory:
            yield from _copy_directory(one, context, path, owner, mode)
        else:
            yield _copy_file(one.path, context, place, owner, mode, one.path.name)


def _copy_directory(one: Found, context: Context, path: str, owner: str, mode: int | None) -> Iterator[FileStep]:
    yield FileStep("directory", path, owner, 0o755)
    for name, file in one.inside:
        place = posixpath.join(path, name)
        if file.is_dir() and not file.is_symlink():
            yield FileStep("directory", place, owner, file.stat().st_mode & 0o7777)
        else:
            yield _copy_file(file, context, place, owner, mode, None)


def _copy_file(
    file: Path, context: Context, place: str, owner: str, mode: int | None, name: str | None
) -> FileStep:  # fmt: skip
    if file.is_symlink():
        return FileStep("file", place, owner, mode, name, link=str(file.readlink()))
    return FileStep("file", place, owner, mode, name, source=file.relative_to(context.root).as_posix())


def _mode(text: str | None, line: int) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 8)
    except ValueError as error:
        raise BuildError(f"Dockerfile, line {line}: --chmod={text} is not octal", hint="write it as 755") from error
