"""Stage `sample`: reads the config, writes the specs."""

from tmax.progress import Progress
from tmax.run import Run
from tmax.synth.sampler import sample_specs


def sample(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Draw the run's specs. Raises ConfigError for a family or level that there is not."""
    specs = sample_specs(run.config.sample, seed=run.config.seed)
    run.store.add_specs(specs)
    progress.say(f"{run.config.sample.num_train} tasks to train on, {run.config.sample.num_heldout} held out")
    return {"specs": len(specs)}
