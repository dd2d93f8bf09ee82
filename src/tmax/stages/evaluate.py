"""Stages `eval_before` and `eval_after`: read accepted held-out tasks, write trials of the policy before and after."""

from typing import Literal

from tmax.errors import TaskError
from tmax.policy.saved import newest_checkpoint
from tmax.progress import Progress
from tmax.records import TrialKey
from tmax.run import Run
from tmax.trial import Job, run_trials


def evaluate(
    run: Run, progress: Progress, *, when: Literal["eval_before", "eval_after"]
) -> dict[str, float | int | str | None]:
    """Sample several trials of each held-out task. Raises TaskError where none was accepted."""
    config = run.config.eval
    rows = run.store.accepted("heldout")
    if not rows:
        raise TaskError("no held-out task was accepted", hint="`tmax report` says why; raise `sample.num_heldout`")
    newest = newest_checkpoint(run.checkpoints_dir)
    step = newest[0] if newest is not None and when == "eval_after" else 0
    with run.open_policy(step=step, sampling=config.sampling) as policy:
        jobs = [
            Job(run.task(row), policy, TrialKey(purpose=when, task_id=row.task_id, index=index))
            for row in rows
            for index in range(config.samples)
        ]
        progress.start(when.replace("_", " "), total=len(jobs))
        trials = run_trials(run.world, jobs, run.store, workers=run.config.workers, progress=progress)
        progress.finish()
    scored = [trial for trial in trials if trial.reward is not None]
    passed = sum(trial.reward == 1.0 for trial in scored)
    return {
        "step": step,
        "trials": len(trials),
        "scored": len(scored),
        "pass_rate": passed / len(scored) if scored else None,
    }
