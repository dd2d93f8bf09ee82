"""Policies that are not models: what validation runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Noop:
    """Does nothing at all."""

    name: str = "noop"


@dataclass(frozen=True)
class Oracle:
    """Gives the commands of the task's own solution."""

    name: str = "oracle"


@dataclass(frozen=True)
class Careless:
    """Gives the oracle's commands, with a slip in this share of its trials: a demonstrator who does not check."""

    slip_share: float
    name: str = "careless"


@dataclass(frozen=True)
class Script:
    """Gives a fixed list of commands, whatever the machine answers."""

    commands: tuple[str, ...]
    name: str = "script"
