"""Builds images for bubblewrap: the instructions of a Dockerfile, over the base, into layers of an overlay.

The rule: a layer is cached under the hash of everything that decides its content, written aside and renamed last.
FROM names no image here: every image stands on the base. Only RUN starts a process.
"""

import fcntl
import functools
import hashlib
import json
import os
import posixpath
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from tmax.config import BubblewrapConfig, Limits
from tmax.errors import BuildError, SandboxError, TaskError
from tmax.sandbox import bubblewrap, dockerfile, entry
from tmax.sandbox.base import Base, load_base
from tmax.sandbox.context import Context
from tmax.sandbox.dockerfile import Arg, Copy, Env, From, Instruction, Recorded, Run, RunAs, Shell, Workdir
from tmax.sandbox.protocol import Image
from tmax.task import Task

_VERSION = 1
_MAX_LAYERS = 8
_LOG_TAIL = 4000
_BUILD_LIMITS = Limits(memory_mb=4096, pids=4096, file_mb=8192)
# What a build writes goes to the disk.


def build_bubblewrap_image(config: BubblewrapConfig, task: Task) -> Image:
    """Build a task's image, or find it built. Raises BuildError, TaskError, StartError."""
    warden = entry.warden()
    base = load_base(config.rootfs, warden)
    facts = _Facts.of(task)
    image = _build(warden, base, task.path, task.hash, facts)
    if all(bubblewrap.layer_dir(key).is_dir() for key in image.reference.split("+") if key):
        return image
    _build.cache_clear()
    return _build(warden, base, task.path, task.hash, facts)


@dataclass(frozen=True)
class _Facts:
    context: Path
    build_timeout: float
    memory_mb: int
    agent_owns: bool

    @classmethod
    def of(cls, task: Task) -> "_Facts":
        # Tasks of others that run their agent as root keep their files root's.
        return cls(task.context, task.settings.build_timeout, task.settings.memory_mb, task.agent_user == "agent")


@dataclass(frozen=True)
class _Step:
    """A command, or files to write, with all that was substituted into them."""

    line: int
    run: tuple[str, ...] | None
    files: tuple[dict[str, Any], ...] = ()
    script: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"


@functools.lru_cache(maxsize=4096)
def _build(
    warden: entry.Warden, base: Base, path: Path, task_hash: str, facts: _Facts
) -> Image:  # fmt: skip
    try:
        text = (facts.context / "Dockerfile").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read the Dockerfile of `{path}`: {error}", hint="task files are UTF-8 text") from error
    steps, workdir, env = _plan(dockerfile.parse(text), Context(facts.context))
    if facts.agent_owns and workdir != "/":
        shallow = any(part.lower and (Path(part.lower) / posixpath.relpath(workdir, part.mount)).exists()
                      for part in base.parts if part.mount != "/" and f"{workdir}/".startswith(f"{part.mount}/"))  # fmt: skip
        own = {"kind": "own", "path": workdir, "owner": "agent:agent", "shallow": shallow}
        steps.append(_Step(0, None, (own,)))
    deadline = time.monotonic() + facts.build_timeout
    limits = _BUILD_LIMITS.model_copy(update={"memory_mb": max(_BUILD_LIMITS.memory_mb, facts.memory_mb)})
    keys: list[str] = []
    for group in _groups(steps):
        key = _layer_key(base, keys, group, warden.mode)
        _make_layer(warden, base, limits, keys, key, group, deadline)
        keys.append(key)
    return Image("bubblewrap", "+".join(keys), workdir, env)


