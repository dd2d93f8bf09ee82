"""A run killed at any instant goes on where it was: nothing lost, nothing done twice, nothing left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tmax.pipeline import STAGES
from tmax.store import open_store
from tmax.task import read_task

pytestmark = [pytest.mark.bwrap, pytest.mark.slow]

KILLS = 20

CONFIG = """
name: {name}
seed: 5
workers: 4
sandbox: {{type: bubblewrap}}
sample:
  families: [{{name: place, levels: [1]}}, {{name: tally, levels: [1]}}]
  num_train: 8
  num_heldout: 3
agent: {{prompts: agent_brief, max_calls: 3, command_timeout: 5, max_context: 300, max_malformed: 1}}
sft:
  model: {{vocab_size: 600, hidden_size: 32, num_layers: 2, num_heads: 2, max_context: 512}}
  num_epochs: 10
  batch_size: 4
  lr: 3.0e-3
calibrate: {{samples: 2, band: [0.0, 1.0]}}
train:
  num_steps: 3
  prompts_per_step: 2
  group_size: 4
  max_draws: 2
  lr: 1.0e-4
  sampling: {{max_tokens: 12}}
  checkpoint_every: 2
eval: {{samples: 2, sampling: {{temperature: 1.0, max_tokens: 12}}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    # A name of its own, so that what is looked for afterwards belongs to this test alone.
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(name=f"killed-{os.getpid()}"))
    return path


def start(config: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tmax.cli", "run", str(config), "--runs", str(config.parent / "runs")]
    log = (config.parent / "log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def processes_of(label: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if label in command:
                found.append(command)
    return found


def test_twenty_kills_lose_nothing_and_repeat_nothing(config: Path) -> None:
    name = f"killed-{os.getpid()}"
    rng = random.Random(os.getpid())
    kills = 0
    while True:
        process = start(config)
        limit = rng.uniform(0.5, 14.0) if kills < KILLS else 600.0
        began = time.monotonic()
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        log = (config.parent / "log").read_text(errors="replace")
        assert code == 0 or "no group with spread" in log, log[-3000:]
        if kills >= KILLS or time.monotonic() - began > 600:
            break
        if code == 0 and kills < KILLS:
            break
    run = config.parent / "runs" / name
    with open_store(run / "run.db", write=False) as store:
        stages = store.stages()
        rows = store.tasks()
        keys = [trial.key for trial in store.trials()]
        assert len(keys) == len(set(keys))
        assert len(rows) == 11
        assert all(read_task(run / "tasks" / row.task_id).hash == row.task_hash for row in rows)
        assert {trial.key.task_id for trial in store.trials("validate_oracle")} == {row.task_id for row in rows}
        assert len(store.trial_keys("calibrate")) == 16
        assert len(store.trial_keys("eval_before")) == 6
        for group in store.groups():
            members = {index for task, index in store.trial_keys("train") if task == group.task_id}
            assert set(range(group.first_index, group.first_index + group.size)) <= members
        if "eval_after" in stages:
            assert {name for name, stage in stages.items() if stage.state == "done"} == set(STAGES)
            assert len(store.trial_keys("eval_after")) == 6
            drawn = {
                (group.task_id, group.first_index + place) for group in store.groups() for place in range(group.size)
            }
            assert drawn == store.trial_keys("train")
    time.sleep(0.5)
    assert processes_of(name) == []
    assert name not in Path("/proc/self/mountinfo").read_text()
    from tmax.config import BubblewrapConfig
    from tmax.sandbox import reap

    reap(BubblewrapConfig(), label=name)
    assert reap(BubblewrapConfig(), label=name) == 0
