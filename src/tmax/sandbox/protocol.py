"""What every sandbox engine offers: one live machine in which one trial runs.

The rule: users are `root`, `agent` (unprivileged, owns the working directory) and nobody else; whatever
infrastructure does wrong is raised as SandboxError, whatever a command does wrong is in its ExecResult.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tmax.records import ExecResult

User = Literal["root", "agent"]

AGENT_UID = 1000
"""User and group id of `agent` inside a sandbox."""

AGENT_HOME = "/home/agent"

OUTPUT_LIMIT = 1_000_000
"""Characters of a command's output that are kept: half from its head, half from its tail, bounded while read."""


@dataclass(frozen=True)
class Image:
    """A built image: what a sandbox starts from. `reference` means something to the engine that built it."""

    engine: Literal["bubblewrap", "docker"]
    reference: str
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)


class Shell(Protocol):
    """One long-lived bash; directory, variables, functions and jobs persist between commands."""

    def run(self, command: str, *, timeout: float) -> ExecResult:
        """Run a command; a time-out kills what it started, and the shell lives on.

        A command that ends the shell (`exit`, `exec`) gives its exit code; the next command starts a new shell in
        the same directory. Raises SandboxError where the machine under the shell is gone.
        """
        ...

    def close(self) -> None:
        """End the shell and what still runs in its foreground."""
        ...


class Sandbox(Protocol):
    """A live machine. Made by `open_sandbox`, gone when its `with` block ends."""

    @property
    def image(self) -> Image:
        """What the sandbox was started from."""
        ...

    @property
    def leader(self) -> int | None:
        """Host process id of the sandbox's first process where this process may enter its namespaces, else None."""
        ...

    def exec(self, command: Sequence[str], *, user: User, timeout: float, cwd: str | None = None) -> ExecResult:
        """Run an argument vector to its end, with the image's environment; `cwd` is the working directory if not given.

        A time-out kills the command and everything it started. Output is bounded by OUTPUT_LIMIT while it is read.
        """
        ...

    def shell(self, *, user: User) -> Shell:
        """Start a long-lived bash in the working directory."""
        ...

    def put(self, source: Path, target: str, *, user: User, mode: int) -> None:
        """Copy a host file or directory tree in; everything belongs to `user`, files get `mode`,
        directories the same with the search bit wherever the read bit is set. Missing parents are made as root."""
        ...

    def get(self, path: str) -> bytes:
        """A file's content. Raises FileNotFoundError where it is not a regular file (links are not followed)."""
        ...

    def kill_processes(self, *, user: User | None) -> None:
        """Kill all processes of `user`, or of everybody but the sandbox itself; returns when they are gone."""
        ...
