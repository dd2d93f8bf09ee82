"""One running container as a Sandbox.

The rule: what a command does wrong is in its result, what the daemon does wrong is a SandboxError, and a command that
was to be killed is either dead when its call returns or the call raises.
"""

import base64
import json
import posixpath
import secrets
import shlex
import signal
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import docker
import requests

from tmax.errors import InfraKind, SandboxError
from tmax.records import ExecResult
from tmax.sandbox import docker_processes as processes
from tmax.sandbox.docker_api import (
    API_TIMEOUT,
    NOT_FOUND,
    STDOUT,
    Ended,
    ExecProcess,
    check,
    kind_of_text,
    start_exec,
    translated,
)
from tmax.sandbox.output import Output
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID, Image, Shell, User
from tmax.sandbox.shell import SHELL_COMMAND, BashShell, Stream, quote
from tmax.sandbox.shell import Ended as ShellEnded

_KILL_TIMEOUT = 5.0
_SPOOL_BYTES = 16 * 1024 * 1024
_SPECIAL = 0x8F280000
"""Bits of the daemon's file mode that mark everything but regular files (Go's ModeType)."""
_DIRECTORY = 0x80000000

_MERGED = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
_NOT_RUN = 126
_NO_DIRECTORY = "chdir to cwd"
_NOT_STARTED = "exec failed: unable to start container process"
_NO_FILE = ("could not find the file", "no such file", "not a directory", "too many levels of symbolic links",
            "file name too long")  # fmt: skip
_ABSENT = ("executable file not found", "no such file", "not a directory")
_UNUSABLE = ("permission denied", "exec format error", "is a directory", "chdir")
"""What the daemon writes where the command itself cannot be run."""

KILLED = 128 + signal.SIGKILL
"""Exit code of a process that something killed: perhaps the end of its container."""

_IDS: dict[User, int] = {"root": 0, "agent": AGENT_UID}
_HOMES: dict[User, str] = {"root": "/root", "agent": AGENT_HOME}


