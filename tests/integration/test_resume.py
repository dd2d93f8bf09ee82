"""Runs killed at any instant go on where they were: nothing lost, nothing done twice, nothing left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tmax.config import BubblewrapConfig
from tmax.pipeline import STAGES
from tmax.sandbox import reap
from tmax.store import open_store
from tmax.task import read_task

pytestmark = [pytest.mark.bwrap, pytest.mark.slow]

KILLS = 20

CONFIG = """
name: {name}
seed: {seed}
workers: 4
sandbox: {{type: bubblewrap}}
sample:
  families: [{{name: place, levels: [1]}}, {{name: tally, levels: [1]}}]
  num_train: 10
  num_heldout: 4
agent: {{prompts: agent_brief, max_calls: 3, command_timeout: 5, max_context: 384, max_malformed: 1}}
policy: {{path: tiny}}
sft: {{num_epochs: 4, batch_size: 4, lr: 3.0e-4}}
calibrate: {{samples: 2, band: [0.0, 1.0]}}
train:
  num_steps: 4
  prompts_per_step: 2
  group_size: 6
  max_draws: 2
  lr: 1.0e-4
  sampling: {{max_tokens: 40}}
  checkpoint_every: 2
eval: {{samples: 2, sampling: {{temperature: 1.0, max_tokens: 40}}}}
"""


def start(config: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tmax.cli", "run", str(config), "--runs", str(config.parent / "runs")]
    with (config.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def processes_of(label: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if label.encode() in command:
            found.append(command.decode(errors="replace"))
    return found


def check_finished(run: Path) -> None:
    with open_store(run / "run.db", write=False) as store:
        assert {name for name, stage in store.stages().items() if stage.state == "done"} == set(STAGES)
        rows = store.tasks()
        assert len(rows) == 14
        assert all(read_task(run / "tasks" / row.task_id).hash == row.task_hash for row in rows)
        keys = [trial.key for trial in store.trials()]
        assert len(keys) == len(set(keys))
        for purpose in ("validate_initial", "validate_noop", "validate_oracle"):
            assert store.trial_keys(purpose) == {(row.task_id, 0) for row in rows}
        assert len(store.trial_keys("calibrate")) == 20
        assert len(store.trial_keys("eval_before")) == len(store.trial_keys("eval_after")) == 8
        assert [step.step for step in store.steps()] == [0, 1, 2, 3]
        drawn = [(group.task_id, group.first_index + place) for group in store.groups() for place in range(group.size)]
        assert len(drawn) == len(set(drawn))
        assert set(drawn) == store.trial_keys("train")


def check_nothing_left(label: str) -> None:
    deadline = time.monotonic() + 5
    while processes_of(label) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(label) == []
    assert label not in Path("/proc/self/mountinfo").read_text()
    assert reap(BubblewrapConfig(), label=label) == 0


def test_twenty_kills_lose_nothing_repeat_nothing_and_leave_nothing(tmp_path: Path) -> None:
    rng = random.Random(11)
    config = tmp_path / "config.yaml"
    kills = finished = 0
    while kills < KILLS or not finished:
        name = f"killed-{os.getpid()}-{finished}"
        config.write_text(CONFIG.format(name=name, seed=finished))
        process = start(config)
        try:
            code = process.wait(timeout=rng.uniform(1.0, 12.0) if kills < KILLS else 600.0)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert code == 0, (tmp_path / "log").read_text(errors="replace")[-3000:]
        check_finished(tmp_path / "runs" / name)
        check_nothing_left(name)
        finished += 1
