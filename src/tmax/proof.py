"""Proves a task before it is used: its initial tests pass, its final tests fail untouched, its oracle passes.

The rule: each gate is a trial in a fresh sandbox through the entry point that grades; a verifier that crashes is
no verdict, and what is unknown is never accepted.
"""

import time
from collections.abc import Callable

from tmax.policy.scripted import Noop, Oracle
from tmax.records import Evidence, Gate, Outcome, Purpose, TestReport, Trial, TrialKey, Verdict
from tmax.task import Task
from tmax.trial import Policy, World, run_trial

GATES: tuple[tuple[str, Purpose, Policy], ...] = (
    ("initial_passes", "validate_initial", Noop()),
    ("untouched_fails", "validate_noop", Noop()),
    ("oracle_passes", "validate_oracle", Oracle()),
)


def prove(world: World, task: Task, *, known: dict[Purpose, Trial], keep: Callable[[Trial], None]) -> Evidence:
    """Try the gates in order and stop at the first that does not accept.

    Trials in `known` are not run again; every new one is handed to `keep` before the next begins.
    """
    started = time.monotonic()
    gates: list[Gate] = []
    for name, purpose, policy in GATES:
        if name == "initial_passes" and task.initial_test is None:
            continue
        if name == "oracle_passes" and task.solution is None:
            gates.append(Gate(name="oracle_passes", verdict="UNKNOWN", detail="there is no oracle"))
            break
        trial = known.get(purpose)
        if trial is None:
            trial = run_trial(world, task, policy, TrialKey(purpose=purpose, task_id=task.task_id, index=0))
            keep(trial)
        gates.append(judge(name, trial))
        if gates[-1].verdict != "ACCEPT":
            break
    return Evidence(task_id=task.task_id, task_hash=task.hash, gates=tuple(gates), seconds=time.monotonic() - started)


def judge(name: str, trial: Trial) -> Gate:
    """What a gate's trial means for the task."""
    if trial.failure is not None:
        unknown = trial.outcome in (Outcome.INFRA_ERROR, Outcome.START_ERROR, Outcome.AGENT_ERROR)
        detail = f"{trial.outcome.value.replace('_', ' ')}: {trial.failure.message}"
        verdict: Verdict = "UNKNOWN" if unknown else "REJECT"
    elif name == "untouched_fails":
        failed = _names(trial.report, "failed")
        verdict = "REJECT" if trial.reward == 1.0 else "ACCEPT"
        detail = (
            "the final tests pass before anybody acts, so they prove nothing"
            if trial.reward == 1.0
            else f"untouched, {len(failed)} of {_count(trial.report)} tests fail"
        )
    else:
        failed = _names(trial.report, "failed")
        whose = "initial tests" if name == "initial_passes" else "final tests after the oracle"
        verdict = "ACCEPT" if trial.reward == 1.0 else "REJECT"
        detail = f"{whose}: " + (f"all {_count(trial.report)} pass" if not failed else f"failed {', '.join(failed)}")
    return Gate.model_validate(
        {"name": name, "verdict": verdict, "detail": detail, "outcome": trial.outcome, "report": trial.report}
    )


def _names(report: TestReport | None, status: str) -> list[str]:
    return [test.name for test in report.tests if test.status == status] if report else []


def _count(report: TestReport | None) -> int:
    return len(report.tests) if report else 0
