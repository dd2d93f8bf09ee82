"""How a stage tells how far it is; the command line shows it, tests and libraries may not care."""

from typing import Protocol


class Progress(Protocol):
    """One counted piece of work at a time."""

    def start(self, title: str, *, total: int, done: int = 0) -> None:
        """Begin a piece of work of `total` parts, `done` of which an earlier start has finished."""
        ...

    def advance(self, note: str = "") -> None:
        """One part more is finished; `note` stands beside the bar."""
        ...

    def finish(self) -> None:
        """The piece of work is over."""
        ...

    def say(self, line: str) -> None:
        """Tell people one thing."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, title: str, *, total: int, done: int = 0) -> None:
        """See `Progress`."""

    def advance(self, note: str = "") -> None:
        """See `Progress`."""

    def finish(self) -> None:
        """See `Progress`."""

    def say(self, line: str) -> None:
        """See `Progress`."""
