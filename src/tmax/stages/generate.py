"""Stage `generate`: reads the specs, writes a task directory and a row for each.

The rule: no instruction stands in two tasks of a run, nor in one that the base model was warm-started on.
"""

from tmax.policy.saved import model_dir, read_facts
from tmax.progress import Progress
from tmax.records import TaskRow
from tmax.run import Run
from tmax.synth.draft import draw_task, instruction_digest


def generate(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Make the tasks that are still missing, in the order of their specs. Raises TaskError."""
    specs = run.store.specs()
    rows = {row.spec.index: row for row in run.store.tasks()}
    taken = {instruction_digest(run.task(row).instruction) for row in rows.values()}
    if run.config.policy.path is not None:
        taken |= set((read_facts(model_dir(run.config.policy.path)) or {}).get("seen", []))
    progress.start("generate", total=len(specs), done=len(rows))
    for spec in specs:
        if spec.index not in rows:
            task = draw_task(spec, run.tasks_dir, seed=run.config.seed, taken=taken)
            run.store.add_task(TaskRow(task_id=task.task_id, spec=spec, task_hash=task.hash))
            progress.advance()
    progress.finish()
    return {"tasks": len(specs)}
