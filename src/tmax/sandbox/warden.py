"""A small process of its own that starts sandboxes, places commands into them and touches their files.

It runs with nothing but the standard library, without threads, so that a caller full of threads never forks. The rule:
what it does inside a sandbox's namespaces must not let the sandbox reach it. So it and its children cannot be traced,
they stay outside the sandbox's process ids, and their program lies on a read-only mount.
"""

import array
import errno
import marshal
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from tmax.sandbox import warden_files, warden_kernel, warden_layers, warden_processes
from tmax.sandbox.warden_files import Opened

Fields = dict[str, Any]
Operation = Callable[[Fields, list[int]], Any]

_IN_PLACE: dict[str, Operation] = {
    "get": warden_files.get, "put": warden_files.put, "state": warden_files.make_state,
    "discard": warden_files.discard,
}  # fmt: skip
_FORKED: dict[str, Operation] = {"layer": warden_layers.write, "apply": warden_layers.apply}

_DEFAULT_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def main() -> None:
    """Entry; arguments are the number of the socket, an `entry.IdMode`, and `enter`."""
    channel = socket.socket(fileno=int(sys.argv[-3]))
    mode, stage = sys.argv[-2:]
    if stage == "enter":
        _enter_namespaces(channel, mode)
        os.set_inheritable(channel.fileno(), True)
        os.execv(sys.executable, [*sys.orig_argv[:-1], "serve"])
    channel.set_inheritable(False)
    # While this process can be traced, /proc/self belongs to it: the agent's user namespace is made first.
    agent_namespace = _make_agent_namespace() if mode == "one" else None
    if mode != "plain":
        # Nothing in a sandbox makes user namespaces, in which it would be root over a part of the kernel.
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    warden_kernel.hide()
    channel.send(b"ready")
    Warden(channel, agent_namespace, None).serve()


