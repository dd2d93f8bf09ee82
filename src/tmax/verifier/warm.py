"""The host's side of the warm path: asks one long-lived interpreter to run tests in a sandbox's namespaces.

The rule: whatever is wrong with the interpreter itself is mended here (a new one is started) or answered with None,
upon which the caller takes the cold path; only what the tests did comes back as an answer.
"""

import atexit
import fcntl
import json
import os
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tmax.errors import VerifierError
from tmax.verifier.frame import SIZE_LIMIT
from tmax.verifier.interpreter import command

OUTPUT_TAIL = 20_000
"""Bytes of what pytest and the tests printed that are kept: the last ones."""

_ATTEMPTS = 2


@dataclass(frozen=True)
class Answer:
    """What a child sent back; `exit_code` is None where it was lost, or killed because its time ran out."""

    report: str
    output: str
    exit_code: int | None
    timed_out: bool


def run(leader: int, home: Path, spec: bytes, *, test: str, timeout: float) -> Answer | None:
    """Run `spec` (see `runner.run`) as root in the namespaces of process `leader`, for `timeout` seconds at most.

    `test` is a digest of the test file and the place it is laid at: what it is compiled for once and for all.
    None where the sandbox cannot be entered or no interpreter stays alive; nothing has run then.
    Safe to call from many threads at once. Raises VerifierError where the sandbox lacks the bundle.
    """
    for _ in range(_ATTEMPTS):
        server = _Server.of(home)
        with _Request(spec) as request:
            if not server.send(leader, test, request):
                server.close()
                continue
            answer = request.wait(timeout)
            if answer is not None or request.refused:
                return answer
            server.close()
    return None


class _Server:
    """The warm parent of one bundle; started when first needed, ended by the end of this process."""

    _lock = threading.Lock()
    _running: "dict[Path, _Server]" = {}

    def __init__(self, home: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = _sealed(home / "so" / "ld.so")
        start = command(home, "server", str(theirs.fileno()), str(program))
        # No environment: there is nothing in it that a sandbox may see. A session of its own: an interrupt from the
        # terminal reaches us, and we tell it.
        self._process = subprocess.Popen(
            start, executable=f"/proc/self/fd/{program}", pass_fds=[theirs.fileno(), program], env={}, cwd=home,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(program)
        theirs.close()
        self._socket = ours
        self._home = home
        self._owner = os.getpid()
        self._sending = threading.Lock()
        atexit.register(self.close)

    @classmethod
    def of(cls, home: Path) -> "_Server":
        """The one that runs, or a new one; a process that was forked off starts its own."""
        with cls._lock:
            server = cls._running.get(home)
            if server is None or server._owner != os.getpid() or server._process.poll() is not None:
                server = cls._running[home] = cls(home)
            return server

    def send(self, leader: int, test: str, request: "_Request") -> bool:
        """Hand a request over; False where nobody is there to take it."""
        message = json.dumps({"leader": leader, "home": str(self._home), "test": test}).encode()
        try:
            with self._sending:
                socket.send_fds(self._socket, [message], request.far_ends)
        except OSError:
            return False
        request.hand_over()
        return True

    def close(self) -> None:
        """End the process, which reads the closing of the socket as its end; requests under way go on."""
        with self._lock:
            if self._running.get(self._home) is self:
                del self._running[self._home]
        self._socket.close()
        if self._owner == os.getpid():
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        atexit.unregister(self.close)


def _sealed(program: Path) -> int:
    """A descriptor of a copy that nobody can change: a tested program can start what its parent runs, as
    /proc/self/exe, and would be handed the file on our side of the read-only mount."""
    writable = os.memfd_create("tmax-verifier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(writable, "wb") as file:
        file.write(program.read_bytes())
        file.flush()
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
        # What is open for writing cannot be run.
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)


class _Request:
    """The pipes of one run; closing them kills what still runs of it."""

    def __init__(self, spec: bytes) -> None:
        self.refused = False
        self._control, far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._report, far_report = os.pipe()
        self._output, far_output = os.pipe()
        memory = os.memfd_create("spec")
        with open(memory, "wb", closefd=False) as file:
            file.write(spec)
        self._far_control = far_control
        self._far_pipes = [far_report, far_output, memory]
        for descriptor in (self._report, self._output):
            os.set_blocking(descriptor, False)
        self._taken = {self._report: bytearray(), self._output: bytearray()}

    @property
    def far_ends(self) -> list[int]:
        """Descriptors for the other side: control, report, output, specification."""
        return [self._far_control.fileno(), *self._far_pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hand_over()
        with suppress(OSError):
            # Reaches the supervisor even if a child of ours has inherited the socket.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for descriptor in (self._report, self._output):
            os.close(descriptor)

    def hand_over(self) -> None:
        """Close our copies of the far ends, so that their loss is noticed."""
        self._far_control.close()
        while self._far_pipes:
            os.close(self._far_pipes.pop())

    def wait(self, timeout: float) -> Answer | None:
        """Gather what the child writes until it ends or `timeout` seconds are over; None if it never started."""
        deadline = time.monotonic() + timeout
        started = False
        poll = select.poll()
        for descriptor in (self._control.fileno(), *self._taken):
            poll.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                if descriptor in self._taken:
                    if not self._take(descriptor):
                        poll.unregister(descriptor)
                    continue
                message = self._receive()
                if "started" in message:
                    started = True
                    continue
                if "unmounted" in message:
                    raise VerifierError(
                        "the verifier's interpreter is not in the sandbox, or an agent that is root moved it away",
                        hint="open the sandbox with `mounts=[bundle()]`",
                    )
                self.refused = "refused" in message
                return self._answer(message.get("ended")) if started else None
        return self._answer(None, timed_out=True)

    def _receive(self) -> dict[str, Any]:
        """The next word of the supervisor; empty where it is gone."""
        try:
            message = self._control.recv(65_536)
        except OSError:
            return {}
        return dict(json.loads(message)) if message else {}

    def _take(self, descriptor: int) -> bool:
        """Read what is there, keep the end of it; False at the end of the stream."""
        try:
            piece = os.read(descriptor, 65_536)
        except BlockingIOError:
            return True
        taken = self._taken[descriptor]
        taken += piece
        limit = 2 * SIZE_LIMIT if descriptor == self._report else OUTPUT_TAIL
        if len(taken) > 2 * limit:
            del taken[:-limit]
        return bool(piece)

    def _answer(self, exit_code: int | None, *, timed_out: bool = False) -> Answer:
        # What was written before the end is in the pipes; what left-over processes go on writing is not waited for.
        for descriptor in self._taken:
            for _ in range(64):
                before = len(self._taken[descriptor])
                if not self._take(descriptor) or len(self._taken[descriptor]) == before:
                    break
        if exit_code is not None and exit_code < 0:
            exit_code = 128 - exit_code  # As a shell counts death by a signal.
        report, output = (bytes(taken).decode("utf-8", "replace") for taken in self._taken.values())
        return Answer(report, output[-OUTPUT_TAIL:], exit_code, timed_out)
