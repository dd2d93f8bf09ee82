"""Turns a spec into a task directory with a procedural family; the same seed gives the same bytes."""

import hashlib
import random
from pathlib import Path

from tmax.errors import TaskError
from tmax.records import Spec
from tmax.synth.families import FAMILIES
from tmax.task import Task, write_task

_MAX_DRAWS = 100


def draw_task(spec: Spec, root: Path, *, seed: int, taken: set[str]) -> Task:
    """Draw a task for a spec and write it under `root`; the digest of its instruction is added to `taken`.

    A draft whose instruction is taken is drawn again, so no instruction stands in two tasks of a run and none of
    the held-out ones was trained on. Raises TaskError where the family has no more to give.
    """
    family = FAMILIES[spec.family]
    for attempt in range(_MAX_DRAWS):
        draft = family.draw(random.Random(f"{seed}:generate:{spec.index}:{attempt}"), spec.level)
        digest = instruction_digest(draft.instruction)
        if digest not in taken:
            taken.add(digest)
            return write_task(draft, root)
    raise TaskError(
        f"family `{spec.family}` gave no new task at level {spec.level} in {_MAX_DRAWS} draws",
        hint="draw fewer tasks from it, or more levels",
    )


def instruction_digest(instruction: str) -> str:
    """Twelve hex digits that stand for an instruction, whatever its white space."""
    return hashlib.sha256(" ".join(instruction.split()).encode()).hexdigest()[:12]
