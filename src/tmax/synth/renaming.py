"""Tells a demonstration again with other names, so that a small model learns to copy names and not to remember them.

The rule: one permutation of the families' starter nouns for all texts of a demonstration, so what belonged together
still does. It suits level 1, whose commands do not depend on what a name is or where it sorts.
"""

import random
import re

from tmax.records import Trajectory
from tmax.synth.families.words import STARTERS

_STARTER = re.compile(r"\b(" + "|".join(STARTERS) + r")\b")


def renamed(trajectory: Trajectory, rng: random.Random) -> Trajectory:
    """The trajectory with its starter nouns exchanged; tokens, which would no longer fit, are left out."""
    others = dict(zip(STARTERS, rng.sample(STARTERS, len(STARTERS)), strict=True))

    def exchange(text: str | None) -> str | None:
        return None if text is None else _STARTER.sub(lambda found: others[found.group()], text)

    turns = tuple(
        turn.model_copy(
            update={
                "reply": exchange(turn.reply),
                "command": exchange(turn.command),
                "observation": exchange(turn.observation),
            }
        )
        for turn in trajectory.turns
    )
    return trajectory.model_copy(
        update={"instruction": exchange(trajectory.instruction), "turns": turns, "tokens": None}
    )