def _plan(instructions: Sequence[Instruction], context: Context) -> tuple[list[_Step], str, dict[str, str]]:
    """Substitute and resolve everything: the steps, the working directory and the environment of the image."""
    steps: list[_Step] = []
    env = {"PATH": bubblewrap.DEFAULT_PATH}
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
                made = {"kind": "directory", "path": cwd, "owner": "root:root", "mode": 0o755}
                steps.append(_Step(line, None, (made,)))
            case RunAs(line, name):
                user = dockerfile.expand(name, known, line)
            case Shell():
                shell = item.command
            case Copy():
                steps.append(_Step(item.line, None, tuple(_copy_steps(item, context, cwd, known))))
            case Run(line, command, is_script):
                argv = command if isinstance(command, tuple) else (*shell, command)
                script = command if is_script and isinstance(command, str) else None
                steps.append(_Step(line, argv, (), script, {**args, **env}, cwd, user))
            case Recorded():
                pass
            case _:
                assert_never(item)
    return steps, cwd, env


def _copy_steps(item: Copy, context: Context, cwd: str, env: dict[str, str]) -> Iterator[dict[str, Any]]:
    target = dockerfile.expand(item.target, env, item.line)
    path = posixpath.normpath(posixpath.join(cwd, target))
    owner = dockerfile.expand(item.chown, env, item.line) if item.chown else "root:root"
    mode = _mode(item.chmod, item.line)
    sources = [dockerfile.expand(source, env, item.line) for source in item.sources]
    found = [entry for source in sources for entry in context.find(source, item.line)]
    into = target.endswith("/") or posixpath.normpath(target) == "." or len(found) + len(item.heredocs) > 1
    if into and path != "/":
        path += "/"
    common = {"kind": "file", "path": path, "owner": owner, "mode": mode, "link": None, "source": None}
    for heredoc in item.heredocs:
        body = dockerfile.expand_body(heredoc.body, env, item.line) if heredoc.expand else heredoc.body
        yield {**common, "name": heredoc.name, "content": body}
    for entry_ in found:
        if item.is_add and entry_.path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")):
            raise BuildError(
                f"Dockerfile, line {item.line}: ADD of an archive is not supported", hint="COPY it and RUN tar"
            )
        if not entry_.is_directory:
            yield common | _source(entry_.path) | {"name": entry_.path.name}
            continue
        yield {"kind": "directory", "path": path, "owner": owner, "mode": 0o755}
        for name, file in entry_.inside:
            place = posixpath.join(path, name)
            if file.is_dir() and not file.is_symlink():
                permissions = stat.S_IMODE(file.stat().st_mode)
                yield {"kind": "directory", "path": place, "owner": owner, "mode": permissions}
            else:
                yield common | _source(file) | {"path": place, "name": None}


def _source(file: Path) -> dict[str, Any]:
    if file.is_symlink():
        return {"link": os.readlink(file)}
    return {"source": str(file)}


def _mode(text: str | None, line: int) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 8)
    except ValueError as error:
        raise BuildError(f"Dockerfile, line {line}: --chmod={text} is not octal", hint="write it as 755") from error


def _groups(steps: Sequence[_Step]) -> list[list[_Step]]:
    """The steps of each layer: one ends with every RUN, as long as there are not too many."""
    groups: list[list[_Step]] = [[]]
    for step in steps:
        if groups[-1] and groups[-1][-1].run is not None and len(groups) < _MAX_LAYERS:
            groups.append([])
        groups[-1].append(step)
    return [group for group in groups if group]


def _layer_key(base: Base, below: Sequence[str], group: Sequence[_Step], mode: str) -> str:
    digest = hashlib.sha256(json.dumps([_VERSION, base.key, mode, *below]).encode())
    for step in group:
        digest.update(json.dumps([step.run, step.script, step.env, step.cwd, step.user], sort_keys=True).encode())
        for file in step.files:
            source = file.get("source")
            shown = {key: value for key, value in file.items() if key != "source"}
            if source is not None:
                status = Path(source).stat()
                shown["bits"] = stat.S_IMODE(status.st_mode)
                shown["content"] = hashlib.sha256(Path(source).read_bytes()).hexdigest()
            digest.update(json.dumps(shown, sort_keys=True).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:20]


