"""Stage `calibrate`: reads accepted training tasks, writes each one's pass rate under the policy to be trained."""

from tmax.progress import Progress
from tmax.records import Calibration, TaskRow, Trial, TrialKey
from tmax.run import Run
from tmax.stats import p_mixed_group, wilson_interval
from tmax.trial import Job, run_trials


def calibrate(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Sample trials of each task and say which lie in the band where groups carry gradient."""
    config = run.config.calibrate
    rows = run.store.accepted("train")[: config.max_tasks]
    with run.open_policy(step=0, sampling=config.sampling) as policy:
        jobs = [
            Job(run.task(row), policy, TrialKey(purpose="calibrate", task_id=row.task_id, index=index))
            for row in rows
            for index in range(config.samples)
        ]
        progress.start("calibrate", total=len(jobs))
        trials = run_trials(run.world, jobs, run.store, workers=run.config.workers, progress=progress)
        progress.finish()
    by_task: dict[str, list[Trial]] = {row.task_id: [] for row in rows}
    for trial in trials:
        by_task[trial.key.task_id].append(trial)
    measured = [_measure(run, row, by_task[row.task_id]) for row in rows]
    for calibration in measured:
        run.store.add_calibration(calibration)
    rates = [item.pass_rate for item in measured if item.pass_rate is not None]
    return {
        "tasks": len(measured),
        "in_band": sum(item.in_band for item in measured),
        "mean_pass_rate": sum(rates) / len(rates) if rates else None,
    }


def _measure(run: Run, row: TaskRow, trials: list[Trial]) -> Calibration:
    scored = [trial for trial in trials if trial.reward is not None]
    passed = sum(trial.reward == 1.0 for trial in scored)
    rate = passed / len(scored) if scored else None
    low, high = run.config.calibrate.band
    return Calibration(
        task_id=row.task_id,
        trials=len(trials),
        scored=len(scored),
        passed=passed,
        pass_rate=rate,
        interval=wilson_interval(passed, len(scored)) if scored else None,
        p_mixed=None if rate is None else p_mixed_group(rate, run.config.train.group_size),
        in_band=rate is not None and low <= rate <= high,
    )
