"""One live bubblewrap sandbox: its first process, and the commands that are placed beside it.

The rule: the sandbox lives exactly as long as its first process, which reads a pipe that only we hold.
"""

import errno
import os
import posixpath
import resource
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tmax.config import Limits
from tmax.errors import SandboxError, StartError
from tmax.records import ExecResult
from tmax.sandbox import cgroup, entry
from tmax.sandbox.output import Output
from tmax.sandbox.plan import DEFAULT_PATH
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID, Image, User
from tmax.sandbox.shell import SHELL_COMMAND, BashShell, Ended, Stream

HOST_ENV = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}
"""Environment of what runs outside sandboxes."""

_START_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 10.0
_KILL_TIMEOUT = 10.0
_CHUNK = 1 << 18
_TICKS = os.sysconf("SC_CLK_TCK")

Descriptors = tuple[int, int, int]


@dataclass
class BubblewrapSandbox:
    """See `tmax.sandbox.protocol.Sandbox`."""

    warden: entry.Warden
    image: Image
    limits: Limits
    group: cgroup.Group
    network: bool
    leader: int | None = None
    _pidfd: int = -1
    _life: int = -1
    """Our end of the pipe that the first process reads."""
    _null: int = -1
    _bwrap: entry.Process | None = None
    _placers: dict[bool, entry.Channel] = field(default_factory=dict)

    def begin(self, command: Sequence[str]) -> None:
        """Start bwrap and wait for the first process. Raises StartError."""
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        life_in, self._life = os.pipe2(os.O_CLOEXEC)
        out, out_in = os.pipe2(os.O_CLOEXEC)
        try:
            self._bwrap = entry.spawn(self.warden, command, (life_in, out_in, out_in), env=HOST_ENV)
            os.close(out_in)
            out_in = -1
            # The first process copies its input: it runs when a line comes back.
            os.write(self._life, b"\n")
            said = _read_line(out, time.monotonic() + _START_TIMEOUT)
            if said != b"\n":
                raise StartError(
                    f"bwrap: {said.decode('utf-8', 'replace').strip()}", kind="engine", hint="see `tmax doctor`"
                )
            found = entry.children(self._bwrap.pid)
            if len(found) != 1:
                raise StartError("the sandbox ended as it started", kind="engine", hint="try again")
            self.leader = found[0]
            self._pidfd = os.pidfd_open(self.leader)
            self._confine_leader()
        except OSError as error:
            raise StartError(f"bwrap did not start: {error}", kind="engine", hint="see `tmax doctor`") from error
        finally:
            entry.close_quietly(life_in, out, out_in)

    def close(self) -> None:
        """End every process of the sandbox."""
        entry.close_quietly(self._life)
        if self._bwrap is not None:
            with suppress(SandboxError):
                self._await_end(self._bwrap)
            self._bwrap.close()
        for placer in self._placers.values():
            placer.close()
        self._placers.clear()
        entry.close_quietly(self._pidfd, self._null)
        self._life = self._pidfd = self._null = -1

    def _await_end(self, bwrap: entry.Process) -> None:
        if bwrap.wait(_CLOSE_TIMEOUT) is None and self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            bwrap.wait(_CLOSE_TIMEOUT)

    def exec(self, command: Sequence[str], *, user: User, timeout: float, cwd: str | None = None) -> ExecResult:
        """See the protocol."""
        return self.run(command, lambda fds: self.spawn(command, fds, user=user, cwd=cwd), user=user, timeout=timeout)

    def run(
        self, command: Sequence[str], spawn: Callable[[Descriptors], entry.Process], *, user: User, timeout: float
    ) -> ExecResult:
        """Have `spawn` start the command, with descriptors 0, 1 and 2, and see it to its end. Raises SandboxError."""
        started = time.monotonic()
        since = _tick_now()
        output = Output()
        out, out_in = os.pipe2(os.O_CLOEXEC)
        try:
            process = spawn((self._null, out_in, out_in))
        except OSError as error:
            os.close(out)
            return _not_run(command, error, time.monotonic() - started)
        finally:
            os.close(out_in)
        os.set_blocking(out, False)
        try:
            ended = _read_until_end(out, process, output, started + timeout)
            if not ended:
                self.kill_tree(user, process.pid, since=since, with_root=True)
                process.wait(_KILL_TIMEOUT)
            _drain(out, output)
        finally:
            os.close(out)
            process.close()
        self.check_alive()
        text, missing = output.finish()
        return ExecResult(
            output=text, exit_code=process.exit_code if ended else None, seconds=time.monotonic() - started,
            timed_out=not ended, truncated_chars=missing,
        )  # fmt: skip

    def run_build(self, command: Sequence[str], *, user: str, timeout: float) -> ExecResult:
        """Run a command of a build: as any user of the image, with its environment, to what the time-out allows.

        Raises SandboxError; KeyError where the image has no such user.
        """
        uid, gid, home = (0, 0, "/root") if self.warden.mode == "one" else self._account(user)
        env = {"HOME": home, **self.image.env}
        return self.run(
            command,
            lambda fds: entry.spawn(
                self.placer("root"), command, fds, env=env, cwd=[self.image.workdir], uid=uid, gid=gid
            ),
            user="root",
            timeout=timeout,
        )

    def _account(self, user: str) -> tuple[int, int, str]:
        name, _, group = user.partition(":")
        users = [line.split(":") for line in self.get("/etc/passwd").decode("utf-8", "replace").splitlines()]
        groups = [line.split(":") for line in self.get("/etc/group").decode("utf-8", "replace").splitlines()]
        found = [words for words in users if len(words) > 5 and name in (words[0], words[2])]
        if not found and not name.isdigit():
            raise KeyError(name)
        uid, gid, home = (int(found[0][2]), int(found[0][3]), found[0][5]) if found else (int(name), int(name), "/")
        if group:
            gid = next((int(words[2]) for words in groups if group in (words[0], words[2])), gid)
        return uid, gid, home

    def shell(self, *, user: User) -> BashShell:
        """See the protocol."""
        return BashShell(lambda cwd: PipeChannel(self, user, cwd))

    def put(self, source: Path, target: str, *, user: User, mode: int) -> None:
        """See the protocol."""
        uid = 0 if self.warden.mode == "one" else self.uid_of(user)
        search = mode | (mode & 0o444) >> 2
        fields = {"path": _absolute(target), "uid": uid, "gid": uid, "mode": mode, "directory_mode": search}
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            entry.call(self.placer("root"), "put", fields, fds=(fd,))
        except OSError as error:
            self.check_alive()
            raise SandboxError(
                f"cannot put `{source}` at `{target}`: {error}", kind="disk", hint="check the disk"
            ) from error
        finally:
            os.close(fd)

    def get(self, path: str) -> bytes:
        """See the protocol."""
        try:
            fd = entry.call(self.placer("root"), "get", {"path": _absolute(path)})
        except OSError as error:
            self.check_alive()
            raise FileNotFoundError(error.errno, "no regular file in the sandbox", path) from error
        with open(fd, "rb") as file:
            return file.read()

    def kill_processes(self, *, user: User | None) -> None:
        """See the protocol."""
        # With one id mapped, users cannot be told apart.
        uid = None if user is None or self.warden.mode == "one" else self.uid_of(user)
        try:
            left = entry.call(self.placer("root"), "kill", {"uid": uid, "timeout": _KILL_TIMEOUT})
        except OSError as error:
            self.check_alive()
            raise SandboxError(f"cannot kill processes: {error}", kind="process", hint="try again") from error
        if left:
            raise SandboxError(f"{left} processes cannot be killed", kind="process", hint="try again")

    def spawn(self, command: Sequence[str], fds: tuple[int, int, int], *, user: User, cwd: str | None) -> entry.Process:
        """Start a command. Raises OSError where it cannot be run, SandboxError."""
        home = "/root" if user == "root" else AGENT_HOME
        env = {"PATH": DEFAULT_PATH, "HOME": home, "LANG": "C.UTF-8", **self.image.env}
        places = [self.image.workdir, "/"] if cwd is None else [cwd]
        uid = 0 if self.warden.mode == "one" else self.uid_of(user)
        try:
            return entry.spawn(self.placer(user), command, fds, env=env, cwd=places, uid=uid, gid=uid)
        except OSError:
            self.check_alive()
            raise

    def kill_tree(
        self,
        user: User,
        root: int,
        *,
        since: int,
        spare: Sequence[int] = (),
        number: int = signal.SIGKILL,
        with_root: bool,
    ) -> None:
        """See `entry.kill_tree`; the command is `user`'s."""
        entry.kill_tree(self.placer(user), root, since=since, spare=spare, number=number, with_root=with_root)

    def placer(self, user: User) -> entry.Channel:
        """What places a user's commands; started on first use. Raises SandboxError."""
        agent = user == "agent" and self.warden.mode == "one"
        found = self._placers.get(agent)
        if found is None:
            self.check_alive()
            enter = entry.NAMESPACES if self.network else entry.NAMESPACES | entry.NETWORK
            assert self.leader is not None
            found = entry.place(
                self.warden,
                self.leader,
                self._pidfd,
                agent=agent,
                enter=enter,
                rlimits=self._rlimits(),
                cgroups=self.group.procs,
            )
            self._placers[agent] = found
        return found

    def uid_of(self, user: User) -> int:
        """A user's id inside."""
        return 0 if user == "root" else AGENT_UID

    def check_alive(self) -> None:
        """Raise SandboxError where the first process is gone."""
        if self._pidfd < 0 or entry.readable(self._pidfd, 0.0):
            raise SandboxError("the sandbox is gone", kind="process", hint="try again")

    def _confine_leader(self) -> None:
        """Give the first process the limits of every command: who joins the sandbox takes them from it."""
        for procs in self.group.procs:
            Path(procs).write_text(str(self.leader), encoding="ascii")
        for name, value in self._rlimits().items():
            resource.prlimit(self.leader or 0, getattr(resource, name), (value, value))

    def _rlimits(self) -> dict[str, int]:
        limits = {"RLIMIT_FSIZE": self.limits.file_mb << 20, "RLIMIT_CORE": 0}
        if not self.group.limits_memory:
            limits["RLIMIT_DATA"] = self.limits.memory_mb << 20
        if not self.group.limits_pids:
            limits["RLIMIT_NPROC"] = self.limits.pids
        return limits