def _make_layer(
    warden: entry.Warden,
    base: Base,
    limits: Limits,
    below: Sequence[str],
    key: str,
    group: Sequence[_Step],
    deadline: float,
) -> None:
    final = bubblewrap.layer_dir(key)
    if final.is_dir():
        return
    layers = [bubblewrap.layer_dir(one) for one in below]
    with settle(final, warden) as aside:
        if aside is None:
            return
        for part in base.parts:
            (aside / part.name).mkdir()
            (aside / part.name).chmod(bubblewrap.part_mode(base, layers, part))
        files: list[dict[str, Any]] = []
        for step in group:
            files += step.files
            if step.run is not None:
                _write_files(warden, base, layers, aside, files, step)
                files = []
                _run(warden, base, limits, layers, aside, step, deadline)
        _write_files(warden, base, layers, aside, files, group[-1])


def _write_files(
    warden: entry.Warden, base: Base, layers: Sequence[Path], upper: Path, files: Sequence[dict[str, Any]], step: _Step
) -> None:
    if not files:
        return
    with ExitStack() as stack:
        state = bubblewrap.make_state(stack, warden, "build", [("scratch", 0o755)], base, size_mb=None)
        overlays = bubblewrap.overlays(base, layers, state, upper)
        one = warden.mode == "one"
        steps = [{**file, "owner": "0:0"} if one else file for file in files]
        try:
            entry.call(warden, "layer", {"overlays": overlays, "scratch": str(state / "scratch"), "steps": steps})
        except OSError as error:
            raise BuildError(
                f"Dockerfile, up to line {step.line}: {error}", hint="see the COPY instructions"
            ) from error


def _run(
    warden: entry.Warden,
    base: Base,
    limits: Limits,
    layers: Sequence[Path],
    upper: Path,
    step: _Step,
    deadline: float,
) -> None:
    assert step.run is not None
    image = Image("bubblewrap", "", step.cwd, step.env)
    with ExitStack() as stack:
        sandbox = bubblewrap.start(stack, warden, base, limits, image, layers, label="build", network=True, upper=upper)
        command = step.run
        if step.script is not None:
            command = ("/bin/sh", "-c", _RUN_SCRIPT, step.script)
        result = sandbox.build(command, user=step.user, timeout=max(0.0, deadline - time.monotonic()))
    if result.timed_out:
        raise BuildError(
            f"Dockerfile, line {step.line}: RUN took longer than the task's build time-out",
            log_tail=result.output[-_LOG_TAIL:], hint="raise `environment.build_timeout_sec`",
        )  # fmt: skip
    if result.exit_code != 0:
        raise BuildError(
            f"Dockerfile, line {step.line}: RUN ended with exit code {result.exit_code}",
            log_tail=result.output[-_LOG_TAIL:], hint="the end of its output says why",
        )  # fmt: skip


_RUN_SCRIPT = 'f="$(mktemp)" && printf %s "$0" > "$f" && chmod 700 "$f" && "$f"; s=$?; rm -f "$f"; exit $s'


@contextmanager
def settle(final: Path, warden: entry.Warden) -> Iterator[Path | None]:
    """A new directory that becomes `final` if the block succeeds; None where `final` is there already.

    Whoever asks for the same directory meanwhile, thread or process, waits. Raises SandboxError.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(final.parent / f".{final.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SandboxError(
            f"cannot write to `{final.parent}`: {error}", kind="disk", hint="check TMAX_CACHE"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            yield None
            return
        # What a killed process left of the same directory.
        bubblewrap.remove(warden, list(final.parent.glob(f".{final.name}-*")))
        aside = final.parent / f".{final.name}-{secrets.token_hex(4)}"
        aside.mkdir(mode=0o755)
        try:
            yield aside
            aside.rename(final)
        except BaseException:
            bubblewrap.remove(warden, [aside])
            raise
    finally:
        os.close(lock)
