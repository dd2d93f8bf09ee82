"""What a family is: code that makes any number of proven tasks with no model; every draw comes from the given `rng`."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tmax.task import TaskDraft


@dataclass(frozen=True)
class Family:
    """A procedural generator and what the sampler needs to know about it."""

    name: str
    domain: str
    """One of the sampler's nine domains."""
    levels: tuple[int, ...]
    """Difficulty levels that `draw` knows; 1 is the easiest."""
    summary: str
    """One sentence for people."""
    draw: Callable[[random.Random, int], TaskDraft]
    """(rng, level) to a draft. The same state of `rng` gives the same bytes. Raises KeyError for an unknown level."""
