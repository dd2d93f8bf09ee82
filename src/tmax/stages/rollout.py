"""Stage `rollout`: reads accepted training tasks, writes a demonstrator's trials; or any policy's on any tasks."""

from collections.abc import Iterator, Sequence

from tmax.parallel import map_unordered
from tmax.policy.scripted import Careless
from tmax.progress import Progress
from tmax.records import Trial, TrialKey
from tmax.run import Run
from tmax.store import Store
from tmax.task import Task
from tmax.trial import Job, Policy, World, run_trial, run_trials


def demonstrate(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Roll out the careless demonstrator on the run's training tasks, for the warm start to learn from."""
    config = run.config.rollout
    if config is None:
        return {"skipped": "no `rollout` section"}
    policy = Careless(config.slip_share)
    jobs = [
        Job(run.task(row), policy, TrialKey(purpose="rollout", task_id=row.task_id, index=index))
        for row in run.store.accepted("train")
        for index in range(config.samples)
    ]
    progress.start("rollout", total=len(jobs))
    trials = run_trials(run.world, jobs, run.store, workers=run.config.workers, progress=progress)
    progress.finish()
    passed = sum(trial.reward == 1.0 for trial in trials)
    return {"trials": len(trials), "passed": passed}


def rollout(
    tasks: Sequence[Task],
    policy: Policy,
    world: World,
    progress: Progress,
    *,
    samples: int,
    workers: int,
    store: Store | None = None,
) -> Iterator[Trial]:
    """Run `samples` trials of a policy on each task and yield them as they finish, or keep them in a store."""
    jobs = [
        Job(task, policy, TrialKey(purpose="rollout", task_id=task.task_id, index=index))
        for task in tasks
        for index in range(samples)
    ]
    progress.start("rollout", total=len(jobs))
    if store is not None:
        yield from run_trials(world, jobs, store, workers=workers, progress=progress)
    else:
        for _, trial in map_unordered(
            lambda job: run_trial(world, job.task, job.policy, job.key), jobs, workers=workers
        ):
            progress.advance()
            yield trial
    progress.finish()
