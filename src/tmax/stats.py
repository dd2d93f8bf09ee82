"""Estimators, each with its source; pure functions on plain numbers.

Only scored trials enter: a failure is not a zero (see `tmax.records`).
"""

import math
import random
from collections.abc import Mapping, Sequence

Z_95 = 1.959963984540054


def pass_at_k(num_scored: int, num_passed: int, k: int) -> float:
    """Unbiased pass@k = 1 - C(n-c, k)/C(n, k) over all `n` scored trials (Chen et al. 2021, eq. 1)."""
    if not 0 <= num_passed <= num_scored:
        raise ValueError(f"{num_passed} of {num_scored} trials cannot have passed")
    if not 1 <= k <= num_scored:
        raise ValueError(f"pass@{k} needs between 1 and {num_scored} trials")
    return 1.0 - math.comb(num_scored - num_passed, k) / math.comb(num_scored, k)


def wilson_interval(num_passed: int, num_scored: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a binomial share; (0, 1) where nothing was scored."""
    if num_scored == 0:
        return 0.0, 1.0
    share = num_passed / num_scored
    spread = z * math.sqrt(share * (1 - share) / num_scored + z * z / (4 * num_scored * num_scored))
    centre = share + z * z / (2 * num_scored)
    scale = 1 + z * z / num_scored
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def p_mixed_group(pass_rate: float, group_size: int) -> float:
    """Probability 1 - p^G - (1-p)^G that a group of binary rewards has spread, so carries gradient."""
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def clustered_mean_interval(
    values_by_cluster: Mapping[str, Sequence[float]], *, seed: str, num_resamples: int = 2000, level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Mean over clusters of the cluster means, with a percentile bootstrap that resamples whole clusters.

    Trials of one task are not independent, so a task is the unit that is drawn (Miller 2024, "Adding error
    bars to evals", section 3). Clusters with no value are left out; none at all is an error.
    """
    means = [sum(values) / len(values) for _, values in sorted(values_by_cluster.items()) if values]
    if not means:
        raise ValueError("no cluster holds a value")
    rng = random.Random(f"{seed}:bootstrap:0")
    resampled = sorted(sum(rng.choices(means, k=len(means))) / len(means) for _ in range(num_resamples))
    tail = (1 - level) / 2
    low = resampled[int(tail * (num_resamples - 1))]
    high = resampled[math.ceil((1 - tail) * (num_resamples - 1))]
    return sum(means) / len(means), (low, high)


def paired_difference(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], *, seed: str
) -> tuple[float, tuple[float, float], int]:
    """Mean over tasks of (after - before), its 95 % interval, and the number of tasks scored on both sides."""
    shared = [task for task in before if before[task] and after.get(task)]
    differences = {
        task: [sum(after[task]) / len(after[task]) - sum(before[task]) / len(before[task])] for task in shared
    }
    mean, interval = clustered_mean_interval(differences, seed=seed)
    return mean, interval, len(shared)


def pass_rates(num_passed: int, num_scored: int, num_timeouts: int, num_errors: int) -> dict[str, float | None]:
    """The pass rate under three policies; `num_timeouts` are verifier time-outs, `num_errors` all other failures.

    `scored_only` drops every failure; `leaderboard` counts time-outs as 0 and drops the rest;
    `errors_as_zero` counts every failure as 0. None where the denominator is empty.
    """
    denominators = {
        "scored_only": num_scored,
        "leaderboard": num_scored + num_timeouts,
        "errors_as_zero": num_scored + num_timeouts + num_errors,
    }
    return {name: num_passed / count if count else None for name, count in denominators.items()}
