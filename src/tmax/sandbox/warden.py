"""A small process of its own that starts sandboxes, places commands into them and touches their files.

It is run as a program with nothing but the standard library, stays single-threaded and forks for every request, so
that a caller full of threads never forks. The rule: what a forked child does inside a sandbox's namespaces before
it executes the command must not let the sandbox reach this process or its program (it is not dumpable, and its
program lies on a read-only mount).
"""

import array
import ctypes
import errno
import marshal
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
MS_NODEV, MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 0x4, 0x1000, 0x4000, 0x80000, 0x2
SYS_MOUNT_SETATTR, AT_FDCWD = 442, -100
CAPABILITY_VERSION = 0x20080522

KEPT_CAPABILITIES = (
    (1 << 0) | (1 << 1) | (1 << 3) | (1 << 4) | (1 << 5) | (1 << 6) | (1 << 7) | (1 << 8) | (1 << 10) | (1 << 18)
    | (1 << 31)
)  # fmt: skip
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap."""
LAST_CAPABILITY = 63

LIBC = ctypes.CDLL(None, use_errno=True)

Reply = socket.socket
Fields = dict[str, Any]


def main() -> None:
    """Entry: `warden.py SOCKET_FD MODE STAGE`; see `entry.IdMode`."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    mode, stage = sys.argv[2], sys.argv[3]
    if stage == "enter":
        _enter_namespaces(channel, mode)
        os.set_inheritable(channel.fileno(), True)
        os.execv(sys.executable, [*sys.orig_argv[:-1], "serve"])
    channel.set_inheritable(False)
    # While this process is dumpable, /proc/self belongs to it: the agent's user namespace is made first.
    agent_namespace = _make_agent_namespace() if mode == "one" else None
    if mode != "plain":
        # Nothing in a sandbox makes user namespaces, in which it would be root over a part of the kernel.
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    _prctl(PR_SET_DUMPABLE, 0)
    channel.send(b"ready")
    Warden(channel, agent_namespace).serve()


def _enter_namespaces(channel: socket.socket, mode: str) -> None:
    if mode != "plain":
        uid, gid = os.getuid(), os.getgid()
        _check(LIBC.unshare(CLONE_NEWUSER))
        if mode == "one":
            _write_maps(f"0 {uid} 1", f"0 {gid} 1")
        else:
            channel.send(b"map")
            channel.recv(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        _mount_proc_on_trial()
    _check(LIBC.unshare(CLONE_NEWNS))
    _mount(None, "/", MS_REC | MS_SLAVE)
    # A command that is a script of `#!/proc/self/exe` would run this program inside and could then overwrite it.
    program = os.path.realpath(sys.executable)
    _mount(program, program, MS_BIND)
    read_only = array.array("Q", [1, 0, 0, 0])
    address, _ = read_only.buffer_info()
    LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, program.encode(), 0, ctypes.c_void_p(address), ctypes.c_size_t(32))


def _mount_proc_on_trial() -> None:
    """Raise OSError where a user namespace may not mount /proc, as in some containers."""
    child = os.fork()
    if child == 0:
        if LIBC.unshare(CLONE_NEWPID | CLONE_NEWNS) < 0:
            os._exit(ctypes.get_errno())
        inner = os.fork()
        if inner:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
        LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)
        done = LIBC.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None)
        os._exit(0 if done == 0 else ctypes.get_errno())
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        raise OSError(number, f"cannot mount /proc: {os.strerror(number)}")