class DockerSandbox:
    """See `tmax.sandbox.protocol.Sandbox`. `leader` is None where the container cannot be entered from here."""

    def __init__(
        self, client: docker.APIClient, image: Image, name: str, leader: int | None, mounts: Sequence[Path] = ()
    ) -> None:
        self._client = client
        self._image = image
        self._name = name
        self._leader = leader
        self._mounts = tuple(PurePosixPath(mount) for mount in mounts)
        self._views: dict[User, processes.View] = {}
        self._lock = threading.Lock()

    @property
    def image(self) -> Image:
        """What the container was started from."""
        return self._image

    @property
    def leader(self) -> int | None:
        """Host process id of the container's first process, where this process is root on the daemon's machine."""
        return self._leader

    def exec(self, command: Sequence[str], *, user: User, timeout: float, cwd: str | None = None) -> ExecResult:
        """Run an argument vector; see the protocol. What cannot be run exits 127 if it is not there, else 126.

        Raises SandboxError where the container is gone, or a command outlives its time-out and being killed.
        """
        if self._leader is None:
            # Opened while there is room for it: a fork bomb leaves none.
            self.view(user).processes()
        if not self._is_of_the_host(command[0]):
            # The daemon carries the two outputs apart, and their order would be lost.
            command = (*_MERGED, *command)
        result = self._exec(command, user=user, timeout=timeout, cwd=cwd or self._image.workdir)
        if cwd is None and result.exit_code == _NOT_RUN and _NO_DIRECTORY in result.output[:200]:
            # The working directory may be gone: commands can still be run.
            result = self._exec(command, user=user, timeout=timeout, cwd="/")
        return result

    def _is_of_the_host(self, program: str) -> bool:
        """Whether a program comes from a mount; such a one runs with nothing of the container in between."""
        return any(PurePosixPath(program).is_relative_to(mount) for mount in self._mounts)

    def _exec(self, command: Sequence[str], *, user: User, timeout: float, cwd: str) -> ExecResult:
        started = time.monotonic()
        mark = secrets.token_hex(8)
        process = self.start(command, user=user, cwd=cwd, env={processes.MARK: mark})
        output = Output()
        try:
            ended = _collect(process, output, started + timeout)
            if ended is None:
                self._kill_exec(process, output, mark, user)
        finally:
            process.close()
        if ended is not None and ended.exit_code == KILLED:
            self.check_alive()
        text, missing = output.finish()
        return ExecResult(
            output=text,
            exit_code=None if ended is None else _exit_code(ended, text),
            seconds=time.monotonic() - started,
            timed_out=ended is None,
            truncated_chars=missing,
        )

    def shell(self, *, user: User) -> Shell:
        """Start a long-lived bash in the working directory."""
        return BashShell(lambda cwd: ShellChannel(self, user, cwd))

    def put(self, source: Path, target: str, *, user: User, mode: int) -> None:
        """Copy a host file or tree in; see the protocol. Links in a tree stay links, directories are merged into.

        Raises SandboxError where a directory is in the way of a file.
        """
        place = PurePosixPath(posixpath.normpath(posixpath.join(self._image.workdir, target)))
        missing = [parent for parent in place.parents[:-1] if self._mode(str(parent)) is None]
        if not source.is_dir() and (self._mode(str(place)) or 0) & _DIRECTORY:
            raise SandboxError(f"cannot put a file at `{place}`: a directory is in the way", kind="api")
        # Directories that are there must not be in the archive, or they would be given its owner and mode.
        root = missing[-1].parent if missing else place.parent
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
            with tarfile.open(fileobj=spool, mode="w") as archive:
                for directory in reversed(missing):
                    entry = tarfile.TarInfo(str(directory.relative_to(root)))
                    entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
                    archive.addfile(entry)
                archive.add(source, str(place.relative_to(root)), filter=_given_to(_IDS[user], mode))
            spool.seek(0)
            with translated(f"copy `{source.name}` into the container"):
                self._client.put_archive(self._name, str(root), spool)

    def get(self, path: str) -> bytes:
        """A regular file's content; see the protocol. Sees the container's disk, not what is mounted inside it."""
        place = posixpath.join(self._image.workdir, path)
        content: bytes | None = None
        with translated(f"read `{path}` from the container"):
            response = self._client.get(
                self._archive_url(), params={"path": place}, stream=True, timeout=API_TIMEOUT,
                headers={"Accept-Encoding": "identity"},
            )  # fmt: skip
            with closing(response):
                if not response.ok and not _says_no_file(response.text.lower()):
                    check(response)
                if response.ok and not _file_mode(response) & _SPECIAL:
                    content = _only_file(response)
        if content is None:
            raise FileNotFoundError(path)
        return content

    def kill_processes(self, *, user: User | None) -> None:
        """Kill every process of `user`, or of everybody but the container's first; returns when they are gone.

        Raises SandboxError of kind `process` where some outlive it for five seconds.
        """
        chosen = processes.of_user(None if user is None else _IDS[user])
        if not processes.kill(self.view(user or "root"), chosen, timeout=_KILL_TIMEOUT):
            raise SandboxError("processes in the container outlive being killed", kind="process")

    def start(
        self, command: Sequence[str], *, user: User, cwd: str, env: Mapping[str, str], stdin: bool = False
    ) -> ExecProcess:
        """Start an argument vector as `user`. Raises SandboxError where the container is gone."""
        own = {"HOME": _HOMES[user], "LANG": "C.UTF-8", **self._image.env, **env}
        return start_exec(
            self._client, self._name, command, user=f"{_IDS[user]}:{_IDS[user]}", env=own,
            cwd=cwd, stdin=stdin,
        )  # fmt: skip

    def check_alive(self) -> None:
        """Raise SandboxError where the container has ended, and whatever ran in it for that reason."""
        ends = self._leader is not None and processes.is_ending(self._leader)
        if self._leader is not None and not ends:
            return
        # The daemon learns of it a little later than of the end of what ran in it.
        deadline = time.monotonic() + (_KILL_TIMEOUT if ends else 0.5)
        while (state := self._state())["Running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        if ends or not state["Running"]:
            kind: InfraKind = "memory" if state.get("OOMKilled") else "process"
            raise SandboxError("the container has ended", kind=kind, hint="the machine may be short of memory")

    def view(self, user: User) -> processes.View:
        """The container's processes, of which only those of `user` can be killed where this process is not root."""
        key = "root" if self._leader is not None else user
        with self._lock:
            if key not in self._views:
                self._views[key] = self._new_view(user)
            return self._views[key]

    def close(self) -> None:
        """Let go of what was opened in the container; the container itself is its owner's to remove."""
        for view in self._views.values():
            view.close()

    def _state(self) -> dict[str, Any]:
        with translated("look at the container"):
            state: dict[str, Any] = self._client.inspect_container(self._name)["State"]
        return state

    def _new_view(self, user: User) -> processes.View:
        if self._leader is not None:
            return processes.HostView(self._leader)
        return processes.InnerView(
            lambda command: self.start(command, user=user, cwd="/", env={"BASH_ENV": ""}, stdin=True)
        )

    def _kill_exec(self, process: ExecProcess, output: Output, mark: str, user: User) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT
        # It may still be on its way into the container, where nothing is to be seen of it yet.
        pid = process.pid(_KILL_TIMEOUT)
        chosen = processes.of_exec(mark, pid if self._leader is not None else processes.inner_pid(pid))
        while True:
            gone = processes.kill(self.view(user), chosen, timeout=_KILL_TIMEOUT)
            # The daemon reports no end before the output was read.
            if gone and _collect(process, output, time.monotonic() + 0.5) is not None:
                return
            if time.monotonic() > deadline:
                raise SandboxError("a command outlived its time-out and being killed", kind="process")

    def _archive_url(self) -> str:
        return f"{self._client.base_url}/v{self._client.api_version}/containers/{self._name}/archive"

    def _mode(self, path: str) -> int | None:
        """The daemon's file mode of what is at `path`, a link not followed; None where nothing is."""
        with translated(f"look for `{path}` in the container"):
            response = self._client.head(self._archive_url(), params={"path": path}, timeout=API_TIMEOUT)
            if response.status_code == NOT_FOUND:
                return None
            check(response)
            return _file_mode(response)


class ShellChannel:
    """A running bash in a container; see `tmax.sandbox.shell.Channel`. `cwd` is the working directory if None."""

    def __init__(self, sandbox: DockerSandbox, user: User, cwd: str | None) -> None:
        self._sandbox = sandbox
        self._mark = secrets.token_hex(8)
        self._view = sandbox.view(user)
        self._spared: processes.Table = {}
        self._began = False
        self._process = sandbox.start(
            SHELL_COMMAND, user=user, cwd="/", env={processes.MARK: self._mark}, stdin=True
        )  # fmt: skip
        # Known by what it was started with, which its commands need not see.
        self.send(f"unset {processes.MARK}\n".encode())
        # A directory may be gone by now; then the next one will do.
        places = [shlex.quote(place) for place in (cwd, sandbox.image.workdir) if place is not None]
        tries = " || ".join(f"\\builtin cd -- {place} 2>/dev/null" for place in places)
        self.send(b"\\eval %s\n" % quote(f"{tries}; unset OLDPWD"))

    def send(self, data: bytes) -> None:
        """See `Channel.send`."""
        self._process.send(data)

    def receive(self, timeout: float) -> tuple[Stream, bytes] | ShellEnded:
        """See `Channel.receive`."""
        try:
            event = self._process.receive(timeout)
        except TimeoutError:
            if not self._began or self._find() is not None:
                raise
            # Somebody killed it, and the daemon has not said so yet.
            event = self._process.receive(_KILL_TIMEOUT)
        if isinstance(event, Ended):
            if event.exit_code == KILLED:
                self._sandbox.check_alive()
            return ShellEnded(event.exit_code)
        origin, data = event
        return ("output" if origin == STDOUT else "report"), data

    def mark(self) -> None:
        """See `Channel.mark`."""
        self._spared = self._view.processes()
        self._began = True

    def interrupt(self, *, force: bool) -> None:
        """See `Channel.interrupt`."""
        shell = self._find()
        if shell is None:
            return
        chosen = processes.of_shell(shell, self._spared)
        if force:
            self._kill(chosen)
        # Bash first: it heeds the signal only where its child then dies of one, too, and would start the next child if
        # this one died before it.
        self._view.signal([shell.pid], signal.SIGINT)
        self._view.signal(chosen(self._view.processes()), signal.SIGINT)

    def close(self) -> None:
        """See `Channel.close`."""
        shell = self._find()
        if shell is not None:
            started = processes.of_shell(shell, self._spared)
            self._kill(lambda table: started(table) | ({shell.pid} & table.keys()))
        self._process.close()

    def _find(self) -> processes.Process | None:
        return processes.find_shell(self._view.processes(), self._mark)

    def _kill(self, chosen: processes.Choice) -> None:
        if not processes.kill(self._view, chosen, timeout=_KILL_TIMEOUT):
            raise SandboxError("what a shell started outlives being killed", kind="process")


def _collect(process: ExecProcess, output: Output, deadline: float) -> Ended | None:
    """Feed what the process writes to `output` until it has ended; None where the deadline comes first."""
    while (now := time.monotonic()) < deadline:
        try:
            event = process.receive(deadline - now)
        except TimeoutError:
            break
        if isinstance(event, Ended):
            return event
        output.feed(event[1])
    return None


def _exit_code(ended: Ended, text: str) -> int:
    """What a shell would have said of the command. Raises SandboxError where the daemon is to blame."""
    if ended.pid or _NOT_STARTED not in text[:200]:
        return ended.exit_code
    reason = text.strip().lower()
    if "chdir" not in reason and any(sign in reason for sign in _ABSENT):
        return 127
    if any(sign in reason for sign in _UNUSABLE):
        return 126
    raise SandboxError(f"a command did not start: {text.strip()}", kind=kind_of_text(reason) or "process")


def _given_to(uid: int, mode: int) -> Callable[[tarfile.TarInfo], tarfile.TarInfo]:
    def changed(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
            raise SandboxError(f"cannot copy `{entry.name}`: neither a file nor a directory", kind="api")
        entry.uid = entry.gid = uid
        entry.uname = entry.gname = ""
        if not entry.issym():
            entry.mode = mode | (mode & 0o444) >> 2 if entry.isdir() else mode
        return entry

    return changed


def _says_no_file(text: str) -> bool:
    return "no such container" not in text and any(sign in text for sign in _NO_FILE)


def _only_file(response: requests.Response) -> bytes | None:
    with tarfile.open(fileobj=response.raw, mode="r|") as archive:
        entry = archive.next()
        reader = None if entry is None else archive.extractfile(entry)
        return None if reader is None else reader.read()


def _file_mode(response: requests.Response) -> int:
    stat: dict[str, Any] = json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))
    return int(stat["mode"])
