"""The tiny policy that comes with tmax: it is what its config makes, and the command still makes one as good."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tmax.config import AgentConfig, BubblewrapConfig, HfPolicyConfig, Sampling, load_config
from tmax.policy.saved import model_dir, read_facts
from tmax.progress import Silent
from tmax.stages.rollout import rollout
from tmax.synth.draft import draw_task
from tmax.synth.sampler import sample_specs
from tmax.task import Task
from tmax.trial import Model, World

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/tiny.yaml"


def test_the_shipped_policy_says_what_it_was_trained_on() -> None:
    facts = read_facts(model_dir("tiny"))
    assert facts is not None
    config = load_config(CONFIG)
    assert facts["trajectories"] == config.sample.num_train == len(facts["seen"])
    assert config.sft is not None
    assert config.sft.model is not None
    shape = json.loads((model_dir("tiny") / "config.json").read_text())
    assert shape["hidden_size"] == config.sft.model.hidden_size
    assert shape["num_hidden_layers"] == config.sft.model.num_layers
    assert sum(path.stat().st_size for path in model_dir("tiny").iterdir()) < 5_000_000


def pass_rate(path: Path, tasks: list[Task]) -> float:
    from tmax.policy.hf import open_hf_policy
    from tmax.policy.template import ChatTemplate

    agent = AgentConfig(prompts="agent_brief", max_calls=4, command_timeout=10, max_context=384, max_malformed=1)
    world = World(BubblewrapConfig(), f"tiny-{os.getpid()}", agent)
    with open_hf_policy(HfPolicyConfig(path=str(path)), str(path)) as policy:
        model = Model(policy, ChatTemplate(policy.tokenizer), Sampling(max_tokens=48), name="tiny")
        trials = list(rollout(tasks, model, world, Silent(), samples=3, workers=12))
    assert all(trial.failure is None for trial in trials)
    return sum(trial.reward == 1.0 for trial in trials) / len(trials)


@pytest.mark.bwrap
@pytest.mark.remake
@pytest.mark.timeout(5400)
def test_the_command_still_makes_one_as_good(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tmax.cli", "sft", str(CONFIG), "--runs", str(tmp_path), "--set"]
    subprocess.run([*command, "sandbox={type: bubblewrap}"], check=True, timeout=5000)
    specs = sample_specs(load_config(CONFIG).sample.model_copy(update={"num_train": 80, "num_heldout": 1}), seed=77)[
        :80
    ]
    taken = set((read_facts(model_dir("tiny")) or {})["seen"])
    tasks = [draw_task(spec, tmp_path / "bank", seed=77, taken=taken) for spec in specs]
    shipped, made = pass_rate(model_dir("tiny"), tasks), pass_rate(tmp_path / "tiny/checkpoints/0", tasks)
    assert shipped > 0.15
    assert made > shipped - 0.12
