"""Talks to a Docker daemon: connecting, processes in a container with their streams, and what its errors mean.

The rule: every call to the daemon stands inside `translated`, so that nothing but SandboxError leaves this engine.
"""

import socket
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import docker
import requests
import urllib3
from docker.constants import DEFAULT_UNIX_SOCKET
from docker.errors import APIError, DockerException, create_api_error_from_http_exception

from tmax.config import DockerConfig, docker_host
from tmax.errors import InfraKind, SandboxError

API_TIMEOUT = 120
"""Seconds the daemon may be silent in one call; builds and attached execs have their own."""

DAEMON_ERRORS = (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, tarfile.TarError, OSError)
"""Everything that a call to the daemon may raise."""

NOT_FOUND = 404

STDOUT, STDERR = 1, 2
"""Names of a process's two outputs in the daemon's frames."""

_FIRST_POLL, _LAST_POLL = 0.15, 0.5
"""Seconds after which the daemon is asked whether a process still runs; doubles from the first to the last."""
_START_GRACE = 1.0
_DRAIN = 0.5
"""Seconds in which the output of a process that has ended may still come in while something holds it open."""

_HEADER_BYTES = 8
_RECEIVE_BYTES = 65_536

_SIGNS: tuple[tuple[InfraKind, tuple[str, ...]], ...] = (
    ("network_pool", ("non-overlapping ipv4", "address pool", "predefined address pools")),
    ("disk", ("no space left on device", "disk quota exceeded", "read-only file system")),
    ("memory", ("cannot allocate memory", "out of memory", "oom")),
    ("process", ("no such container", "is not running", "no such exec", "resource temporarily unavailable")),
    ("network", ("network", "iptables", "veth", "endpoint")),
)
"""What the daemon writes, in lower case, by kind; the first that occurs decides."""

_HINTS: dict[InfraKind, str] = {
    "daemon": "is it running, and may this user use its socket? `tmax doctor` says more",
    "disk": "free disk space under the daemon's data root",
    "memory": "lower `workers` or raise `limits.memory_mb`",
    "network": "look at the daemon's log",
    "network_pool": "remove unused networks: `docker network ls`",
    "process": "the container ended; the machine may be short of memory",
}


def address(config: DockerConfig) -> str:
    """Where the daemon is expected."""
    return config.host or docker_host() or DEFAULT_UNIX_SOCKET.replace("http+unix", "unix")


def connect(config: DockerConfig, *, timeout: int = API_TIMEOUT) -> docker.APIClient:
    """A connection to the daemon; the caller closes it. Raises SandboxError of kind `daemon` where none answers."""
    place = address(config)
    try:
        return docker.APIClient(base_url=place, version="auto", timeout=timeout)
    except DAEMON_ERRORS as error:
        raise SandboxError(
            f"no Docker daemon answers at {place}: {_first_cause(error)}", kind="daemon", hint=_HINTS["daemon"]
        ) from error


def _first_cause(error: BaseException) -> str:
    """What the operating system said, where it said anything: the client wraps it four times."""
    words = str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            words = cause.strerror
        cause = cause.__cause__ or cause.__context__
    return words


