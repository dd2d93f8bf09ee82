"""Drives one long-lived bash over three byte streams; every engine's `Sandbox.shell` is this and a Channel.

The rule: a command is over when bash itself reports a random token on a stream that commands do not hold, so no
output can end a command and no background process can keep one from ending.
"""

import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from tmax.errors import SandboxError
from tmax.records import ExecResult
from tmax.sandbox.output import Output

Stream = Literal["output", "report"]

SHELL_COMMAND = ("bash", "--norc", "--noprofile", "--noediting", "-i")
"""What a Channel runs. Interactive, because only then SIGINT ends a command without ending the shell."""

START_TIMEOUT = 30.0
"""Seconds that a new bash may take to report."""

_FD = 250
# Bash's own standard output becomes /dev/null and its standard error is the report stream; a command gets copies of
# the output stream (fd 250 in bash) and neither of the others.
_SET_UP = (
    "PS1= PS2=; unset PROMPT_COMMAND HISTFILE MAILCHECK; set +H; set +o history; "
    f"exec {_FD}>&1 1>/dev/null; "
    "__tmax_report() { local __tmax_status=$?; "
    f"\\builtin printf '%s' \"$1\" >&{_FD}; "
    '\\builtin printf \'\\n%s %s %s\\0\' "$1" "$__tmax_status" "${PWD-}" >&2; '
    "\\builtin return $__tmax_status; }\n"
)
_REPORT_NOISE = 65_536
# What an interactive bash without a terminal says when a child is killed by a signal.
_NOISE = re.compile(r"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: Inappropriate ioctl for device\n")
_STOP_PATIENCE = (0.05, 0.05, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4)
"""Seconds that an interrupted command has to end before it is interrupted again."""


@dataclass(frozen=True)
class Ended:
    """The bash under a channel is gone; everything it wrote has been received."""

    exit_code: int


class Channel(Protocol):
    """One running bash (SHELL_COMMAND, in a session of its own) and the means to stop what it runs.

    Its standard input is what is sent; its standard output is the stream `output`, its standard error `report`.
    """

    def send(self, data: bytes) -> None:
        """Write to its standard input. Raises BrokenPipeError where it is gone, SandboxError where it is stuck."""
        ...

    def receive(self, timeout: float) -> tuple[Stream, bytes] | Ended:
        """The next bytes of either stream. Raises TimeoutError after `timeout` seconds without any.

        A background process that holds a stream open must not keep `Ended` from being returned.
        """
        ...

    def mark(self) -> None:
        """A command is about to be sent: what bash has running now is spared by `interrupt` and `close`."""
        ...

    def interrupt(self, *, force: bool) -> None:
        """Send SIGINT to bash and to what it started since the mark; with `force` the latter gets SIGKILL first."""
        ...

    def close(self) -> None:
        """Kill bash and what it started since the mark; return when they are gone. May be called twice."""
        ...


