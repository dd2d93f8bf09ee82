"""A task on disk: Harbor's layout plus `task.json`; read, written and hashed here and nowhere else.

The rule: `environment/` is the build context and nothing else, and no file of a task may lead out of it.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tmax.errors import TaskError

STEP_MARK = "# --- step ---"
"""Cuts an oracle's script into the commands that a policy would give one by one."""

NOT_CONTEXT = ("task.json", "test_initial_state.py", "test_final_state.py", "test_outputs.py")
"""Files that some layouts keep in `environment/`; they are never sent to a build."""

_HASHED = ("instruction.md", "environment", "tests", "solution", "task.toml")

_KNOWN_TOML: dict[str, frozenset[str]] = {
    "": frozenset({"schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution",
                   "source", "multi_step_reward_strategy", "steps", "artifacts"}),
    "agent": frozenset({"network_mode", "allowed_hosts", "timeout_sec", "user"}),
    "verifier": frozenset({"network_mode", "allowed_hosts", "timeout_sec", "env", "user", "environment_mode",
                           "environment", "collect"}),
    "environment": frozenset({"network_mode", "allowed_hosts", "build_timeout_sec", "docker_image", "os", "cpus",
                              "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types", "tpu",
                              "mcp_servers", "env", "skills_dir", "healthcheck", "workdir", "allow_internet"}),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What `task.toml` says; seconds and megabytes."""

    agent_timeout: float = 600.0
    verifier_timeout: float = 120.0
    build_timeout: float = 600.0
    memory_mb: int = 2048
    cpus: int = 1
    storage_mb: int = 4096
    network: bool = False
    agent_user: str | None = None
    """None leaves the choice to the engine: an unprivileged user for our tasks, the image's for others'."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FileSpec:
    """One file of the build context."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Truth:
    """What the author of a task knows and the agent must find out; never in a sandbox. Four parts, in order."""

    initial_state: str
    final_state: str
    invariants: str
    guards: str


@dataclass(frozen=True)
class TaskDraft:
    """A task before it is a directory; what a family or a model hands over."""

    instruction: str
    dockerfile: str
    files: dict[str, FileSpec]
    """Build context by relative path, the Dockerfile apart."""
    initial_test: str
    """Source of `test_initial_state.py`."""
    final_test: str
    """Source of `test_final_state.py`."""
    steps: tuple[str, ...]
    """The oracle's commands, each a complete piece of bash; run in one shell in this order."""
    truth: Truth
    spec: dict[str, Any]
    """The axes' values: at least `family`, `level` and `domain`."""
    settings: Settings = Settings()


@dataclass(frozen=True)
class Task:
    """A task directory that was read and found whole."""

    path: Path
    task_id: str
    instruction: str
    settings: Settings
    card: dict[str, Any]
    """`task.json`; empty for tasks of others."""
    hash: str
    unknown_keys: tuple[str, ...]
    """Keys of `task.toml` that mean nothing to tmax; reported, not ignored."""

    @property
    def context(self) -> Path:
        """The build context."""
        return self.path / "environment"

    @property
    def initial_test(self) -> Path | None:
        """The test that passes before the agent acts, where there is one (two layouts are known)."""
        for place in (self.path / "tests", self.context):
            if (place / "test_initial_state.py").is_file():
                return place / "test_initial_state.py"
        return None

    @property
    def final_test(self) -> Path | None:
        """The pytest file that grades; None for a task that has only `tests/test.sh`."""
        for name in ("test_final_state.py", "test_outputs.py"):
            if (self.path / "tests" / name).is_file():
                return self.path / "tests" / name
        return None

    @property
    def test_script(self) -> Path | None:
        """Harbor's entry point, where there is one."""
        script = self.path / "tests" / "test.sh"
        return script if script.is_file() else None

    @property
    def solution(self) -> Path | None:
        """The oracle's script, where there is one."""
        script = self.path / "solution" / "solve.sh"
        return script if script.is_file() else None

    @property
    def agent_user(self) -> Literal["agent", "root"]:
        """Our tasks give the agent no privileges; tasks of others get Harbor's default unless they name a user."""
        if self.settings.agent_user is None:
            return "agent" if self.card else "root"
        return "root" if self.settings.agent_user in ("root", "0") else "agent"

    def oracle_steps(self) -> tuple[str, ...]:
        """The oracle's commands, without the script's first line; one command where it is not cut into steps."""
        if self.solution is None:
            return ()
        # Neither `read_text` nor `splitlines`: they change carriage returns and form feeds inside heredocs.
        body = _decode(self.solution, self.solution.read_bytes())
        if body.startswith("#!"):
            body = body.partition("\n")[2]
        return tuple(step.strip("\n") for step in body.split(STEP_MARK) if step.strip())


def read_task(path: Path) -> Task:
    """Read a task directory, ours or Harbor's.

    Raises TaskError where a part is missing or malformed, or a symbolic link leads out of the directory.
    """
    path = path.resolve() if path.name in ("", "..") else path.absolute()
    if not path.is_dir():
        raise TaskError(f"no task directory `{path}`", hint="a task is a directory with instruction.md and task.toml")
    _refuse_escapes(path)
    instruction = _read_text(path / "instruction.md").strip()
    if not instruction:
        raise TaskError(f"`{path}`: instruction.md is empty", hint="say what the agent is to do")
    settings, unknown = _read_settings(path / "task.toml")
    if not (path / "environment" / "Dockerfile").is_file():
        raise TaskError(f"`{path}` has no environment/Dockerfile", hint="every task needs an image to start from")
    tests = path / "tests"
    names = ("test.sh", "test_final_state.py", "test_outputs.py")
    if not any((tests / name).is_file() for name in names):
        raise TaskError(f"`{path}` has no tests", hint=f"add tests/ with one of {', '.join(names)}")
    return Task(
        path=path,
        task_id=path.name,
        instruction=instruction,
        settings=settings,
        card=_read_card(path),
        hash=task_hash(path),
        unknown_keys=unknown,
    )


def find_tasks(root: Path) -> list[Path]:
    """The task directories at or directly under `root`, by name. Raises TaskError where there is none."""
    if (root / "instruction.md").exists() or (root / "task.toml").exists():
        return [root]
    marks = ("instruction.md", "task.toml")
    entries = sorted(root.iterdir()) if root.is_dir() else []
    # A name with a dot is a draft that a killed process left behind.
    found = [entry for entry in entries if entry.name[0] != "." and any((entry / mark).is_file() for mark in marks)]
    if not found:
        raise TaskError(f"no task under `{root}`", hint="give a task directory or a directory of them")
    return found


def write_task(draft: TaskDraft, root: Path) -> Task:
    """Write a draft under `root` as `<family>-<hash>`, whole or not at all; the same draft gives the same bytes.

    Raises TaskError where a path of the draft leaves the build context or nothing can be written.
    """
    for name in draft.files:
        plain = Path(name).as_posix()
        if plain.startswith("/") or ".." in Path(name).parts or plain in (".", "Dockerfile", *NOT_CONTEXT):
            raise TaskError(f"`{name}` cannot be a file of a build context", hint="use relative paths without `..`")
    if any(STEP_MARK in step for step in draft.steps):
        raise TaskError(f"an oracle step holds the mark `{STEP_MARK}`", hint="give it as two steps")
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    except OSError as error:
        raise TaskError(
            f"cannot write tasks to `{root}`: {error}", hint="check the path, the rights and the disk"
        ) from error
    try:
        _write_parts(draft, aside)
        digest = task_hash(aside)
        task_id = f"{draft.spec['family']}-{digest[:12]}"
        _write_card(draft, aside, task_id, digest)
        final = root / task_id
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.chmod(0o755)
            aside.rename(final)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TaskError(f"cannot write a task to `{root}`: {error}", hint="check the rights and the disk") from error
    return read_task(final)


def task_hash(path: Path) -> str:
    """SHA-256 over what decides behaviour: instruction, environment, tests, solution and the settings; not labels."""
    digest = hashlib.sha256()
    for part in _HASHED:
        top = path / part
        files = (
            [top] if top.is_file() else sorted(file for file in top.rglob("*") if file.is_file() or file.is_symlink())
        )
        for file in files:
            name = file.relative_to(path).as_posix()
            if name == "environment/task.json":
                continue
            body = str(file.readlink()).encode() if file.is_symlink() else _hashed_bytes(file, name)
            runs = b"x" if not file.is_symlink() and file.stat().st_mode & 0o100 else b"-"
            for piece in (name.encode(), runs, body):
                digest.update(len(piece).to_bytes(8, "big"))
                digest.update(piece)
    return digest.hexdigest()


def context_files(context: Path) -> list[Path]:
    """The files of a build context that may be sent to a build, by name."""
    return sorted(
        file for file in context.rglob("*")
        if (file.is_file() or file.is_symlink()) and file.relative_to(context).as_posix() not in NOT_CONTEXT
    )  # fmt: skip


def _hashed_bytes(file: Path, name: str) -> bytes:
    body = file.read_bytes()
    if name != "task.toml":
        return body
    # Labels may change without making another task of it.
    data = tomllib.loads(body.decode("utf-8"))
    data.pop("metadata", None)
    return json.dumps(data, sort_keys=True, default=str).encode()


def _write_parts(draft: TaskDraft, path: Path) -> None:
    solve = "#!/bin/bash\n" + f"\n{STEP_MARK}\n".join(step.strip("\n") for step in draft.steps) + "\n"
    parts: dict[str, FileSpec] = {
        "instruction.md": FileSpec(draft.instruction.strip().encode() + b"\n"),
        "task.toml": FileSpec(_render_toml(draft).encode()),
        "environment/Dockerfile": FileSpec(draft.dockerfile.encode()),
        "tests/test.sh": FileSpec(_TEST_SH.encode(), 0o755),
        "tests/test_initial_state.py": FileSpec(draft.initial_test.encode()),
        "tests/test_final_state.py": FileSpec(draft.final_test.encode()),
        "solution/solve.sh": FileSpec(solve.encode(), 0o755),
    }
    parts |= {f"environment/{name}": file for name, file in draft.files.items()}
    for name, file in sorted(parts.items()):
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(file.mode)
    for folder in path.rglob("*"):
        if folder.is_dir():
            folder.chmod(0o755)  # whatever the umask: the agent must be able to read what the build copies


def _write_card(draft: TaskDraft, path: Path, task_id: str, digest: str) -> None:
    card = {
        "id": task_id,
        "spec": draft.spec,
        "truth": {
            "initial_state": draft.truth.initial_state,
            "final_state": draft.truth.final_state,
            "invariants": draft.truth.invariants,
            "guards": draft.truth.guards,
        },
        "provenance": {"source": "family", "family": draft.spec["family"]},
        "licence": "Apache-2.0",
        "hash": digest,
    }
    target = path / "task.json"
    target.write_text(json.dumps(card, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    target.chmod(0o644)


def _render_toml(draft: TaskDraft) -> str:
    settings = draft.settings
    # Only what JSON and TOML write alike; `task.json` has the whole spec.
    plain = {key: value for key, value in sorted(draft.spec.items()) if isinstance(value, str | int)}
    labels = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in plain.items())
    user = "" if settings.agent_user is None else f"user = {json.dumps(settings.agent_user)}\n"
    return (
        'schema_version = "1.4"\n\n'
        f"[metadata]\n{labels}\n"
        f"[agent]\ntimeout_sec = {settings.agent_timeout}\n{user}\n"
        f"[verifier]\ntimeout_sec = {settings.verifier_timeout}\n\n"
        f"[environment]\nbuild_timeout_sec = {settings.build_timeout}\ncpus = {settings.cpus}\n"
        f"memory_mb = {settings.memory_mb}\nstorage_mb = {settings.storage_mb}\n"
        f'network_mode = "{"public" if settings.network else "no-network"}"\n'
    )


def _read_settings(path: Path) -> tuple[Settings, tuple[str, ...]]:
    try:
        data = tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"`{path}` is not TOML: {error}", hint="see the Harbor task format") from error
    sections = {name: data.get(name, {}) for name in ("agent", "verifier", "environment", "metadata")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise TaskError(f"`{path}`: `{name}` is not a table", hint="see the Harbor task format")
    unknown = [key for key in data if key not in _KNOWN_TOML[""]]
    for name in ("agent", "verifier", "environment"):
        unknown += [f"{name}.{key}" for key in sections[name] if key not in _KNOWN_TOML[name]]
    agent, verifier, environment = sections["agent"], sections["verifier"], sections["environment"]
    default = Settings()
    network = environment.get("allow_internet")
    user = agent.get("user")
    return Settings(
        agent_timeout=_number(path, "agent.timeout_sec", agent.get("timeout_sec"), default.agent_timeout),
        verifier_timeout=_number(path, "verifier.timeout_sec", verifier.get("timeout_sec"), 600.0),
        build_timeout=_number(path, "environment.build_timeout_sec", environment.get("build_timeout_sec"), 600.0),
        memory_mb=_megabytes(path, environment, "memory", default.memory_mb),
        cpus=int(_number(path, "environment.cpus", environment.get("cpus"), default.cpus)),
        storage_mb=_megabytes(path, environment, "storage", default.storage_mb),
        network=bool(network) if network is not None else environment.get("network_mode", "no-network") == "public",
        agent_user=None if user is None else str(user),
        metadata=dict(sections["metadata"]),
    ), tuple(unknown)


def _number(path: Path, key: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise TaskError(
            f"`{path}`: `{key}` must be a positive number, not {value!r}", hint="see the Harbor task format"
        )
    return float(value)


def _megabytes(path: Path, environment: dict[str, Any], name: str, default: int) -> int:
    """`memory_mb = 2048`, or Harbor's older `memory = "2G"`."""
    old = environment.get(name)
    if old is None or f"{name}_mb" in environment:
        return int(_number(path, f"environment.{name}_mb", environment.get(f"{name}_mb"), default))
    match = re.fullmatch(r"(\d+)\s*([MG])i?B?", str(old).strip(), re.IGNORECASE)
    if match is None:
        raise TaskError(f"`{path}`: `environment.{name}` is no size: {old!r}", hint='write it like "2G" or "512M"')
    return int(match[1]) * (1024 if match[2] in "gG" else 1)


def _read_card(path: Path) -> dict[str, Any]:
    for place in (path / "task.json", path / "environment" / "task.json"):
        if place.is_file():
            try:
                card = json.loads(_read_text(place))
            except json.JSONDecodeError as error:
                raise TaskError(f"`{place}` is not JSON: {error}", hint="write the task again") from error
            if not isinstance(card, dict):
                raise TaskError(f"`{place}` holds no object", hint="write the task again")
            return card if place.parent == path else {}
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(
            f"`{path.parent}` has no {path.name}", hint="a task needs instruction.md and task.toml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read `{path}`: {error}", hint="task files are UTF-8 text") from error


def _decode(path: Path, body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"cannot read `{path}`: {error}", hint="task files are UTF-8 text") from error


def _refuse_escapes(path: Path) -> None:
    for entry in path.rglob("*"):
        if entry.is_symlink():
            # A link in the build context must not bring the tests or the solution into it either.
            in_context = entry.relative_to(path).parts[0] == "environment"
            try:
                inside = entry.resolve().is_relative_to((path / "environment" if in_context else path).resolve())
            except (OSError, RuntimeError):  # a loop of links
                inside = False
            if not inside:
                raise TaskError(f"`{entry}` is a symbolic link that leaves the task or its build context",
                                hint="copy the file")  # fmt: skip
        if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            raise TaskError(f"`{entry}` is neither a file nor a directory", hint="remove it from the task")


_TEST_SH = """\
#!/bin/bash
mkdir -p /logs/verifier
python3 -m pytest -q -p no:cacheprovider "$(dirname "$0")/test_final_state.py"
status=$?
if [ "$status" -eq 0 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
exit "$status"
"""
