"""Sees and kills the processes of a container: from the host where it can, else through a bash in the container.

The rule: the container's first process is never seen, so never killed. From the host nothing of the container is
trusted: neither its bash, which an agent that is root may have replaced, nor a free process slot, which a fork bomb
leaves none of.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tmax.errors import SandboxError
from tmax.sandbox.docker_api import Ended, ExecProcess

_PF_EXITING = 0x4
"""The kernel's flag of a process that is on its way out."""

MARK = "TMAX_EXEC"
"""Environment variable by which the processes of one exec are known, also after they left its session."""


@dataclass(frozen=True)
class Process:
    """A process that is not a zombie; ids are the host's or the container's, as the view has them."""

    pid: int
    parent: int
    session: int
    start: int
    """Clock ticks since boot; tells two processes of the same id apart."""
    uid: int
    orphan: bool
    """Whether the container's first process has taken it over from a parent that ended."""
    mark: str
    """Value of MARK in the environment that it was started with; empty where it has none or may not be seen."""


Table = dict[int, Process]
Choice = Callable[[Table], set[int]]


class View(Protocol):
    """One container's processes, from wherever they are seen."""

    def processes(self) -> Table:
        """All of them but the first, and but what the view itself runs."""
        ...

    def signal(self, pids: Collection[int], number: signal.Signals) -> None:
        """Send a signal to each that still lives."""
        ...

    def close(self) -> None:
        """Let go of what the view holds."""
        ...


def kill(view: View, chosen: Choice, *, timeout: float) -> bool:
    """Kill what `chosen` picks; True once nothing of it is left, False if something is after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    stopped: set[int] = set()
    # Stopped first and killed afterwards, since a fork bomb refills the slots of those that die one by one.
    while (found := chosen(view.processes()) - stopped) and time.monotonic() < deadline:
        view.signal(found, signal.SIGSTOP)
        stopped |= found
    if not stopped:
        return True
    found = stopped
    while found:
        if time.monotonic() > deadline:
            return False
        view.signal(found, signal.SIGKILL)
        time.sleep(0.002)
        found = chosen(view.processes())
    return True


def of_user(uid: int | None) -> Choice:
    """Every process of a user, or of everybody."""
    return lambda table: {pid for pid, process in table.items() if uid is None or process.uid == uid}


def of_exec(mark: str, first: int) -> Choice:
    """What an exec started: the session of its `first` process, what carries its mark, and what descends from those."""

    def chosen(table: Table) -> set[int]:
        found = {pid for pid, process in table.items() if process.mark == mark or process.session == first != 0}
        return _with_descendants(table, found, spared=frozenset())

    return chosen


def of_shell(shell: Process, spared: Table) -> Choice:
    """What a shell started, but for the processes in `spared` and what descends from them.

    That is its session, what descends from it, and what its user has started and left to the first process meanwhile.
    """

    def chosen(table: Table) -> set[int]:
        old = {pid for pid, process in table.items() if pid in spared and spared[pid].start == process.start}
        kept = _with_descendants(table, old - {shell.pid}, spared=frozenset())
        found = {
            pid for pid, process in table.items()
            if process.session == shell.pid or (process.orphan and process.uid == shell.uid and not process.mark)
        }  # fmt: skip
        return _with_descendants(table, (found | {shell.pid}) - kept, spared=kept) - {shell.pid}

    return chosen


def find_shell(table: Table, mark: str) -> Process | None:
    """The process that was started with this mark, not what it forked."""
    return next((process for pid, process in table.items() if process.mark == mark and process.session == pid), None)


def inner_pid(pid: int) -> int:
    """The id that a container's process has inside it; 0 where this machine does not see it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    ids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(ids[-1]) if len(ids) > 1 else 0


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is about to: what it takes with it ends before it does."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


