"""Stage `validate`: reads task directories, writes the gates' trials and the evidence for each task."""

from collections.abc import Sequence
from pathlib import Path

from tmax.errors import TaskError
from tmax.parallel import map_unordered
from tmax.progress import Progress
from tmax.proof import GATES, prove
from tmax.records import Evidence, Gate, Purpose, TaskRow, Trial
from tmax.run import Run
from tmax.task import read_task
from tmax.trial import World


def validate(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Prove the run's tasks. Raises TaskError where more of them are not accepted than the config allows."""
    rows = run.store.tasks()
    proven = run.store.evidence()
    known: dict[str, dict[Purpose, Trial]] = {row.task_id: {} for row in rows}
    for _, purpose, _ in GATES:
        for trial in run.store.trials(purpose):
            known[trial.key.task_id][purpose] = trial
    todo = [row for row in rows if (row.task_id, row.task_hash) not in proven]
    world = run.world

    def prove_row(row: TaskRow) -> Evidence:
        return prove(world, run.task(row), known=known[row.task_id], keep=run.store.add_trial)

    progress.start("validate", total=len(rows), done=len(rows) - len(todo))
    for _, evidence in map_unordered(prove_row, todo, workers=run.config.workers):
        run.store.add_evidence(evidence)
        progress.advance()
    progress.finish()
    accepted = sum(len(run.store.accepted(split)) for split in ("train", "heldout"))
    _refuse_a_bad_bank(run, accepted, len(rows))
    return {"tasks": len(rows), "accepted": accepted}


def validate_paths(paths: Sequence[Path], world: World, progress: Progress, *, workers: int) -> list[Evidence]:
    """Prove anybody's task directories, with no run; a directory that is no task is rejected as unreadable."""

    def prove_path(path: Path) -> Evidence:
        try:
            task = read_task(path)
        except TaskError as error:
            gate = Gate(name="readable", verdict="REJECT", detail=error.message)
            return Evidence(task_id=path.name, task_hash="", gates=(gate,))
        for key in task.unknown_keys:
            progress.say(f"{task.task_id}: task.toml has a key that means nothing here: {key}")
        return prove(world, task, known={}, keep=lambda trial: None)

    progress.start("validate", total=len(paths))
    found = []
    for path, evidence in map_unordered(prove_path, paths, workers=workers):
        found.append((paths.index(path), evidence))
        progress.advance()
    progress.finish()
    return [evidence for _, evidence in sorted(found, key=lambda pair: pair[0])]


def _refuse_a_bad_bank(run: Run, accepted: int, total: int) -> None:
    share = 1 - accepted / total
    if share <= run.config.validate_.max_rejected_share:
        return
    first = next(item for item in run.store.evidence().values() if item.verdict != "ACCEPT")
    raise TaskError(
        f"{total - accepted} of {total} tasks were not accepted; {first.task_id}: {first.reason}",
        hint="mend the tasks, or raise `validate.max_rejected_share`",
    )
