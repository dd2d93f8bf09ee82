"""Every figure of a run, computed from its store and configuration and from nothing else.

The rule: a figure is None where the stage that makes it has not run yet, and a failure is never a zero.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tmax.config import RunConfig, load_config
from tmax.records import (
    Calibration,
    Evidence,
    Failure,
    Outcome,
    Purpose,
    Record,
    Spec,
    TaskRow,
    Trial,
)
from tmax.report.evaluation import Breakdown, Evaluation, Interval, TaskTally, break_down, differ, evaluate
from tmax.store import Store, open_store

HISTOGRAM_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Inner bins of the calibration histogram; exact 0 and exact 1 carry no gradient and stand apart."""


class FunnelStep(Record):
    """How many tasks got this far; `heldout` is None for steps that concern training only."""

    name: str
    train: int | None
    heldout: int | None


class Rejection(Record):
    """Tasks that a gate did not accept; `example` is what it said about the first of them."""

    gate: str
    verdict: str
    tasks: int
    example: str


class CalibrationSummary(Record):
    """Pass rates of the training tasks before training."""

    tasks: int
    measured: int
    """Tasks with at least one scored trial."""
    mean: float | None
    mean_p_mixed: float | None
    """Expected share of groups that carry gradient, were tasks drawn evenly."""
    in_band: int
    histogram: tuple[tuple[str, int], ...]
    """(bin, number of tasks), from exact 0 to exact 1."""


class ErrorExample(Record):
    """One failure of a kind, in full."""

    kind: str
    purpose: Purpose
    task_id: str
    failure: Failure


class Summary(Record):
    """What `tmax report --json` prints. Rates are shares in [0, 1]; times are seconds."""

    name: str
    tasks_sampled: int | None
    tasks_generated: int | None
    tasks_valid: int | None
    """Tasks whose evidence, for the files they have now, says ACCEPT."""
    heldout_tasks: int | None
    """Valid tasks of the held-out split."""
    trials: int
    """Trials of every purpose."""
    scored: int
    errors_by_kind: dict[str, int]
    """`trials - scored` by outcome; infrastructure's with its kind, as in `infra_error:disk`."""
    outcomes: dict[str, dict[str, int]]
    """Trials by purpose and outcome."""
    passed_at_a_limit: int
    """Trials that passed although time or context ran out."""
    retries: int
    retries_by_kind: dict[str, int]
    pass_rate_before: float | None
    pass_rate_after: float | None
    difference: float | None
    difference_ci: Interval | None
    difference_tasks: int | None
    before: Evaluation | None
    after: Evaluation | None
    breakdown: tuple[Breakdown, ...]
    funnel: tuple[FunnelStep, ...]
    rejections: tuple[Rejection, ...]
    calibration: CalibrationSummary | None
    train_steps: int | None
    tokens_trained: int | None
    """Tokens that carried loss, over all steps."""
    groups_by_fate: dict[str, int] | None
    seconds_by_stage: dict[str, float]
    stage_states: dict[str, str]
    error_examples: tuple[ErrorExample, ...]


def read_summary(run_dir: Path) -> Summary:
    """The figures of the run in `run_dir`, which may still be going on.

    Raises StoreError where there is no run, ConfigError where its configuration cannot be read.
    """
    with open_store(run_dir / "run.db", write=False) as store:
        return summarise(store, load_config(run_dir / "config.yaml"))


def summarise(store: Store, config: RunConfig) -> Summary:
    """Every figure of a run. Its own seed drives the bootstrap, so the same run gives the same figures."""
    seed = str(config.seed)
    # The report itself is a stage that is still running while it is written.
    stages = {name: row for name, row in store.stages().items() if name != "report"}
    specs, tasks, steps = store.specs(), store.tasks(), store.steps()
    evidence, calibration, groups = store.evidence(), store.calibration(), store.groups()
    tally = _Tally()
    for trial in store.trials():
        tally.add(trial)
    accepted = [row for row in tasks if _verdict(row, evidence) == "ACCEPT"]
    sides = tally.tasks["eval_before"], tally.tasks["eval_after"]
    before, after = (evaluate(side, seed) for side in sides)
    difference = differ(*sides, seed)
    validated = bool(evidence) or "validate" in stages
    trained = steps or "train" in stages
    tokens = [step.metrics["tokens"] for step in steps if math.isfinite(step.metrics.get("tokens", math.nan))]
    return Summary(
        name=config.name,
        tasks_sampled=len(specs) if specs or "sample" in stages else None,
        tasks_generated=len(tasks) if tasks or "generate" in stages else None,
        tasks_valid=len(accepted) if validated else None,
        heldout_tasks=sum(row.spec.split == "heldout" for row in accepted) if validated else None,
        trials=sum(sum(counts.values()) for counts in tally.outcomes.values()),
        scored=tally.scored,
        errors_by_kind=_sorted(tally.errors),
        outcomes={purpose: _sorted(counts) for purpose, counts in tally.outcomes.items()},
        passed_at_a_limit=tally.passed_at_a_limit,
        retries=sum(tally.retries.values()),
        retries_by_kind=_sorted(tally.retries),
        pass_rate_before=before.rate.value if before and before.rate else None,
        pass_rate_after=after.rate.value if after and after.rate else None,
        difference=difference.value if difference else None,
        difference_ci=difference.interval if difference else None,
        difference_tasks=difference.tasks if difference else None,
        before=before,
        after=after,
        breakdown=break_down(*sides, tasks, seed),
        funnel=_funnel(
            specs, tasks, accepted if validated else None, calibration,
            {group.task_id for group in groups if group.fate == "kept"} if trained else None,
        ),
        rejections=_rejections(tasks, evidence),
        calibration=_calibration(calibration) if calibration or "calibrate" in stages else None,
        train_steps=len(steps) if trained else None,
        tokens_trained=round(sum(tokens)) if tokens else None,
        groups_by_fate=_sorted(Counter(group.fate for group in groups)) if groups else None,
        seconds_by_stage={name: row.seconds for name, row in stages.items()},
        stage_states={name: row.state for name, row in stages.items()},
        error_examples=tuple(tally.examples.values()),
    )  # fmt: skip


