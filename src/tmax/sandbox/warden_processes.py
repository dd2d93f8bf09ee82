"""Finds and signals the processes of one sandbox.

The rule: standard library only. Process ids are the host's, and one may become another process's between two looks; so
a process is opened first, recognised as one of a sandbox, and signalled through what was opened.
"""
# Paths are bytes relative to open directories, and pathlib would double the start-up time.
# ruff: noqa: PTH208

import os
import signal
import time
from collections.abc import Iterable

_TREE_TIMEOUT = 5.0


class Processes:
    """The processes that descend from a sandbox's first one, `leader` (host id), or were placed beside it.

    Made while /proc is the host's; used in the sandbox's mount namespace, where /proc is the sandbox's.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._host = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def kill(self, uid: int | None, timeout: float) -> int:
        """Kill every process of a user id, or all but the first; how many are left after `timeout` seconds.

        All are stopped before any is killed, since others would take the places of those that go one by one.
        """
        deadline = time.monotonic() + timeout
        found: dict[str, int] = {}
        while (new := _of_user(uid, found)) and time.monotonic() < deadline:
            _signal(new.values(), signal.SIGSTOP)
            found |= new
        _signal(found.values(), signal.SIGKILL)
        _close(found.values())
        while (left := _of_user(uid, {})) and time.monotonic() < deadline:
            _signal(left.values(), signal.SIGKILL)
            _close(left.values())
            time.sleep(0.001)
        _close(left.values())
        return len(left)

    def signal_tree(
        self, root: int | None, spare: Iterable[int], since: int, number: int, *, with_root: bool
    ) -> int:  # fmt: skip
        """Signal what a command started; see `entry.kill_tree`. How many of those to be killed are left."""
        spared = set(spare)
        roots = [] if root is None else [fd for fd in [self._open(root)] if fd >= 0]
        if number != signal.SIGKILL:
            found = self._started_by(root, spared, since)
            _signal([*found, *roots], number)
            _close([*found, *roots])
            return 0
        deadline = time.monotonic() + _TREE_TIMEOUT
        if with_root:
            _signal(roots, signal.SIGSTOP)
        while (found := self._started_by(root, spared, since)) and time.monotonic() < deadline:
            _signal(found, signal.SIGSTOP)
            _signal(found, signal.SIGKILL)
            _close(found)
            time.sleep(0.001)
        if with_root:
            _signal(roots, signal.SIGKILL)
        _close([*found, *roots])
        return len(found)

    def _started_by(self, root: int | None, spared: set[int], since: int) -> list[int]:
        """Live descendants of the root but the spared, and of orphans (the leader's children) since the clock tick;
        opened."""
        queue = [] if root is None else [pid for pid in self._children(root) if pid not in spared]
        queue += [pid for pid in self._children(self._leader) if self._started(pid) >= since]
        found: list[int] = []
        while queue:
            pid = queue.pop()
            queue += self._children(pid)
            fd = self._open(pid)
            if fd >= 0:
                found.append(fd)
        return found

    def _open(self, pid: int) -> int:
        """The process's directory in the host's /proc, or -1 where it is dead or none of a sandbox."""
        try:
            fd = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._host)
        except OSError:
            return -1
        status = _status(fd)
        # Processes of the host have one id only.
        if status.get("State", "X")[0] in "ZX" or len(status.get("NSpid", "").split()) < 2:
            os.close(fd)
            return -1
        return fd

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        try:
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._host)
        except OSError:
            return found
        try:
            for thread in os.listdir(tasks):
                found += map(int, _read(f"{thread}/children", tasks).split())
        except OSError:
            return found
        finally:
            os.close(tasks)
        return found

    def _started(self, pid: int) -> int:
        """In clock ticks since boot."""
        try:
            return int(_read(f"{pid}/stat", self._host).rpartition(")")[2].split()[19])
        except (OSError, IndexError):
            return 0


def _of_user(uid: int | None, known: dict[str, int]) -> dict[str, int]:
    """Live processes in the sandbox's /proc but the first and the known, of a user id or of all; opened."""
    found: dict[str, int] = {}
    with os.scandir("/proc") as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    for name in names:
        if name == "1" or name in known:
            continue
        try:
            fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        status = _status(fd)
        if status.get("State", "X")[0] in "ZX" or (uid is not None and str(uid) not in status["Uid"].split()):
            os.close(fd)
        else:
            found[name] = fd
    return found


def _status(process: int) -> dict[str, str]:
    try:
        lines = _read("status", process).splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _read(path: str, where: int) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=where), errors="replace") as file:
        return file.read()


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        try:
            signal.pidfd_send_signal(process, number)
        except (ProcessLookupError, PermissionError):
            continue


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