def _write_maps(uid_map: str, gid_map: str) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", uid_map), ("gid_map", gid_map)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _make_agent_namespace() -> int:
    """A user namespace in which the only id there is shows as 1000."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _check(LIBC.unshare(CLONE_NEWUSER))
        _write_maps("1000 0 1", "1000 0 1")
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.write(go[1], b"g")
    os.waitpid(child, 0)
    for fd in (*ready, *go):
        os.close(fd)
    return namespace


class Warden:
    """Serves requests of one process until the other end of its socket is gone."""

    def __init__(self, channel: socket.socket, agent_namespace: int | None) -> None:
        self._channel = channel
        self._agent_namespace = agent_namespace
        self._poll = select.epoll()
        self._poll.register(channel.fileno(), select.EPOLLIN)
        self._children: dict[int, tuple[int, Reply | None]] = {}

    def serve(self) -> None:
        """Take requests and report the ends of children."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._channel.fileno():
                    self._reap(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        data, control, _, _ = self._channel.recvmsg(16, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds = array.array("i")
        for _, _, body in control:
            fds.frombytes(body[: len(body) - len(body) % 4])
        body_fd, reply_fd, *rest = fds
        reply = socket.socket(fileno=reply_fd)
        try:
            with open(body_fd, "rb") as file:
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

    def _do(self, fields: Fields, reply: Reply, fds: list[int]) -> None:
        if fields["op"] == "spawn":
            self._spawn(fields, reply, fds)
        elif fields["op"] in _IN_PLACE:
            _IN_PLACE[fields["op"]](fields, reply, fds)
        else:
            self._fork(fields, reply, fds)

    def _spawn(self, fields: Fields, reply: Reply, fds: list[int]) -> None:
        """Run a command with descriptors 0, 1 and 2, in the first of the directories `cwd` that can be entered."""
        uid, gid = fields["uid"], fields["gid"]
        with _as_user(uid, gid):
            _change_directory(fields["cwd"])
            try:
                pid = _execute(fields["argv"], fields["env"], fds)
            finally:
                os.chdir("/")
        self._watch(pid, reply)
        _tell(reply, b"P", pid)

    def _fork(self, fields: Fields, reply: Reply, fds: list[int]) -> None:
        """Have a forked child do it."""
        pid = os.fork()
        if pid == 0:
            self._child(fields, reply, fds)
        if fields["op"] == "place":
            # The child's own channel: ours must not keep it open.
            reply.close()
            self._watch(pid, None)
        else:
            self._watch(pid, reply)

    def _watch(self, pid: int, reply: Reply | None) -> None:
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

    def _child(self, fields: Fields, reply: Reply, fds: list[int]) -> None:
        """Never returns."""
        self._channel.close()
        self._poll.close()
        try:
            if fields["op"] == "place":
                _place(fields, reply, fds[0], self._agent_namespace)
            else:
                _FORKED[fields["op"]](fields, reply, fds)
        except OSError as error:
            _tell_error(reply, error)
        except BaseException as error:  # a child must not fall back into the loop of its parent
            _tell(reply, b"E", {"error": f"{type(error).__name__}: {error}", "errno": 0})
        os._exit(0)


def _place(fields: Fields, channel: Reply, leader: int, agent_namespace: int | None) -> None:
    """Become the placer of commands in one sandbox: root in all its namespaces but that of process ids, where only its
    children are, so that the sandbox neither sees nor reaches it."""
    for procs in fields["cgroups"]:
        with open(procs, "w") as file:
            file.write("0")
    global _host_processes
    _host_processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _check(LIBC.setns(leader, fields["enter"]))
    os.close(leader)
    for name, value in fields["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.umask(0o022)
    kept = KEPT_CAPABILITIES
    if fields["agent"]:
        # The one id that is mapped shows as the agent's there.
        assert agent_namespace is not None
        _check(LIBC.setns(agent_namespace, CLONE_NEWUSER))
        kept = 0
    elif agent_namespace is None:
        os.setgroups([0])
    _limit_capabilities(kept)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)
    _tell(channel, b"R", None)
    Warden(channel, None).serve()


def _limit_capabilities(kept: int) -> None:
    for number in range(LAST_CAPABILITY + 1):
        if not kept >> number & 1:
            LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    header = array.array("I", [CAPABILITY_VERSION, 0])
    low, high = kept & 0xFFFFFFFF, kept >> 32
    data = array.array("I", [low, low, 0, high, high, 0])
    _check(LIBC.capset(ctypes.c_void_p(header.buffer_info()[0]), ctypes.c_void_p(data.buffer_info()[0])))


class _as_user:
    """Another user for the length of a block, in such a way that a command started in it can never come back."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid, self.gid = uid, gid

    def __enter__(self) -> None:
        if self.uid or self.gid:
            os.setgroups([self.gid])
            os.setresgid(self.gid, self.gid, 0)
            # The saved id lets us back; execution overwrites it.
            os.setresuid(self.uid, self.uid, 0)

    def __exit__(self, *_: object) -> None:
        if self.uid or self.gid:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups([0])
            _prctl(PR_SET_DUMPABLE, 0)


def _execute(argv: list[str], environment: dict[str, str], fds: list[int]) -> int:
    """Start a program in a session of its own, without forking this process's memory; its process id."""
    arguments = [os.fsencode(part) for part in argv]
    env = {os.fsencode(key): os.fsencode(value) for key, value in environment.items()}
    name = arguments[0]
    folders = (
        [b""] if b"/" in name else [os.path.join(folder, b"") for folder in env.get(b"PATH", b"").split(b":") if folder]
    )
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


_DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]


def _change_directory(cwd: list[str]) -> None:
    """Enter the first of the directories that lets us. Raises the first one's OSError where none does."""
    first: OSError | None = None
    for path in cwd:
        try:
            return os.chdir(os.fsencode(path))
        except OSError as error:
            first = first or OSError(error.errno, error.strerror, "directory")
    if first is not None:
        raise first
    return None


def _get(fields: Fields, reply: Reply, fds: list[int]) -> None:
    fd = os.open(os.fsencode(fields["path"]), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOENT, "not a regular file", fields["path"])
        socket.send_fds(reply, [b"R" + marshal.dumps(None)], [fd])
    finally:
        os.close(fd)
    reply.close()


def _put(fields: Fields, reply: Reply, fds: list[int]) -> None:
    parent, name = os.path.split(os.fsencode(fields["path"]))
    _make_parents(parent)
    where = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _copy(fds[0], name, where, fields)
    finally:
        os.close(where)
    _tell(reply, b"R", None)
    reply.close()


def _make_parents(path: bytes) -> None:
    parts = path.split(b"/")
    for count in range(2, len(parts) + 1):
        try:
            os.mkdir(b"/".join(parts[:count]), 0o755)
        except FileExistsError:
            continue


def _copy(source: int, name: bytes, where: int, fields: Fields) -> None:
    """Copy what `source` is open on to `name` in the directory `where`; fields give owner and modes (None: the source's).

    An existing directory is merged into, anything else is replaced; no link is followed.
    """
    kind = os.fstat(source).st_mode
    if stat.S_ISREG(kind):
        made = _make_file(name, where)
        while os.sendfile(made, source, None, 1 << 30):
            pass
        _finish(made, fields, kind, fields["mode"])
    elif stat.S_ISDIR(kind):
        made = _make_directory(name, where)
        with os.scandir(source) as entries:
            found = sorted(os.fsencode(entry.name) for entry in entries)
        for child in found:
            _copy_child(source, child, made, fields)
        _finish(made, fields, kind, fields["directory_mode"])
    else:
        raise OSError(errno.EINVAL, "neither a file nor a directory", os.fsdecode(name))


def _copy_child(source: int, name: bytes, made: int, fields: Fields) -> None:
    try:
        target = os.readlink(name, dir_fd=source)
    except OSError:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        try:
            _copy(fd, name, made, fields)
        finally:
            os.close(fd)
        return
    _make_link(name, made, target, fields)


def _make_file(name: bytes, where: int) -> int:
    _unlink(name, where)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=where)