class HostView:
    """Through the host's /proc and control groups; needs root there. `leader` is the container's first process."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._namespace = _namespace(leader)
        self._group = _control_group(leader)

    def processes(self) -> Table:
        """See `View.processes`; empty where the container has ended."""
        if self._namespace is None or _namespace(self._leader) != self._namespace:
            return {}
        found = (
            _read(pid, self._leader)
            for pid in self._pids()
            if pid != self._leader and _namespace(pid) == self._namespace
        )
        return {process.pid: process for process in found if process is not None}

    def signal(self, pids: Collection[int], number: signal.Signals) -> None:
        """See `View.signal`."""
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                # The handle names one process for good; a number that was given to another one meanwhile is no danger.
                if _namespace(pid) == self._namespace:
                    signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                continue
            finally:
                os.close(handle)

    def close(self) -> None:
        """See `View.close`; it holds nothing."""

    def _pids(self) -> list[int]:
        if self._group is not None:
            try:
                return [int(line) for line in self._group.read_text(encoding="ascii").split()]
            except OSError:
                pass
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


class InnerView:
    """Through a bash that is kept in the container for it and needs no further process: for a caller that is not root.

    `start(command)` runs an argument vector there as the user whose processes are meant, with its input attached. Only
    as good as the container's bash.
    """

    def __init__(self, start: Callable[[Sequence[str]], ExecProcess]) -> None:
        self._start = start
        self._helper: ExecProcess | None = None
        self._lock = threading.Lock()

    def processes(self) -> Table:
        """See `View.processes`. Raises SandboxError where the container's bash does not answer."""
        found = {}
        for line in self._ask("0").splitlines():
            pid, parent, session, start, uid, mark = line.split(" ")
            found[int(pid)] = Process(
                int(pid), int(parent), int(session), int(start), int(uid), orphan=parent == "1", mark=mark
            )
        return found

    def signal(self, pids: Collection[int], number: signal.Signals) -> None:
        """See `View.signal`."""
        self._ask(" ".join(map(str, (int(number), *pids))))

    def close(self) -> None:
        """End the bash in the container."""
        with self._lock:
            self._drop()

    def _ask(self, request: str) -> str:
        with self._lock:
            # What kills everybody kills this, too; then a second one is asked.
            for _ in range(2):
                if self._helper is None:
                    self._helper = self._start(["/bin/bash", "--norc", "--noprofile", "-c", _SERVE])
                answer = self._answer(self._helper, request)
                if answer is not None:
                    return answer
                self._drop()
        raise SandboxError("bash in the container does not answer", kind="process", hint="the image needs bash")

    def _answer(self, helper: ExecProcess, request: str) -> str | None:
        received = bytearray()
        try:
            helper.send(request.encode() + b"\n")
            while not received.endswith(b".\n"):
                event = helper.receive(_ANSWER_TIMEOUT)
                if isinstance(event, Ended):
                    return None
                received += event[1]
        except (BrokenPipeError, TimeoutError):
            return None
        return received[:-2].decode("ascii")

    def _drop(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None


_ANSWER_TIMEOUT = 30.0

_SERVE = r"""
while read -r number pids; do
    for pid in $pids; do kill "-$number" "$pid"; done
    for dir in /proc/[1-9]*; do
        pid=${dir#/proc/} stat= uid= mark=
        [[ $pid == 1 || $pid == $$ ]] && continue
        IFS= read -r -d '' stat <"$dir/stat"
        set -- ${stat##*) }
        [[ -z ${20-} || $1 == [ZX] ]] && continue
        while read -r key _ effective _; do [[ $key == Uid: ]] && uid=$effective && break; done <"$dir/status"
        while IFS= read -r -d '' entry; do
            [[ $entry == TMAX_EXEC=* ]] && mark=${entry#*=} && break
        done <"$dir/environ"
        [[ $mark == *[!0-9a-f]* ]] && mark=
        [[ -n $uid ]] && echo "$pid $2 $4 ${20} $uid $mark"
    done
    echo .
done 2>/dev/null
"""


def _with_descendants(table: Table, roots: set[int], *, spared: Collection[int]) -> set[int]:
    found = set(roots)
    while grown := {pid for pid, process in table.items() if process.parent in found} - found - set(spared):
        found |= grown
    return found


def _namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None


def _control_group(leader: int) -> Path | None:
    """The file that lists the container's processes; None where it is not where control groups usually are."""
    try:
        lines = Path(f"/proc/{leader}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers in ("pids", "") and place.strip("/"):
            listing = Path("/sys/fs/cgroup", controllers, place.strip("/"), "cgroup.procs")
            if listing.is_file():
                return listing
    return None


def _read(pid: int, leader: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    fields = stat.rpartition(b") ")[2].split()
    if fields[0] in (b"Z", b"X"):
        return None
    parent, session, start = int(fields[1]), int(fields[3]), int(fields[19])
    return Process(pid, parent, session, start, uid, orphan=parent == leader, mark=_mark(pid))


def _mark(pid: int) -> str:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{MARK}=".encode()
    return next((entry[len(prefix) :].decode("ascii", "replace") for entry in entries if entry.startswith(prefix)), "")
