"""Limits on the memory and the number of processes of a whole sandbox, through control groups of either version.

The rule: groups are made below ones that we may use already, and their names carry the sandbox's; where there are none,
the caller falls back to limits per process.
"""

import contextlib
import functools
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "tmax-"


@dataclass(frozen=True)
class Place:
    """Where groups can be made: the directory, and which controllers' limits it takes."""

    directory: Path
    version: int
    controllers: frozenset[str]


@dataclass(frozen=True)
class Group:
    """A sandbox's groups, one directory per hierarchy."""

    directories: tuple[Path, ...]
    limits_memory: bool
    limits_pids: bool

    @property
    def procs(self) -> list[str]:
        """Files that a process writes itself into."""
        return [str(directory / "cgroup.procs") for directory in self.directories]

    def close(self) -> None:
        """Remove the groups; their processes must be dead, but the kernel may need a moment to notice."""
        for directory in self.directories:
            _remove(directory)


def make_group(name: str, *, memory_mb: int, pids: int) -> Group:
    """Make a group for a sandbox; without effect, and saying so, where none can be made."""
    made: list[Path] = []
    limited: set[str] = set()
    for place in places():
        directory = place.directory / f"{_PREFIX}{name}"
        try:
            directory.mkdir()
            made.append(directory)
            if "memory" in place.controllers:
                memory = str(memory_mb * 1024 * 1024)
                if place.version == 1:
                    (directory / "memory.limit_in_bytes").write_text(memory)
                    with contextlib.suppress(OSError):
                        (directory / "memory.memsw.limit_in_bytes").write_text(memory)
                else:
                    (directory / "memory.max").write_text(memory)
                    with contextlib.suppress(OSError):
                        (directory / "memory.swap.max").write_text("0")
                limited.add("memory")
            if "pids" in place.controllers:
                (directory / "pids.max").write_text(str(pids))
                limited.add("pids")
        except OSError:
            continue
    return Group(tuple(made), "memory" in limited, "pids" in limited)


def leftovers(name_start: str) -> list[Path]:
    """Groups whose name begins so."""
    found: list[Path] = []
    for place in places():
        with contextlib.suppress(OSError):
            found += [path for path in place.directory.iterdir() if path.name.startswith(_PREFIX + name_start)]
    return found


def remove_group(directory: Path) -> None:
    """Remove one group's directory."""
    _remove(directory)


@functools.cache
def places() -> tuple[Place, ...]:
    """Where this process can make groups that limit memory and pids; empty where nowhere."""
    found: list[Place] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    mounted = [words for line in mounts if (words := line.split()) and words[2] in ("cgroup", "cgroup2")]
    wanted = {"memory", "pids"}
    for line in lines:
        _, names, path = line.split(":", 2)
        for words in mounted:
            options = set(words[3].split(","))
            if names and words[2] == "cgroup" and set(names.split(",")) <= options:
                held = frozenset(set(names.split(",")) & wanted)
                if held and (place := _usable(Place(Path(words[1] + path), 1, held))):
                    found.append(place)
                    wanted -= held
            elif not names and words[2] == "cgroup2" and (second := _second_version(Path(words[1]), path, wanted)):
                found.append(second)
                wanted -= second.controllers
    return tuple(found)


def _second_version(mount: Path, path: str, wanted: set[str]) -> Place | None:
    """The nearest ancestor that hands controllers down, or can be made to."""
    own = Path(f"{mount}{path}")
    for directory in (own, *own.parents):
        if not directory.is_relative_to(mount):
            break
        try:
            offered = set((directory / "cgroup.controllers").read_text().split()) & wanted
            handed = set((directory / "cgroup.subtree_control").read_text().split()) & wanted
            if offered - handed:
                (directory / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in offered))
                handed = offered
        except OSError:
            continue
        if handed and (place := _usable(Place(directory, 2, frozenset(handed)))):
            return place
    return None


def _usable(place: Place) -> Place | None:
    """The place, if a group can be made there and a process be moved into it."""
    probe = place.directory / f"{_PREFIX}probe-{os.getpid()}-{time.monotonic_ns()}"
    try:
        probe.mkdir()
    except OSError:
        return None
    child = subprocess.Popen(["sleep", "10"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        (probe / "cgroup.procs").write_text(str(child.pid))
        return place
    except OSError:
        return None
    finally:
        child.kill()
        child.wait()
        _remove(probe)


def _remove(directory: Path) -> None:
    for _ in range(200):
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)