def _make_directory(name: bytes, where: int) -> int:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=where, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=where)
            os.mkdir(name, 0o755, dir_fd=where)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=where)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=where)


def _make_link(name: bytes, where: int, target: bytes, fields: Fields) -> None:
    _unlink(name, where)
    os.symlink(target, name, dir_fd=where)
    os.chown(name, fields["uid"], fields["gid"], dir_fd=where, follow_symlinks=False)


def _finish(made: int, fields: Fields, kind: int, mode: int | None) -> None:
    os.fchown(made, fields["uid"], fields["gid"])
    os.fchmod(made, stat.S_IMODE(kind) if mode is None else mode)
    os.close(made)


def _unlink(name: bytes, where: int) -> None:
    try:
        os.unlink(name, dir_fd=where)
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise OSError(errno.EISDIR, "a directory is in the way", os.fsdecode(name)) from error


def _state(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Make a sandbox's directory, in memory with a bound where that can hold an upper layer; tells whether it is."""
    path = fields["path"]
    os.makedirs(path, mode=0o700, exist_ok=True)
    in_memory = False
    if fields["size_mb"]:
        options = f"size={fields['size_mb']}m,mode=700".encode()
        in_memory = LIBC.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(MS_NODEV), options) == 0
        try:
            os.setxattr(path, "user.overlay.opaque", b"n")
        except OSError:
            LIBC.umount2(os.fsencode(path), MNT_DETACH)
            in_memory = False
    for name, mode in fields["folders"]:
        os.mkdir(os.path.join(path, name))
        os.chmod(os.path.join(path, name), mode)
    _tell(reply, b"R", in_memory)
    reply.close()


