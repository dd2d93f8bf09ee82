"""Stage `rollout`: reads task directories and a policy, writes trials; with no run around it."""

from collections.abc import Iterator, Sequence

from tmax.parallel import map_unordered
from tmax.progress import Progress
from tmax.records import Trial, TrialKey
from tmax.store import Store
from tmax.task import Task
from tmax.trial import Job, Policy, World, run_trial, run_trials


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