class _Tally:
    """What one walk over all trials counts."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.tasks: dict[Purpose, dict[str, TaskTally]] = defaultdict(lambda: defaultdict(TaskTally))
        self.errors: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.examples: dict[str, ErrorExample] = {}
        self.scored = 0
        self.passed_at_a_limit = 0

    def add(self, trial: Trial) -> None:
        purpose, outcome = trial.key.purpose, trial.outcome
        self.outcomes[purpose][outcome.value] += 1
        self.retries.update(failure.kind or "unknown" for failure in trial.retries)
        task = self.tasks[purpose][trial.key.task_id]
        if trial.reward is not None:
            self.scored += 1
            self.passed_at_a_limit += trial.reward == 1.0 and outcome is not Outcome.PASSED
            task.rewarded.append(float(trial.reward == 1.0))
        elif trial.failure is not None:
            kind = error_kind(trial)
            self.errors[kind] += 1
            example = ErrorExample(kind=kind, purpose=purpose, task_id=trial.key.task_id, failure=trial.failure)
            self.examples.setdefault(kind, example)
            if outcome is Outcome.VERIFIER_TIMEOUT:
                task.timeouts += 1
            else:
                task.errors += 1


def error_kind(trial: Trial) -> str:
    """A failed trial's outcome, with the kind where infrastructure is to blame."""
    kind = trial.failure.kind if trial.failure else None
    return f"{trial.outcome.value}:{kind}" if kind else trial.outcome.value


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """Most frequent first, names break ties."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _verdict(row: TaskRow, evidence: Mapping[tuple[str, str], Evidence]) -> str | None:
    found = evidence.get((row.task_id, row.task_hash))
    return found.verdict if found else None


def _funnel(
    specs: Sequence[Spec],
    tasks: Sequence[TaskRow],
    accepted: Sequence[TaskRow] | None,
    calibration: Mapping[str, Calibration],
    trained: set[str] | None,
) -> tuple[FunnelStep, ...]:
    def split(rows: Sequence[TaskRow] | None, name: str) -> int | None:
        return None if rows is None else sum(row.spec.split == name for row in rows)

    steps = [
        FunnelStep(
            name="sampled",
            train=sum(spec.split == "train" for spec in specs),
            heldout=sum(spec.split == "heldout" for spec in specs),
        ),
        FunnelStep(name="generated", train=split(tasks, "train"), heldout=split(tasks, "heldout")),
        FunnelStep(name="accepted", train=split(accepted, "train"), heldout=split(accepted, "heldout")),
    ]
    if calibration:
        steps.append(FunnelStep(name="calibrated", train=len(calibration), heldout=None))
        in_band = sum(row.in_band for row in calibration.values())
        steps.append(FunnelStep(name="calibrated in band", train=in_band, heldout=None))
    steps.append(FunnelStep(name="trained on", train=None if trained is None else len(trained), heldout=None))
    return tuple(steps)


def _rejections(tasks: Sequence[TaskRow], evidence: Mapping[tuple[str, str], Evidence]) -> tuple[Rejection, ...]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in tasks:
        proof = evidence.get((row.task_id, row.task_hash))
        if proof is None or proof.verdict == "ACCEPT":
            continue
        blamed = next((gate for gate in proof.gates if gate.verdict == proof.verdict), None)
        name, detail = (blamed.name, blamed.detail) if blamed else ("no gate", "the task was not tried")
        found[name, proof.verdict].append(f"{row.task_id}: {detail}")
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        Rejection(gate=gate, verdict=verdict, tasks=len(details), example=details[0])
        for (gate, verdict), details in ordered
    )


def _calibration(rows: Mapping[str, Calibration]) -> CalibrationSummary:
    rates = [row.pass_rate for row in rows.values() if row.pass_rate is not None]
    mixed = [row.p_mixed for row in rows.values() if row.p_mixed is not None]
    inner = [rate for rate in rates if 0.0 < rate < 1.0]
    bins = [("0", sum(rate == 0.0 for rate in rates))]
    bins += [
        (f"{low:g}–{high:g}", sum(low <= rate < high for rate in inner)) for low, high in pairwise(HISTOGRAM_EDGES)
    ]
    bins += [("1", sum(rate == 1.0 for rate in rates))]
    return CalibrationSummary(
        tasks=len(rows),
        measured=len(rates),
        mean=sum(rates) / len(rates) if rates else None,
        mean_p_mixed=sum(mixed) / len(mixed) if mixed else None,
        in_band=sum(row.in_band for row in rows.values()),
        histogram=tuple(bins),
    )