def _discard(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Remove a sandbox's directory if it was in memory, or is empty; tells whether it is gone."""
    LIBC.umount2(os.fsencode(fields["path"]), MNT_DETACH)
    try:
        os.rmdir(fields["path"])
    except FileNotFoundError:
        pass
    except OSError:
        _tell(reply, b"R", False)
        return reply.close()
    _tell(reply, b"R", True)
    return reply.close()


def _layer(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Make directories and files of an image layer: mounts the overlays in a mount namespace of its own, changes root
    into them and takes the steps there, so that no link leads out; runs no program."""
    steps = fields["steps"]
    sources = {
        step["source"]: os.open(os.fsencode(step["source"]), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        for step in steps
        if step["kind"] == "file" and step["source"] is not None
    }
    _check(LIBC.unshare(CLONE_NEWNS))
    scratch = fields["scratch"]
    for overlay in fields["overlays"]:
        where = scratch + overlay["mount"]
        os.makedirs(where, exist_ok=True)
        names = {"lowerdir": ":".join(map(_escaped, reversed(overlay["lowers"])))}
        names |= {"upperdir": _escaped(overlay["upper"]), "workdir": _escaped(overlay["work"])}
        data = ",".join(f"{key}={value}" for key, value in names.items()) + ",userxattr"
        target, options = os.fsencode(where), os.fsencode(data)
        _check(LIBC.mount(b"overlay", target, b"overlay", ctypes.c_ulong(0), options))
    os.chroot(scratch)
    os.chdir("/")
    os.umask(0o022)
    for step in steps:
        _STEPS[step["kind"]](step, sources)
    _tell(reply, b"R", None)


def _escaped(path: str) -> str:
    return "".join(f"\\{char}" if char in "\\:," else char for char in path)


def _step_directory(step: Fields, sources: dict[str, int]) -> None:
    path = os.fsencode(step["path"])
    if os.path.isdir(path):
        return
    os.makedirs(path, exist_ok=True)
    uid, gid = _owner(step["owner"])
    os.chown(path, uid, gid)
    os.chmod(path, step["mode"])


def _step_file(step: Fields, sources: dict[str, int]) -> None:
    path = os.fsencode(step["path"])
    if step["name"] is not None and (path.endswith(b"/") or os.path.isdir(path)):
        path = os.path.join(path, os.fsencode(step["name"]))
    parent, name = os.path.split(path)
    _make_parents(parent.rstrip(b"/"))
    where = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    uid, gid = _owner(step["owner"])
    fields = {"uid": uid, "gid": gid, "mode": step["mode"], "directory_mode": None}
    if step["link"] is not None:
        _make_link(name, where, os.fsencode(step["link"]), fields)
    elif step["source"] is None:
        made = _make_file(name, where)
        with open(os.dup(made), "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(step["content"])
        _finish(made, fields, 0o644, step["mode"])
    else:
        os.lseek(sources[step["source"]], 0, os.SEEK_SET)
        _copy(sources[step["source"]], name, where, fields)
    os.close(where)


def _step_own(step: Fields, sources: dict[str, int]) -> None:
    """Give a directory to a user, with all that is in it unless `shallow`."""
    uid, gid = _owner(step["owner"])
    top = os.fsencode(step["path"])
    os.chown(top, uid, gid)
    if step["shallow"]:
        return
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)


def _owner(owner: str) -> tuple[int, int]:
    """`user[:group]`, names or numbers, as the accounts of this root have them."""
    user, _, group = owner.partition(":")
    uid, gid = _account("/etc/passwd", user)
    return uid, _account("/etc/group", group)[0] if group else gid


def _account(file: str, name: str) -> tuple[int, int]:
    number = int(name) if name.isdigit() else None
    with open(file, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.rstrip("\n").split(":")
            if len(words) > 3 and (words[0] == name or (number is not None and words[2] == name)):
                return int(words[2]), int(words[3]) if file.endswith("passwd") else 0
    if number is None:
        raise OSError(errno.ENOENT, f"unknown user or group `{name}`")
    return number, number if file.endswith("passwd") else 0


_STEPS = {"directory": _step_directory, "file": _step_file, "own": _step_own}


def _apply(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Make directories, files, copies of files and links: [kind, path, mode, uid, gid, content or source or target]."""
    os.umask(0o022)
    for kind, path, mode, uid, gid, content in fields["entries"]:
        os.makedirs(path if kind == "directory" else os.path.dirname(path), exist_ok=True)
        if kind == "link":
            os.symlink(content, path)
            continue
        if kind == "file":
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(content)
        elif kind == "copy":
            with open(content, "rb") as source, open(path, "wb") as target:
                while data := source.read(1 << 20):
                    target.write(data)
        elif content == "opaque":
            os.setxattr(path, "user.overlay.opaque", b"y")
        os.chown(path, uid, gid)
        os.chmod(path, mode)
    _tell(reply, b"R", None)
    reply.close()


def _kill(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Kill every process of one user id, or all but the first; tells how many were left.

    All are stopped before any is killed, since others would take the places of those that go one by one.
    """
    deadline = time.monotonic() + fields["timeout"]
    found: dict[str, int] = {}
    while (new := _open_processes(fields["uid"], found)) and time.monotonic() < deadline:
        for fd in new.values():
            _signal_opened(fd, signal.SIGSTOP)
        found |= new
    for fd in found.values():
        _signal_opened(fd, signal.SIGKILL)
        os.close(fd)
    while (left := _open_processes(fields["uid"], {})) and time.monotonic() < deadline:
        for fd in left.values():
            _signal_opened(fd, signal.SIGKILL)
            os.close(fd)
        time.sleep(0.001)
    _tell(reply, b"R", len(left))
    reply.close()


def _signal_opened(process: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return


def _open_processes(uid: int | None, known: dict[str, int]) -> dict[str, int]:
    """Directories, in the sandbox's /proc, of live processes but the first: of a user id or of all, by process id."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1" or name in known:
            continue
        try:
            directory = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with open(os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as file:
                lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except OSError:
            lines = {"State": "X", "Uid": ""}
        if lines["State"][0] not in "ZX" and (uid is None or uid in map(int, lines["Uid"].split())):
            found[name] = directory
        else:
            os.close(directory)
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _kill_tree(fields: Fields, reply: Reply, fds: list[int]) -> None:
    """Signal what a command started; see `entry.kill_tree`. Process ids are the host's."""
    root, number = fields["root"], fields["signal"]
    if number != signal.SIGKILL:
        for pid in [*_started_by(fields), root]:
            _signal(pid, number)
    else:
        deadline = time.monotonic() + 5.0
        if fields["with_root"]:
            _signal(root, signal.SIGSTOP)
        while (found := _started_by(fields)) and time.monotonic() < deadline:
            for pid in found:
                _signal(pid, signal.SIGSTOP)
            for pid in found:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.001)
        if fields["with_root"]:
            _signal(root, signal.SIGKILL)
    _tell(reply, b"R", None)
    reply.close()


def _started_by(fields: Fields) -> list[int]:
    """Live descendants of the root but the spared; and orphans, who are the leader's children, since the given tick."""
    spare = set(fields["spare"])
    queue = [pid for pid in _children(fields["root"]) if pid not in spare]
    queue += [pid for pid in _children(fields["leader"]) if _status_of(pid)[1] >= fields["since"]]
    found: list[int] = []
    while queue:
        pid = queue.pop()
        if _status_of(pid)[0] not in "ZX":
            found.append(pid)
        queue += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=_host_processes)
        with os.scandir(tasks) as entries:
            threads = [entry.name for entry in entries]
        os.close(tasks)
        for thread in threads:
            found += map(int, _read_at(f"{pid}/task/{thread}/children").split())
    except OSError:
        return found
    return found


def _status_of(pid: int) -> tuple[str, int]:
    """State letter and start, in clock ticks since boot."""
    try:
        words = _read_at(f"{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return words[0], int(words[19])


_host_processes = -1
"""The host's /proc, open since before a sandbox's was entered."""


def _read_at(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=_host_processes)
    with open(fd) as file:
        return file.read()


Operation = Callable[[Fields, Reply, list[int]], None]
_IN_PLACE: dict[str, Operation] = {
    "get": _get,
    "put": _put,
    "kill": _kill,
    "kill_tree": _kill_tree,
    "state": _state,
    "discard": _discard,
}
_FORKED: dict[str, Operation] = {"layer": _layer, "apply": _apply}


def _tell_error(reply: Reply, error: OSError) -> None:
    where = error.filename if error.filename is None else os.fsdecode(error.filename)
    _tell(reply, b"E", {"error": error.strerror, "errno": error.errno, "where": where})
    reply.close()


def _tell(reply: Reply, tag: bytes, value: Any) -> None:
    try:
        reply.send(tag + marshal.dumps(value))
    except OSError:
        return


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _prctl(option: int, value: int) -> None:
    _check(LIBC.prctl(option, value, 0, 0, 0))


def _mount(source: str | None, target: str, flags: int) -> None:
    _check(LIBC.mount(source.encode() if source else None, os.fsencode(target), None, ctypes.c_ulong(flags), None))


if __name__ == "__main__":
    main()
