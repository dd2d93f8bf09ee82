"""Group-relative advantages: pure functions of a group's rewards.

The rule: a group is judged by its scored trials alone; a failure is neither a zero nor a member.
"""

from collections.abc import Sequence

SPREAD = 1e-8
"""Rewards closer together than this carry no gradient; a standard deviation of equal floats is not always 0."""


def has_spread(rewards: Sequence[float]) -> bool:
    """True if the rewards differ, so that the group carries gradient."""
    return bool(rewards) and max(rewards) - min(rewards) > SPREAD


def centred(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the group; no division by the spread (TMax; Dr. GRPO, Liu et al. 2025)."""
    if not rewards:
        raise ValueError("an empty group has no advantages")
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