class BashShell:
    """A `Shell` over channels; `start(cwd)` opens one (None is the working directory) and raises SandboxError."""

    def __init__(self, start: Callable[[str | None], Channel]) -> None:
        self._start = start
        self._cwd: str | None = None
        self._early = b""
        self._channel: Channel | None = None
        self._channel = self._open()

    def run(self, command: str, *, timeout: float) -> ExecResult:
        """See `Shell.run`."""
        started = time.monotonic()
        output = Output()
        channel = self._ready(output)
        token = secrets.token_hex(16)
        channel.mark()
        line = b"\\eval %s 0</dev/null 1>&%d 2>&1 %d>&-\n" % (quote(command), _FD, _FD)
        exit_code: int | None = None
        timed_out = False
        stale: list[str] = []
        try:
            channel.send(line + b"__tmax_report %s\n" % token.encode())
            exit_code = self._collect(channel, token, output, started + timeout)
        except BrokenPipeError:
            exit_code = self._collect(channel, token, output, time.monotonic() + 1.0)
        except TimeoutError:
            timed_out = True
            stale = self._stop(channel, token, output)
        text, missing = output.finish()
        text = _NOISE.sub("", text)
        for token in stale:
            text = text.replace(token, "")
        if self._channel is None and not timed_out and "exit" in command:
            # An interactive bash says so when it is told to exit.
            text = text.removesuffix("exit\n")
        return ExecResult(
            output=text, exit_code=exit_code, seconds=time.monotonic() - started, timed_out=timed_out,
            truncated_chars=missing,
        )  # fmt: skip

    def close(self) -> None:
        """See `Shell.close`."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> Channel:
        channel = self._start(self._cwd)
        token = secrets.token_hex(16)
        self._early = b""
        try:
            channel.send(_SET_UP.encode() + b"__tmax_report %s\n" % token.encode())
            self._channel = channel
            self._collect(channel, token, Output(), time.monotonic() + START_TIMEOUT)
        except (BrokenPipeError, TimeoutError) as error:
            self.close()
            raise SandboxError("a shell did not start", kind="process", hint="the image needs bash") from error
        if self._channel is None:
            raise SandboxError("a shell ended as it started", kind="process", hint="the image needs bash")
        return channel

    def _ready(self, output: Output) -> Channel:
        """The live channel; what arrived since the last command goes into `output`."""
        if self._channel is not None:
            for _ in range(64):
                try:
                    event = self._channel.receive(0.0)
                except TimeoutError:
                    break
                if isinstance(event, Ended):
                    self.close()
                    break
                if event[0] == "output":
                    self._early += event[1]
        output.feed(self._early)
        self._early = b""
        return self._channel or self._open()

    def _collect(self, channel: Channel, token: str, output: Output, deadline: float) -> int:
        """Read until bash has reported, or is gone; its exit code. Raises TimeoutError at the deadline."""
        mark = token.encode()
        held = report = b""
        marked = False
        status: int | None = None
        while not (marked and status is not None):
            try:
                event = channel.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                event = None
            if isinstance(event, Ended):
                output.feed(held)
                self.close()
                return event.exit_code
            if event is not None and event[0] == "output":
                held, marked, rest = _feed_until(held + event[1], mark, output, marked)
                self._early += rest
            elif event is not None and status is None:
                report = (report + event[1])[-_REPORT_NOISE:]
                status = self._parse_report(report, mark)
                if status is not None:
                    # The report may overtake the last output where an engine carries the streams apart.
                    deadline = time.monotonic() + 1.0
            if event is None or time.monotonic() > deadline:
                break
        output.feed(held)
        if status is None:
            raise TimeoutError
        return status

    def _parse_report(self, report: bytes, mark: bytes) -> int | None:
        _, found, rest = report.partition(b"\n" + mark + b" ")
        line, ended, _ = rest.partition(b"\0")
        if not (found and ended):
            return None
        status, _, cwd = line.partition(b" ")
        if cwd.startswith(b"/"):
            self._cwd = cwd.decode("utf-8", "surrogateescape")
        return int(status)

    def _stop(self, channel: Channel, token: str, output: Output) -> list[str]:
        """End the command that runs; the shell lives on if it answers SIGINT, else the next command starts a new one.

        Returns the tokens that may have come into the output.
        """
        tokens = [token]
        for attempt, patience in enumerate(_STOP_PATIENCE):
            channel.interrupt(force=attempt > 0)
            if attempt > 1:
                # An interrupt may have hit bash as it read the line that reports, or in the middle of reporting.
                tokens.append(self._ask(channel))
            if self._answers(channel, tokens[-1], output, patience):
                break
        else:
            self.close()
            return tokens
        if self._channel is not None:
            # What it left in the background goes too; and that interrupt must not hit the next command.
            channel.interrupt(force=True)
            for patience in _STOP_PATIENCE:
                tokens.append(self._ask(channel))
                if self._answers(channel, tokens[-1], output, patience):
                    return tokens
            self.close()
        return tokens

    def _ask(self, channel: Channel) -> str:
        token = secrets.token_hex(16)
        with suppress(BrokenPipeError):
            channel.send(b"__tmax_report %s\n" % token.encode())
        return token

    def _answers(self, channel: Channel, token: str, output: Output, patience: float) -> bool:
        try:
            self._collect(channel, token, output, time.monotonic() + patience)
        except TimeoutError:
            return False
        return True


def quote(command: str) -> bytes:
    """The command as one line of bash: `$'...'` with control characters escaped; NULs, which bash cannot hold, go."""
    text = command.replace("\0", "").replace("\\", "\\\\").replace("'", "\\'")
    escaped = "".join(char if char >= " " and char != "\x7f" else f"\\{ord(char):03o}" for char in text)
    return b"$'" + escaped.encode("utf-8", "replace") + b"'"


def _feed_until(data: bytes, mark: bytes, output: Output, marked: bool) -> tuple[bytes, bool, bytes]:
    """Feed what precedes the mark; (bytes that may be its beginning, whether it came, what follows it)."""
    if marked:
        return b"", True, data
    before, found, after = data.partition(mark)
    if found:
        output.feed(before)
        return b"", True, after
    keep = min(len(data), len(mark) - 1)
    output.feed(data[: len(data) - keep])
    return data[len(data) - keep :], False, b""
