"""Asks this process's warden to start sandboxes, place commands into them and touch their files.

The rule: one warden serves a process and ends with it; every request has a reply socket of its own, so any number
of threads may ask at once.
"""

import array
import contextlib
import marshal
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tmax.errors import SandboxError, StartError
from tmax.sandbox import warden_kernel

IdMode = Literal["root", "plain", "subids", "one"]
"""How users inside map to users of the host. We are root: one to one, in a user namespace, or without one where that
does not work. An ordinary user: through /etc/subuid, or one id only."""

NAMESPACES = (
    warden_kernel.CLONE_NEWNS | warden_kernel.CLONE_NEWPID | warden_kernel.CLONE_NEWIPC | warden_kernel.CLONE_NEWUTS
)
NETWORK = warden_kernel.CLONE_NEWNET

# Stand-ins for the packages above the warden's modules: the real ones load half of this project.
_PROGRAM = """
import sys, types
for name, path in (("tmax", sys.argv[1]), ("tmax.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from tmax.sandbox.warden import main
main()
"""

_REQUEST_TIMEOUT = 60.0
_CALL_TIMEOUT = 600.0


@dataclass(frozen=True)
class Channel:
    """A socket on which a warden, or its placer in one sandbox, takes requests."""

    socket: socket.socket

    def close(self) -> None:
        """End what serves it, and wait for that."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            readable(self.socket.fileno(), 2.0)
        self.socket.close()


@dataclass(frozen=True)
class Warden(Channel):
    """This process's warden."""

    process: subprocess.Popen[bytes]
    mode: IdMode

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None


_lock = threading.Lock()
_wardens: dict[tuple[int, IdMode], Warden] = {}


def warden(mode: IdMode | None = None) -> Warden:
    """This process's warden, started on first use, with the best id mode that works here or the one asked for.

    Raises StartError where none can be started.
    """
    with _lock:
        modes: Sequence[IdMode] = (mode,) if mode else (("root", "plain") if os.geteuid() == 0 else ("subids", "one"))
        problem: StartError | None = None
        for candidate in modes:
            key = (os.getpid(), candidate)
            found = _wardens.get(key)
            if found is not None and found.alive():
                return found
            if found is not None:
                found.close()
            try:
                _wardens[key] = _start_warden(candidate)
                return _wardens[key]
            except StartError as error:
                problem = problem or error
                if candidate == modes[-1]:
                    raise
        raise problem or StartError("no way to start a sandbox", kind="engine")


def _start_warden(mode: IdMode) -> Warden:
    if mode == "subids" and not _sub_ids():
        raise StartError("no subordinate ids", kind="engine", hint="install uidmap and see /etc/subuid")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    package = Path(warden_kernel.__file__).parents[1]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(package), str(theirs.fileno()), mode, "enter"],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={}, start_new_session=True, cwd="/",
        )  # fmt: skip
    ours.settimeout(_REQUEST_TIMEOUT)
    try:
        answer = ours.recv(16)
        if answer == b"map":
            _map_ids(process.pid, mode)
            ours.send(b"g")
            answer = ours.recv(16)
    except (OSError, subprocess.SubprocessError) as error:
        answer = str(error).encode()
    assert process.stderr is not None
    if answer != b"ready":
        process.kill()
        lines = process.stderr.read().decode("utf-8", "replace").strip().splitlines() or [answer.decode()]
        process.wait()
        ours.close()
        raise StartError(
            f"user namespaces do not work here: {lines[-1]}", kind="engine",
            hint="allow user namespaces (kernel.unprivileged_userns_clone, AppArmor; --privileged in a container), "
            "or use Docker",
        )  # fmt: skip
    process.stderr.close()
    ours.settimeout(None)
    return Warden(ours, process, mode)


def _sub_ids() -> list[tuple[str, str, int, int]]:
    """(map program, id map's flag, first id, count) for users and for groups, where both are granted."""
    name = pwd.getpwuid(os.getuid()).pw_name
    found = []
    for tool, file in (("newuidmap", "/etc/subuid"), ("newgidmap", "/etc/subgid")):
        path = shutil.which(tool)
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        ranges = [line.split(":") for line in lines if line.split(":")[0] in (name, str(os.getuid()))]
        wide = [(int(first), int(count)) for _, first, count in ranges if int(count) >= 65_535]
        if path is None or not wide:
            return []
        found.append((path, file, *wide[0]))
    return found


def _map_ids(pid: int, mode: IdMode) -> None:
    if mode == "root":
        for kind in ("uid_map", "gid_map"):
            ours = [line.split() for line in Path(f"/proc/self/{kind}").read_text(encoding="utf-8").splitlines()]
            Path(f"/proc/{pid}/{kind}").write_text("".join(f"{first} {first} {count}\n" for first, _, count in ours))
        return
    for (tool, _, first, count), own in zip(_sub_ids(), (os.getuid(), os.getgid()), strict=True):
        subprocess.run(
            [tool, str(pid), "0", str(own), "1", "1", str(first), str(min(count, 65_535))],
            check=True, capture_output=True, timeout=20,
        )  # fmt: skip


