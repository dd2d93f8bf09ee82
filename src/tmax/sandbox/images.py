"""Builds images for bubblewrap: the instructions of a Dockerfile, over the base, into layers of an overlay.

The rule: a layer is cached under the hash of everything that decides its content, written aside and renamed last.
FROM names no image here: every image stands on the base. Only RUN starts a process.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tmax.config import BubblewrapConfig, Limits
from tmax.errors import BuildError, SandboxError, StartError, TaskError
from tmax.sandbox import bubblewrap, entry
from tmax.sandbox.base import Base, load_base
from tmax.sandbox.context import Context
from tmax.sandbox.dockerfile import parse
from tmax.sandbox.plan import FileStep, Step, make_plan
from tmax.sandbox.protocol import Image
from tmax.task import Task

_VERSION = 2
_MAX_LAYERS = 8
_LOG_TAIL = 4000
_BUILD_LIMITS = Limits(memory_mb=4096, pids=4096, file_mb=8192)
# What a build writes goes to the disk, without a bound.


@dataclass(frozen=True)
class _Build:
    """What one build works with; `deadline` is on the monotonic clock."""

    warden: entry.Warden
    base: Base
    limits: Limits
    context: Path
    deadline: float


def build_bubblewrap_image(config: BubblewrapConfig, task: Task) -> Image:
    """Build a task's image, or find it built.

    Raises BuildError where the Dockerfile is to blame, TaskError where it cannot be read, StartError where the
    machine is to blame.
    """
    warden = entry.warden()
    base = load_base(config.rootfs, warden)
    # Tasks of others that run their agent as root keep their files root's.
    facts = (task.path, task.hash, task.settings.build_timeout, task.settings.memory_mb, task.agent_user == "agent")
    try:
        image = _build(warden, base, *facts)
        if not all(bubblewrap.layer_dir(key).is_dir() for key in image.reference.split("+") if key):
            _build.cache_clear()
            image = _build(warden, base, *facts)
        return image
    except StartError:
        raise
    except SandboxError as error:
        raise StartError(error.message, kind=error.kind, hint=error.hint) from error
    except OSError as error:
        raise TaskError(f"cannot read the build context of `{task.path}`: {error}", hint="check the files") from error


@functools.lru_cache(maxsize=4096)
def _build(
    warden: entry.Warden, base: Base, path: Path, task_hash: str, timeout: float, memory_mb: int, agent_owns: bool
) -> Image:
    context = path / "environment"
    try:
        text = (context / "Dockerfile").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read the Dockerfile of `{path}`: {error}", hint="task files are UTF-8 text") from error
    plan = make_plan(parse(text), Context(context))
    steps = list(plan.steps)
    if agent_owns and plan.workdir != "/":
        steps.append(Step(0, files=(_give_to_agent(base, plan.workdir),)))
    limits = _BUILD_LIMITS.model_copy(update={"memory_mb": max(_BUILD_LIMITS.memory_mb, memory_mb)})
    build = _Build(warden, base, limits, context, time.monotonic() + timeout)
    keys: list[str] = []
    for group in _groups(steps):
        key = _layer_key(build, keys, group)
        _make_layer(build, keys, key, group)
        keys.append(key)
    return Image("bubblewrap", "+".join(keys), plan.workdir, plan.env)


def _give_to_agent(base: Base, workdir: str) -> FileStep:
    """The working directory becomes agent's: all of it, but not what the base has there."""
    of_base = any(
        part.lower is not None and (part.lower / workdir.removeprefix(part.mount).lstrip("/")).exists()
        for part in base.parts
        if f"{workdir}/".startswith(part.mount.rstrip("/") + "/")
    )
    return FileStep("own", workdir, owner="agent:agent", shallow=of_base)


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of each layer: one ends with every RUN, as long as there are not too many."""
    groups: list[list[Step]] = [[]]
    for step in steps:
        if groups[-1] and groups[-1][-1].run and len(groups) < _MAX_LAYERS:
            groups.append([])
        groups[-1].append(step)
    return [group for group in groups if group]


def _layer_key(build: _Build, below: Sequence[str], group: Sequence[Step]) -> str:
    digest = hashlib.sha256(json.dumps([_VERSION, build.base.key, *below]).encode())
    for step in group:
        shown: list[Any] = [step.run, step.script, step.env, step.cwd, step.user]
        for file in step.files:
            shown.append(file.shown())
            if file.source is not None:
                source = build.context / file.source
                shown += [stat.S_IMODE(source.stat().st_mode), hashlib.sha256(source.read_bytes()).hexdigest()]
        digest.update(json.dumps(shown, sort_keys=True).encode())
    return digest.hexdigest()[:20]


def _make_layer(build: _Build, below: Sequence[str], key: str, group: Sequence[Step]) -> None:
    final = bubblewrap.layer_dir(key)
    if final.is_dir():
        return
    layers = [bubblewrap.layer_dir(one) for one in below]
    with settle(final, build.warden) as aside:
        if aside is None:
            return
        for part in build.base.parts:
            (aside / part.name).mkdir()
            (aside / part.name).chmod(bubblewrap.part_mode(build.base, layers, part))
        files: list[FileStep] = []
        for step in group:
            files += step.files
            if step.run:
                _write_files(build, layers, aside, files, step)
                files = []
                _run(build, layers, aside, step)
        _write_files(build, layers, aside, files, group[-1])


def _write_files(build: _Build, layers: Sequence[Path], upper: Path, files: Sequence[FileStep], step: Step) -> None:
    if not files:
        return
    if build.warden.mode == "one":
        files = [replace(file, owner="0:0") for file in files]
    with ExitStack() as stack:
        state = bubblewrap.make_state(
            stack, build.warden, "build", [("scratch", 0o755)], build.base, size_mb=None
        )  # fmt: skip
        fields = {
            "overlays": bubblewrap.overlays(build.base, layers, state, upper), "scratch": str(state / "scratch"),
            "context": str(build.context), "steps": [file.fields() for file in files],
        }  # fmt: skip
        try:
            entry.call(build.warden, "layer", fields)
        except OSError as error:
            if error.filename == "overlay" or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise StartError(
                    f"cannot write an image layer: {error.strerror}", kind="disk",
                    hint="TMAX_CACHE needs room, on a file system that overlays can write to",
                ) from error  # fmt: skip
            where = f"line {step.line}" if step.line else "its end"
            raise BuildError(
                f"Dockerfile, up to {where}: {error.strerror}: {error.filename}",
                hint="see COPY, WORKDIR and their owners",
            ) from error


def _run(build: _Build, layers: Sequence[Path], upper: Path, step: Step) -> None:
    command = step.run
    if step.script is not None:
        command = ("/bin/sh", "-c", _RUN_SCRIPT, step.script)
    image = Image("bubblewrap", "", step.cwd, step.env)
    with ExitStack() as stack:
        sandbox = bubblewrap.start(
            stack, build.warden, build.base, build.limits, image, layers, label="build", network=True, upper=upper
        )
        try:
            left = max(0.0, build.deadline - time.monotonic())
            result = sandbox.run_build(command, user=step.user, timeout=left)
        except KeyError as error:
            raise BuildError(f"Dockerfile, line {step.line}: no user {error}", hint="make it before USER") from error
    tail = result.output[-_LOG_TAIL:]
    if result.timed_out:
        message = f"Dockerfile, line {step.line}: RUN took longer than the task's build time-out"
        raise BuildError(message, log_tail=tail, hint="raise `environment.build_timeout_sec`")
    if result.exit_code != 0:
        message = f"Dockerfile, line {step.line}: RUN ended with exit code {result.exit_code}"
        raise BuildError(message, log_tail=tail, hint="the end of its output says why")


_RUN_SCRIPT = 'f="$(mktemp)" && printf %s "$0" > "$f" && chmod 700 "$f" && "$f"; s=$?; rm -f "$f"; exit $s'


@contextmanager
def settle(final: Path, warden: entry.Warden) -> Iterator[Path | None]:
    """A new directory that becomes `final` if the block succeeds; None where `final` is there already.

    Whoever asks for the same directory meanwhile, thread or process, waits. Raises StartError where it cannot be made.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(final.parent / f".{final.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"cannot write to `{final.parent}`: {error}", kind="disk", hint="check TMAX_CACHE") from error
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