def check(response: requests.Response) -> None:
    """Raise APIError in the daemon's words unless the response is a success."""
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        create_api_error_from_http_exception(error)


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Turn what the daemon does wrong in this block into a SandboxError that says it could not do `action`."""
    try:
        yield
    except DAEMON_ERRORS as error:
        raise infra_error(action, error) from error


def infra_error(action: str, error: Exception) -> SandboxError:
    """The SandboxError for an error of the daemon or of the way to it."""
    kind = kind_of(error)
    return SandboxError(f"cannot {action}: {explain(error)}", kind=kind, hint=_HINTS.get(kind))


def kind_of(error: Exception) -> InfraKind:
    """Which part of the infrastructure an error speaks of."""
    text = explain(error).lower()
    kind = kind_of_text(text)
    if kind is not None and isinstance(error, APIError):
        return kind
    return "api" if isinstance(error, APIError) else "daemon"


def kind_of_text(text: str) -> InfraKind | None:
    """Which part of the infrastructure a message of the daemon speaks of, or None where it names none."""
    text = text.lower()
    return next((kind for kind, signs in _SIGNS if any(sign in text for sign in signs)), None)


def explain(error: Exception) -> str:
    """The daemon's own words, without the client's wrapping."""
    explanation = getattr(error, "explanation", None)
    if isinstance(explanation, bytes):
        return explanation.decode("utf-8", "replace").strip()
    return str(explanation or error).strip()


def socket_of(response: requests.Response) -> socket.socket:
    """What a response is read from, to bound how long that may take; requests has no other way once it streams."""
    raw: Any = response.raw
    found: socket.socket = raw._fp.fp.raw._sock
    return found


@dataclass(frozen=True)
class Ended:
    """A process has ended and all its output was received. `pid` is 0 where it never started."""

    exit_code: int
    pid: int


class ExecProcess:
    """A process that was started in a running container: its input, and its outputs as they come.

    The daemon cuts the outputs into frames (a byte that names the stream, three zeros, four bytes of length,
    big-endian); here they are cut as they arrive, so that nothing waits for a frame to be whole. Whether the process
    still runs is asked from time to time, since something it started may hold its outputs open. Not safe for two
    threads at once.
    """

    def __init__(self, client: docker.APIClient, exec_id: str) -> None:
        self._client = client
        self._exec_id = exec_id
        stream: Any = client.exec_start(exec_id, socket=True)
        self._response = stream._response
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        # The HTTP reader may have read on past the headers; what it holds comes first.
        self._socket.settimeout(0)
        self._raw = bytearray(self._response.raw._fp.fp.peek() or b"")
        self._origin = STDOUT
        self._left = 0
        self._closed_by_peer = False
        self._started = time.monotonic()
        self._ran = False
        self._ended: Ended | None = None
        self._wait = _FIRST_POLL
        self._next_poll = self._started + self._wait
        self._drained = 0.0

    def send(self, data: bytes) -> None:
        """Write to its input. Raises BrokenPipeError where nothing can read it, SandboxError where nothing does."""
        self._socket.settimeout(API_TIMEOUT)
        try:
            self._socket.sendall(data)
        except TimeoutError as error:
            raise SandboxError("a process in the container does not read its input", kind="process") from error
        except OSError as error:
            raise BrokenPipeError("the process in the container has ended") from error

    def receive(self, timeout: float) -> tuple[int, bytes] | Ended:
        """The next piece of STDOUT or STDERR, or how it ended. Raises TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if self._ended is None and now >= self._next_poll:
                self._poll(now)
            if self._ended is not None and now >= self._drained:
                return self._ended
            if piece := self._cut():
                return piece
            if self._closed_by_peer:
                if self._ended is not None:
                    return self._ended
                self._poll(now)
                if self._ended is None:
                    if now >= deadline:
                        raise TimeoutError
                    time.sleep(min(deadline - now, 0.01))
                continue
            due = self._drained if self._ended is not None else self._next_poll
            if not self._read(min(deadline, due) - now) and time.monotonic() >= deadline:
                raise TimeoutError

    def pid(self, timeout: float) -> int:
        """Its process id as the daemon's machine has it; 0 where it has not started within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            status = self._status()
            if status["Pid"] or not status["Running"] or time.monotonic() > deadline:
                return int(status["Pid"])
            time.sleep(0.01)

    def close(self) -> None:
        """Let go of the stream; the process sees the end of its input."""
        self._socket.close()
        self._response.close()

    def _status(self) -> dict[str, Any]:
        with translated("ask for a process in the container"):
            status: dict[str, Any] = self._client.exec_inspect(self._exec_id)
        return status

    def _poll(self, now: float) -> None:
        status = self._status()
        self._ran = self._ran or bool(status["Running"])
        # A process that is about to start is reported as not running, too.
        begun = self._ran or status["Pid"] or self._closed_by_peer or now - self._started > _START_GRACE
        if begun and not status["Running"] and status["ExitCode"] is not None:
            self._ended = Ended(int(status["ExitCode"]), int(status["Pid"] or 0))
            self._drained = now + _DRAIN
        self._wait = min(2 * self._wait, _LAST_POLL)
        self._next_poll = now + self._wait

    def _read(self, timeout: float) -> bool:
        # Zero would mean "do not block", which raises another error.
        self._socket.settimeout(max(timeout, 0.0001))
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return False
        except OSError as error:
            raise infra_error("read from a process in the container", error) from error
        self._raw += data
        self._closed_by_peer = not data
        return True

    def _cut(self) -> tuple[int, bytes] | None:
        while self._left == 0 and len(self._raw) >= _HEADER_BYTES:
            self._origin = self._raw[0]
            self._left = int.from_bytes(self._raw[4:_HEADER_BYTES], "big")
            del self._raw[:_HEADER_BYTES]
        if self._left == 0 or not self._raw:
            return None
        piece = bytes(self._raw[: self._left])
        del self._raw[: len(piece)]
        self._left -= len(piece)
        return self._origin, piece


def start_exec(
    client: docker.APIClient,
    container: str,
    command: Sequence[str],
    *,
    user: str,
    env: Mapping[str, str],
    cwd: str,
    stdin: bool = False,
) -> ExecProcess:
    """Start an argument vector in a running container, with `env` over the container's own environment.

    Raises SandboxError where the container is gone or the daemon cannot start anything.
    """
    with translated("run a command in the container"):
        made = client.exec_create(container, list(command), stdin=stdin, user=user, environment=dict(env), workdir=cwd)
        return ExecProcess(client, made["Id"])