class Process:
    """A command that the warden started; `pid` is its process id on the host."""

    def __init__(self, reply: socket.socket) -> None:
        self._reply = reply
        self.exit_code: int | None = None
        self.pid = -1
        try:
            self._take(_REQUEST_TIMEOUT)
        except (OSError, SandboxError):
            reply.close()
            raise

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._reply.fileno()

    def poll(self) -> int | None:
        """The exit code as a shell would give it, or None while the process runs. Raises SandboxError."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> int | None:
        """As `poll`, but waits for the end."""
        if self.exit_code is None:
            self._take(timeout)
        return self.exit_code

    def close(self) -> None:
        """Forget the process."""
        self._reply.close()

    def _take(self, timeout: float) -> None:
        if not readable(self._reply.fileno(), timeout):
            return
        tag, value = _receive(self._reply)[:2]
        if tag == b"P":
            self.pid = value
        elif tag == b"X":
            self.exit_code = value if value >= 0 else 128 - value
        else:
            self.exit_code = -1
            raise _as_os_error(value) if value["errno"] else _as_error(value)


def spawn(
    keeper: Channel,
    argv: Sequence[str],
    fds: tuple[int, int, int],
    *,
    env: Mapping[str, str],
    cwd: Sequence[str] = ("/",),
    uid: int = 0,
    gid: int = 0,
) -> Process:
    """Run a command whose descriptors 0, 1 and 2 are `fds`, in the first of the directories `cwd` that can be entered.

    Raises OSError (`filename` is `command` or `directory`) where it cannot be run, SandboxError where the warden or
    the sandbox is gone.
    """
    fields = {"op": "spawn", "argv": list(argv), "env": dict(env), "cwd": list(cwd), "uid": uid, "gid": gid}
    return Process(_ask(keeper.socket, fields, fds))


def place(
    keeper: Warden,
    leader: int,
    pidfd: int,
    *,
    agent: bool,
    enter: int,
    rlimits: Mapping[str, int],
    cgroups: Sequence[str],
) -> Channel:
    """A channel on which `spawn`, `get`, `put`, `kill` and `kill_tree` happen inside the sandbox whose first process is
    `leader` (host id, and opened).

    It serves all users; where one id is mapped, `agent` makes one that serves the agent alone. Raises SandboxError.
    """
    fields = {
        "op": "place", "leader": leader, "agent": agent, "enter": enter, "rlimits": dict(rlimits),
        "cgroups": list(cgroups),
    }  # fmt: skip
    reply = _ask(keeper.socket, fields, (pidfd,))
    try:
        tag, value, _ = _receive(reply)
    except SandboxError:
        reply.close()
        raise
    if tag == b"E":
        reply.close()
        raise _as_error(value)
    return Channel(reply)


def call(keeper: Channel, op: str, fields: Mapping[str, Any], *, fds: Iterable[int] = ()) -> Any:
    """Run one of the warden's operations to its end and return its answer; a descriptor for `get`.

    Raises SandboxError where the warden or the sandbox is gone, OSError where the operation failed.
    """
    with _ask(keeper.socket, {"op": op, **fields}, fds) as reply:
        if not readable(reply.fileno(), _CALL_TIMEOUT):
            raise SandboxError(f"no answer to `{op}`", kind="process", hint="try again")
        tag, value, received = _receive(reply)
    if tag == b"R":
        return received[0] if received else value
    raise _as_os_error(value) if tag == b"E" and value["errno"] else _as_error(value)


def kill_tree(
    placer: Channel, root: int, *, since: int, spare: Iterable[int] = (), number: int = signal.SIGKILL, with_root: bool
) -> None:
    """Signal what a command started: what descends from the process `root` but not from its children `spare`, and the
    orphans (children of the sandbox's first process) that started at or after the clock tick `since`. Host ids.

    SIGKILL is repeated until nothing is left, and goes to the root last, if at all; other signals also go to the root.
    """
    fields = {"root": root, "since": since, "spare": list(spare), "signal": int(number), "with_root": with_root}
    call(placer, "kill_tree", fields)


def children(pid: int) -> list[int]:
    """Host ids of the children of a process's first thread; none where it is gone."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _ask(channel: socket.socket, fields: dict[str, Any], fds: Iterable[int]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    body = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        os.write(body, marshal.dumps(fields))
        control = array.array("i", [body, theirs.fileno(), *fds])
        channel.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, control)])
    except OSError as error:
        ours.close()
        raise SandboxError(f"the warden of sandboxes is gone: {error}", kind="process", hint="try again") from error
    finally:
        os.close(body)
        theirs.close()
    return ours


def _receive(reply: socket.socket) -> tuple[bytes, Any, list[int]]:
    data, control, _, _ = reply.recvmsg(65_536, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise SandboxError("the warden of sandboxes is gone", kind="process", hint="try again")
    fds = array.array("i")
    for _, _, body in control:
        fds.frombytes(body)
    return data[:1], marshal.loads(data[1:]), list(fds)


def readable(fd: int, timeout: float) -> bool:
    """Whether a descriptor can be read within `timeout` seconds."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout) * 1000))


def _as_os_error(value: Mapping[str, Any]) -> OSError:
    return OSError(value["errno"], value["error"], value.get("where"))


def _as_error(value: Any) -> SandboxError:
    text = value.get("error") if isinstance(value, dict) else "it ended early"
    return SandboxError(f"the sandbox did not do as asked: {text}", kind="process", hint="try again")


def close_quietly(*fds: int) -> None:
    """Close descriptors; one that is closed already does no harm."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
