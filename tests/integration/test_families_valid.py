"""Every task that the families make is proven: drawn over seeds and levels, all accepted."""

import os
from pathlib import Path

import pytest

from tmax.config import AgentConfig, BubblewrapConfig, FamilyDraw, SampleConfig
from tmax.progress import Silent
from tmax.stages.validate import validate_paths
from tmax.synth.draft import draw_task
from tmax.synth.families import FAMILIES
from tmax.synth.sampler import sample_specs
from tmax.trial import World

pytestmark = [pytest.mark.bwrap, pytest.mark.slow]

PER_SEED = 100


def test_three_hundred_draws_are_all_accepted(tmp_path: Path) -> None:
    families = tuple(FamilyDraw(name=name, levels=family.levels) for name, family in FAMILIES.items())
    config = SampleConfig(families=families, num_train=PER_SEED, num_heldout=1)
    tasks = []
    for seed in range(3):
        taken: set[str] = set()
        specs = sample_specs(config, seed=seed)[:PER_SEED]
        tasks += [draw_task(spec, tmp_path / str(seed), seed=seed, taken=taken) for spec in specs]
    world = World(BubblewrapConfig(), f"valid-{os.getpid()}", AgentConfig(command_timeout=30))
    evidence = validate_paths([task.path for task in tasks], world, Silent(), workers=6)
    assert len(evidence) == 300
    assert [f"{item.task_id} {item.reason}" for item in evidence if item.verdict != "ACCEPT"] == []
    combinations = {(task.card["spec"]["family"], task.card["spec"]["level"]) for task in tasks}
    assert combinations == {(name, level) for name, family in FAMILIES.items() for level in family.levels}