def _enter_namespaces(channel: socket.socket, mode: str) -> None:
    if mode != "plain":
        uid, gid = os.getuid(), os.getgid()
        warden_kernel.unshare(warden_kernel.CLONE_NEWUSER)
        if mode == "one":
            _write_maps(f"0 {uid} 1", f"0 {gid} 1")
        else:
            channel.send(b"map")
            channel.recv(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        _mount_on_trial()
    warden_kernel.unshare(warden_kernel.CLONE_NEWNS)
    warden_kernel.mount("", "/", "", flags=warden_kernel.MS_REC | warden_kernel.MS_SLAVE)
    # A command that is a script of `#!/proc/self/exe` would run this program inside and could then overwrite it.
    program = os.path.realpath(sys.executable)
    warden_kernel.mount(program, program, "", flags=warden_kernel.MS_BIND)
    warden_kernel.make_read_only(program)


def _mount_on_trial() -> None:
    """Raise OSError where a user namespace may not mount what a sandbox needs: /proc, as in some containers, or an
    overlay over the host's programs, as where these hold other mounts."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            warden_kernel.unshare(warden_kernel.CLONE_NEWPID | warden_kernel.CLONE_NEWNS)
            inner = os.fork()
            if inner == 0:
                warden_kernel.mount("", "/", "", flags=warden_kernel.MS_REC | warden_kernel.MS_SLAVE)
                warden_kernel.mount("proc", "/proc", "proc")
                warden_kernel.mount("tmpfs", "/tmp", "tmpfs")
                os.mkdir("/tmp/empty")  # noqa: PTH102
                warden_kernel.mount("overlay", "/tmp", "overlay", options="lowerdir=/tmp/empty:/usr,userxattr")
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        raise OSError(number, f"/proc or an overlay over /usr cannot be mounted: {os.strerror(number)}")


def _write_maps(uid_map: str, gid_map: str) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", uid_map), ("gid_map", gid_map)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _make_agent_namespace() -> int:
    """A user namespace in which the only id there is shows as 1000."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        warden_kernel.unshare(warden_kernel.CLONE_NEWUSER)
        _write_maps("1000 0 1", "1000 0 1")
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        os._exit(0)
    os.close(ready[1])
    os.read(ready[0], 1)
    namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.write(go[1], b"g")
    os.waitpid(child, 0)
    for fd in (ready[0], *go):
        os.close(fd)
    return namespace


class Warden:
    """Serves requests of one process until the other end of its socket is gone: for the machine, or as a placer for
    one sandbox, whose processes it then knows."""

    def __init__(
        self, channel: socket.socket, agent_namespace: int | None, processes: warden_processes.Processes | None
    ) -> None:
        self._channel = channel
        self._agent_namespace = agent_namespace
        self._processes = processes
        self._poll = select.epoll()
        self._poll.register(channel.fileno(), select.EPOLLIN)
        self._children: dict[int, tuple[int, socket.socket | None]] = {}

    def serve(self) -> None:
        """Take requests and report the ends of children."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._channel.fileno():
                    self._reap(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        data, control, _, _ = self._channel.recvmsg(16, socket.CMSG_SPACE(8 * 4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds = array.array("i")
        for _, _, body in control:
            fds.frombytes(body[: len(body) - len(body) % 4])
        if len(fds) < 2:
            # There was no room for them; the caller sees its end of the reply close.
            for fd in fds:
                os.close(fd)
            return True
        reply, rest = socket.socket(fileno=fds[1]), list(fds[2:])
        try:
            with open(fds[0], "rb") as file:
                file.seek(0)
                fields = marshal.load(file)
            self._do(fields, reply, rest)
        except OSError as error:
            _tell_error(reply, error)
        except (ValueError, RecursionError) as error:
            _tell_error(reply, OSError(errno.EINVAL, str(error)))
        finally:
            for fd in rest:
                os.close(fd)
        return True

    def _do(self, fields: Fields, reply: socket.socket, fds: list[int]) -> None:
        op = fields["op"]
        if op == "spawn":
            self._spawn(fields, reply, fds)
        elif op in ("kill", "kill_tree"):
            self._kill(fields, reply)
        elif op in _IN_PLACE:
            _answer(reply, _IN_PLACE[op](fields, fds))
        else:
            self._fork(fields, reply, fds)

    def _spawn(self, fields: Fields, reply: socket.socket, fds: list[int]) -> None:
        """Run a command with descriptors 0, 1 and 2, in the first of the directories `cwd` that can be entered."""
        with _User(fields["uid"], fields["gid"]):
            try:
                _change_directory(fields["cwd"])
                pid = _execute(fields["argv"], fields["env"], fds)
            finally:
                os.chdir("/")
        self._watch(pid, reply)
        _tell(reply, b"P", pid)

    def _kill(self, fields: Fields, reply: socket.socket) -> None:
        assert self._processes is not None
        if fields["op"] == "kill":
            left = self._processes.kill(fields["uid"], fields["timeout"])
        else:
            # The number of a command that has been waited for may be another process's by now.
            root = fields["root"] if any(pid == fields["root"] for pid, _ in self._children.values()) else None
            left = self._processes.signal_tree(
                root, fields["spare"], fields["since"], fields["signal"], with_root=fields["with_root"]
            )
        # Whoever asks next finds its commands ended.
        for pidfd, _ in self._poll.poll(0):
            if pidfd in self._children:
                self._reap(pidfd)
        _answer(reply, left)

    def _fork(self, fields: Fields, reply: socket.socket, fds: list[int]) -> None:
        """Have a forked child do it."""
        pid = os.fork()
        if pid == 0:
            self._child(fields, reply, fds)
        if fields["op"] == "place":
            # It is the child's own channel now: ours must not keep it open.
            reply.close()
            self._watch(pid, None)
        else:
            self._watch(pid, reply)

    def _child(self, fields: Fields, reply: socket.socket, fds: list[int]) -> None:
        """Never returns."""
        self._channel.close()
        self._poll.close()
        try:
            if fields["op"] == "place":
                _place(fields, reply, fds.pop(), self._agent_namespace)
            else:
                _answer(reply, _FORKED[fields["op"]](fields, fds))
        except OSError as error:
            _tell_error(reply, error)
        except (ValueError, RecursionError) as error:
            _tell_error(reply, OSError(errno.EINVAL, str(error)))
        finally:
            # A child must not fall back into the loop of its parent.
            os._exit(0)

    def _watch(self, pid: int, reply: socket.socket | None) -> None:
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, reply)
        self._poll.register(pidfd, select.EPOLLIN)

    def _reap(self, pidfd: int) -> None:
        pid, reply = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if reply is not None:
            _tell(reply, b"X", exit_code)
            reply.close()


def _place(fields: Fields, channel: socket.socket, leader: int, agent_namespace: int | None) -> None:
    """Become the placer of commands in one sandbox: root in all its namespaces but that of process ids, where only its
    children are, so that the sandbox neither sees nor reaches it."""
    for procs in fields["cgroups"]:
        with open(procs, "w") as file:
            file.write("0")
    processes = warden_processes.Processes(fields["leader"])
    warden_kernel.setns(leader, fields["enter"])
    os.close(leader)
    for name, value in fields["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.umask(0o022)
    if fields["agent"]:
        # The one id that is mapped shows as the agent's there.
        assert agent_namespace is not None
        warden_kernel.setns(agent_namespace, warden_kernel.CLONE_NEWUSER)
    elif agent_namespace is None:
        os.setgroups([0])
    warden_kernel.limit_privileges(0 if fields["agent"] else warden_kernel.KEPT_CAPABILITIES)
    warden_kernel.hide()
    _tell(channel, b"R", None)
    Warden(channel, None, processes).serve()


class _User:
    """Another user for the length of a block, such that a program that is started in it can never come back."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid, self.gid = uid, gid

    def __enter__(self) -> None:
        if not (self.uid or self.gid):
            return
        try:
            os.setgroups([self.gid])
            os.setresgid(self.gid, self.gid, 0)
            # The saved id lets us back; execution overwrites it.
            os.setresuid(self.uid, self.uid, 0)
        except OSError:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.uid or self.gid:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups([0])
            warden_kernel.hide()


def _change_directory(cwd: list[str]) -> None:
    """Enter the first of the directories that lets us. Raises the first one's OSError where none does."""
    first: OSError | None = None
    for path in cwd:
        try:
            os.chdir(os.fsencode(path))
            return
        except OSError as error:
            first = first or OSError(error.errno, error.strerror, "directory")
    if first is not None:
        raise first


def _execute(argv: list[str], environment: dict[str, str], fds: list[int]) -> int:
    """Start a program in a session of its own, without copying this process's memory; its process id."""
    arguments = [os.fsencode(part) for part in argv]
    env = {os.fsencode(key): os.fsencode(value) for key, value in environment.items()}
    name = arguments[0]
    path = env.get(b"PATH", b"").split(b":")
    folders = [b""] if b"/" in name else [folder.rstrip(b"/") + b"/" for folder in path if folder]
    worst = OSError(errno.ENOENT, "No such file or directory", "command")
    for folder in folders:
        try:
            return os.posix_spawn(
                folder + name, arguments, env, setsid=True, setsigmask=[], setsigdef=_DEFAULT_SIGNALS,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            )  # fmt: skip
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                worst = OSError(error.errno, error.strerror, "command")
    raise worst


def _answer(reply: socket.socket, value: Any) -> None:
    if isinstance(value, Opened):
        socket.send_fds(reply, [b"R" + marshal.dumps(None)], [value.fd])
        os.close(value.fd)
    else:
        _tell(reply, b"R", value)
    reply.close()


def _tell_error(reply: socket.socket, error: OSError) -> None:
    where = error.filename if error.filename is None else os.fsdecode(error.filename)
    _tell(reply, b"E", {"error": error.strerror, "errno": error.errno, "where": where})
    reply.close()


def _tell(reply: socket.socket, tag: bytes, value: Any) -> None:
    try:
        reply.send(tag + marshal.dumps(value))
    except OSError:
        return