class PipeChannel:
    """See `shell.Channel`: a bash with a pipe for each of its streams."""

    def __init__(self, sandbox: BubblewrapSandbox, user: User, cwd: str | None) -> None:
        self._sandbox, self._user = sandbox, user
        self._since = _tick_now()
        self._spare: list[int] = []
        self._last_reads = 64
        stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
        self._output, stdout = os.pipe2(os.O_CLOEXEC)
        self._report, stderr = os.pipe2(os.O_CLOEXEC)
        self._process: entry.Process | None = None
        try:
            self._process = self._spawn((stdin, stdout, stderr), cwd)
        except OSError as error:
            raise SandboxError(
                f"a shell did not start: {error}", kind="process", hint="the image needs bash"
            ) from error
        finally:
            entry.close_quietly(stdin, stdout, stderr)
            if self._process is None:
                entry.close_quietly(self._stdin, self._output, self._report)
        for fd in (self._stdin, self._output, self._report):
            os.set_blocking(fd, False)
        self._poller = select.poll()
        for fd in (self._output, self._report, self._process.fileno()):
            self._poller.register(fd, select.POLLIN)

    def send(self, data: bytes) -> None:
        """See the protocol."""
        ready = select.poll()
        ready.register(self._stdin, select.POLLOUT)
        rest = memoryview(data)
        while rest:
            if not ready.poll(30_000):
                raise SandboxError("the shell does not read", kind="process", hint="try again")
            with suppress(BlockingIOError):
                rest = rest[os.write(self._stdin, rest) :]

    def receive(self, timeout: float) -> tuple[Stream, bytes] | Ended:
        """See the protocol."""
        assert self._process is not None
        ready = {fd for fd, _ in self._poller.poll(timeout * 1000)}
        if not ready:
            raise TimeoutError
        exit_code = self._process.poll() if self._process.fileno() in ready else None
        if exit_code is not None:
            # What it wrote is in the pipes by now; a background process that writes on is not waited for.
            self._last_reads -= 1
        streams: tuple[tuple[int, Stream], ...] = ((self._report, "report"), (self._output, "output"))
        for fd, stream in streams:
            if fd in ready and self._last_reads > 0:
                with suppress(BlockingIOError):
                    if data := os.read(fd, _CHUNK):
                        return stream, data
                    self._poller.unregister(fd)
        if exit_code is None:
            return "report", b""
        self._sandbox.check_alive()
        return Ended(exit_code)

    def mark(self) -> None:
        """See the protocol."""
        assert self._process is not None
        self._since = _tick_now()
        self._spare = entry.children(self._process.pid)

    def interrupt(self, *, force: bool) -> None:
        """See the protocol."""
        assert self._process is not None
        if force:
            self._sandbox.kill_tree(
                self._user, self._process.pid, since=self._since, spare=self._spare, with_root=False
            )
        self._sandbox.kill_tree(
            self._user, self._process.pid, since=self._since, spare=self._spare, number=signal.SIGINT, with_root=True
        )

    def close(self) -> None:
        """See the protocol."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(SandboxError):
            if process.poll() is None:
                self._sandbox.kill_tree(self._user, process.pid, since=self._since, spare=self._spare, with_root=True)
                process.wait(_KILL_TIMEOUT)
        process.close()
        entry.close_quietly(self._stdin, self._output, self._report)

    def _spawn(self, fds: Descriptors, cwd: str | None) -> entry.Process:
        try:
            return self._sandbox.spawn(SHELL_COMMAND, fds, user=self._user, cwd=cwd)
        except OSError as error:
            if error.filename == "directory" and cwd is not None:
                return self._sandbox.spawn(SHELL_COMMAND, fds, user=self._user, cwd=None)
            raise


def _read_line(fd: int, deadline: float) -> bytes:
    said = b""
    while not said.endswith(b"\n") and entry.readable(fd, deadline - time.monotonic()):
        data = os.read(fd, 4096)
        if not data:
            break
        said += data
    return said


def _tick_now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def _read_until_end(out: int, process: entry.Process, output: Output, deadline: float) -> bool:
    """Read until the process has ended; False at the deadline."""
    poller = select.poll()
    poller.register(out, select.POLLIN)
    poller.register(process.fileno(), select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(left * 1000)}
        if out in ready:
            with suppress(BlockingIOError):
                if data := os.read(out, _CHUNK):
                    output.feed(data)
                else:
                    poller.unregister(out)
        if process.fileno() in ready and process.poll() is not None:
            return True
    return False


def _drain(out: int, output: Output) -> None:
    """Take what is in the pipe; a background process that goes on writing is not waited for."""
    for _ in range(64):
        try:
            data = os.read(out, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            return
        output.feed(data)


def _not_run(command: Sequence[str], error: OSError, seconds: float) -> ExecResult:
    if error.filename not in ("command", "directory") or error.errno in (errno.EAGAIN, errno.ENOMEM):
        # No room for another process is what the sandbox's limits leave, not what the command did.
        raise SandboxError(f"cannot run `{command[0]}`: {error}", kind="process", hint="try again") from error
    missing = error.filename == "command" and error.errno in (errno.ENOENT, errno.ENOTDIR)
    return ExecResult(
        output=f"cannot run `{command[0]}`: {error.strerror}\n", exit_code=127 if missing else 126, seconds=seconds
    )


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"`{path}` is not an absolute path")
    return posixpath.normpath(path)
