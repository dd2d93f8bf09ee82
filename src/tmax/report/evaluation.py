"""Pass rates of the held-out tasks before and after training, with their intervals.

The rule: a task is the unit that is drawn; only scored trials enter a rate, except where a policy says otherwise.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tmax.records import Record, TaskRow
from tmax.stats import clustered_mean_interval, paired_difference, pass_at_k, pass_rates, wilson_interval

Interval = tuple[float, float]


class Rate(Record):
    """A mean over tasks of the tasks' pass rates, with a 95 % bootstrap interval that resamples tasks."""

    value: float
    interval: Interval
    tasks: int


class PolicyRate(Record):
    """A pass rate under one way to count failures (see `tmax.stats.pass_rates`)."""

    policy: str
    counted: int
    """Trials in the denominator."""
    pooled: float | None
    """Passed over counted trials of all tasks together."""
    pooled_interval: Interval | None
    """95 % Wilson interval of `pooled`; takes trials as independent, so it is too narrow for many trials a task."""
    by_task: Rate | None
    """Mean over tasks, the figure to quote."""


class PassAtK(Record):
    """Mean over tasks of the unbiased pass@k; only tasks with at least `k` scored trials enter."""

    k: int
    value: float
    tasks: int


class Evaluation(Record):
    """One pass over the held-out tasks."""

    trials: int
    scored: int
    passed: int
    rate: Rate | None
    """Scored trials only; None where none was scored."""
    policies: tuple[PolicyRate, ...]
    pass_at_k: tuple[PassAtK, ...]


class Difference(Record):
    """Mean over tasks of (after - before), tasks scored on both sides only."""

    value: float
    interval: Interval
    tasks: int


class Breakdown(Record):
    """Before and after for one family, or one level of it."""

    family: str
    level: int | None
    """None for the whole family."""
    before: Rate | None
    after: Rate | None
    difference: Difference | None


@dataclass
class TaskTally:
    """A task's trials of one purpose."""

    rewarded: list[float] = field(default_factory=list)
    """1.0 or 0.0 for each scored trial: passed or not."""
    timeouts: int = 0
    """Verifier time-outs."""
    errors: int = 0
    """All other failures."""


Side = Mapping[str, TaskTally]
"""One evaluation's trials by task."""


def _rate(values: Mapping[str, Sequence[float]], seed: str) -> Rate | None:
    scored = {task: list(rewards) for task, rewards in values.items() if rewards}
    if not scored:
        return None
    mean, interval = clustered_mean_interval(scored, seed=seed)
    return Rate(value=mean, interval=interval, tasks=len(scored))


def evaluate(side: Side, seed: str) -> Evaluation | None:
    """Rates and pass@k of one evaluation; None where it has no trial."""
    if not side:
        return None
    passed = sum(round(sum(task.rewarded)) for task in side.values())
    scored = sum(len(task.rewarded) for task in side.values())
    timeouts = sum(task.timeouts for task in side.values())
    errors = sum(task.errors for task in side.values())
    zeros = {
        "scored_only": dict.fromkeys(side, 0),
        "leaderboard": {name: task.timeouts for name, task in side.items()},
        "errors_as_zero": {name: task.timeouts + task.errors for name, task in side.items()},
    }
    policies = []
    for policy, pooled in pass_rates(passed, scored, timeouts, errors).items():
        counted = scored + sum(zeros[policy].values())
        values = {name: task.rewarded + [0.0] * zeros[policy][name] for name, task in side.items()}
        policies.append(
            PolicyRate(
                policy=policy,
                counted=counted,
                pooled=pooled,
                pooled_interval=wilson_interval(passed, counted) if counted else None,
                by_task=_rate(values, seed),
            )
        )
    return Evaluation(
        trials=scored + timeouts + errors,
        scored=scored,
        passed=passed,
        rate=next(row.by_task for row in policies if row.policy == "scored_only"),
        policies=tuple(policies),
        pass_at_k=_pass_at_k(list(side.values())),
    )


def _pass_at_k(tasks: Sequence[TaskTally]) -> tuple[PassAtK, ...]:
    counts = [(len(task.rewarded), round(sum(task.rewarded))) for task in tasks]
    rows = []
    for k in range(1, max(scored for scored, _ in counts) + 1):
        values = [pass_at_k(scored, passed, k) for scored, passed in counts if scored >= k]
        rows.append(PassAtK(k=k, value=sum(values) / len(values), tasks=len(values)))
    return tuple(rows)


def differ(before: Side, after: Side, seed: str) -> Difference | None:
    """After minus before on the tasks that were scored in both; None where there is no such task."""
    sides = [{name: task.rewarded for name, task in side.items()} for side in (before, after)]
    if not any(rewards and sides[1].get(name) for name, rewards in sides[0].items()):
        return None
    value, interval, tasks = paired_difference(*sides, seed=seed)
    return Difference(value=value, interval=interval, tasks=tasks)


def break_down(before: Side, after: Side, tasks: Sequence[TaskRow], seed: str) -> tuple[Breakdown, ...]:
    """A row for each family that was evaluated, followed by its levels where it has more than one."""
    cells: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in tasks:
        if row.task_id in before or row.task_id in after:
            cells[row.spec.family, row.spec.level].append(row.task_id)
    rows = []
    for family in sorted({family for family, _ in cells}):
        levels = sorted(level for name, level in cells if name == family)
        whole = [task for level in levels for task in cells[family, level]]
        rows.append(_row(before, after, family, None, whole, seed))
        if len(levels) > 1:
            rows += [_row(before, after, family, level, cells[family, level], seed) for level in levels]
    return tuple(rows)


def _row(before: Side, after: Side, family: str, level: int | None, task_ids: Sequence[str], seed: str) -> Breakdown:
    left, right = ({name: side[name] for name in task_ids if name in side} for side in (before, after))
    return Breakdown(
        family=family,
        level=level,
        before=_rate({name: task.rewarded for name, task in left.items()}, seed),
        after=_rate({name: task.rewarded for name, task in right.items()}, seed),
        difference=differ(left, right, seed),
    )
