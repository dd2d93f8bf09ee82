"""The stages of a run in order; `tmax run` walks them, and a single command takes one.

| stage       | reads                                  | writes                                    |
|-------------|----------------------------------------|-------------------------------------------|
| sample      | config                                 | specs                                     |
| generate    | specs                                  | tasks/, tasks                             |
| validate    | tasks                                  | trials (noop, oracle), evidence           |
| rollout     | accepted training tasks                | trials of a demonstrator                  |
| sft         | demonstrations in training tasks       | checkpoints/0                             |
| calibrate   | checkpoints/0, accepted training tasks | trials, calibration                       |
| eval_before | checkpoints/0, accepted held-out tasks | trials                                    |
| train       | checkpoints/, tasks in the band        | trials, groups, steps, checkpoints/<step> |
| eval_after  | the newest checkpoint, held-out tasks  | trials                                    |
| report      | everything above                       | report/                                   |

The warm start comes before calibration: what is calibrated is the policy that will be trained.
"""

import time
from collections.abc import Callable
from typing import Literal, assert_never, get_args

from tmax.errors import StoreError
from tmax.progress import Progress
from tmax.run import Run

Stage = Literal[
    "sample", "generate", "validate", "rollout", "sft", "calibrate", "eval_before", "train", "eval_after", "report"
]
STAGES: tuple[Stage, ...] = get_args(Stage)

Detail = dict[str, float | int | str | None]


def run_pipeline(run: Run, progress: Progress, *, on_stage: Callable[[Stage, Detail], None]) -> None:
    """Walk all stages, skipping those that are done; `on_stage` is told of each as it ends. Raises TmaxErrors."""
    for stage in STAGES:
        on_stage(stage, run_stage(run, stage, progress))


def run_stage(run: Run, stage: Stage, progress: Progress) -> Detail:
    """Do one stage, or go on with it; a stage that is done is not done again.

    Raises StoreError where the stage before it is not done.
    """
    stages = run.store.stages()
    if stage in stages and stages[stage].state == "done" and stage != "report":
        return stages[stage].detail
    for earlier in STAGES[: STAGES.index(stage)]:
        if stage != "report" and (earlier not in stages or stages[earlier].state != "done"):
            raise StoreError(f"stage `{stage}` needs stage `{earlier}`, which is not done", hint="`tmax run` does both")
    began = time.monotonic()
    run.store.set_stage(stage, "running")
    try:
        detail = _do(run, stage, progress)
    except BaseException:
        run.store.set_stage(stage, "running", seconds=time.monotonic() - began)
        raise
    run.store.set_stage(stage, "done", seconds=time.monotonic() - began, detail=detail)
    return detail


def _do(run: Run, stage: Stage, progress: Progress) -> Detail:
    # Each stage is loaded when it is needed: some of them load torch.
    match stage:
        case "sample":
            from tmax.stages.sample import sample

            return sample(run, progress)
        case "generate":
            from tmax.stages.generate import generate

            return generate(run, progress)
        case "validate":
            from tmax.stages.validate import validate

            return validate(run, progress)
        case "rollout":
            from tmax.stages.rollout import demonstrate

            return demonstrate(run, progress)
        case "sft":
            from tmax.stages.sft import sft

            return sft(run, progress)
        case "calibrate":
            from tmax.stages.calibrate import calibrate

            return calibrate(run, progress)
        case "eval_before" | "eval_after":
            from tmax.stages.evaluate import evaluate

            return evaluate(run, progress, when=stage)
        case "train":
            from tmax.stages.train import train

            return train(run, progress)
        case "report":
            from tmax.stages.report import report

            return {"page": str(report(run.path))}
        case _:
            assert_never(stage)
