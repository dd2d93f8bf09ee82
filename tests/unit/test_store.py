"""The run's database: what is committed stays, what is done is not done twice, and one process writes."""

import fcntl
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

from tmax.errors import StoreError
from tmax.records import (
    Calibration,
    Evidence,
    Failure,
    Gate,
    GroupRow,
    Outcome,
    Purpose,
    Spec,
    StepRow,
    TaskRow,
    TestReport,
    TestResult,
    TokenTrace,
    Trajectory,
    Trial,
    TrialKey,
    Turn,
)
from tmax.store import open_store

REPORT = TestReport(tests=(TestResult(name="test_one", status="passed"),), exit_code=0)


def a_trial(task: str, index: int, purpose: Purpose = "train", trajectory: Trajectory | None = None) -> Trial:
    key = TrialKey(purpose=purpose, task_id=task, index=index)
    return Trial(
        key=key, task_hash="h", policy="p", outcome=Outcome.PASSED, reward=1.0, report=REPORT, trajectory=trajectory
    )


def a_spec(index: int, split: str = "train") -> Spec:
    return Spec.model_validate({"index": index, "family": "f", "level": 1, "domain": "d", "split": split})


def a_story(words: str) -> Trajectory:
    trace = TokenTrace(ids=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0.0, -0.1, -1e-9), versions=(-1, 4, 5))
    turn = Turn(reply="go", command="ls", observation=words, exit_code=0, seconds=0.25)
    return Trajectory(system="s", instruction="i", turns=(turn,), stop="submitted", tokens=trace)


def test_every_kind_of_row_comes_back_as_it_went_in(tmp_path: Path) -> None:
    task = TaskRow(task_id="t", spec=a_spec(1, "heldout"), task_hash="h")
    gate = Gate(name="readable", verdict="ACCEPT", detail="")
    evidence = Evidence(task_id="t", task_hash="h", gates=(gate,))
    calibration = Calibration(
        task_id="t", trials=4, scored=3, passed=1, pass_rate=1 / 3, interval=(0.1, 0.8), p_mixed=0.5, in_band=True
    )
    step = StepRow(step=0, version=1, metrics={"loss": -0.5})
    group = GroupRow(step=0, task_id="t", first_index=0, size=2, rewards=(0.0, 1.0), fate="kept")
    with open_store(tmp_path / "run.db") as store:
        store.add_specs([a_spec(1), a_spec(0)])
        store.add_task(task)
        store.add_evidence(evidence)
        store.add_calibration(calibration)
        store.add_step(step, [group])
        store.set_stage("train", "running", seconds=1.5)
        store.set_stage("train", "done", seconds=2.0, detail={"steps": 1})
    with open_store(tmp_path / "run.db", write=False) as store:
        assert store.specs() == [a_spec(0), a_spec(1)]
        assert (store.tasks(), store.tasks("train"), store.tasks("heldout")) == ([task], [], [task])
        assert store.evidence() == {("t", "h"): evidence}
        assert store.accepted("heldout") == [task]
        assert store.calibration() == {"t": calibration}
        assert (store.steps(), store.groups()) == ([step], [group])
        stage = store.stages()["train"]
        assert (stage.state, stage.seconds, stage.detail) == ("done", 3.5, {"steps": 1})


def test_evidence_for_another_hash_accepts_nothing(tmp_path: Path) -> None:
    gate = Gate(name="readable", verdict="ACCEPT", detail="")
    with open_store(tmp_path / "run.db") as store:
        store.add_evidence(Evidence(task_id="t", task_hash="old", gates=(gate,)))
        store.add_task(TaskRow(task_id="t", spec=a_spec(0), task_hash="new"))
        assert store.accepted("train") == []


def test_a_trial_is_kept_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "run.db") as store:
        store.add_trial(a_trial("t", 0))
        store.add_trial(a_trial("t", 0, "eval_after"))
        with pytest.raises(StoreError, match="already"):
            store.add_trial(a_trial("t", 0))
        assert store.trial_keys("train") == {("t", 0)}
        assert store.count_trials() == {("train", Outcome.PASSED): 1, ("eval_after", Outcome.PASSED): 1}


def test_a_step_done_again_replaces_its_groups(tmp_path: Path) -> None:
    def group(first: int) -> GroupRow:
        return GroupRow(step=3, task_id="t", first_index=first, size=1, rewards=(1.0,), fate="all_one")

    with open_store(tmp_path / "run.db") as store:
        store.add_step(StepRow(step=3, version=4, metrics={}), [group(0), group(1)])
        store.add_step(StepRow(step=3, version=4, metrics={"loss": 1.0}), [group(2)])
        assert store.groups() == [group(2)]
        assert [step.metrics for step in store.steps()] == [{"loss": 1.0}]


def test_trajectories_are_compressed_and_come_back_equal(tmp_path: Path) -> None:
    story = a_story("żółć \x00\x1b[31m\u2028 " + "the same line\n" * 5000)
    with open_store(tmp_path / "run.db") as store:
        store.add_trial(a_trial("t", 7, trajectory=story))
        (bare,) = store.trials("train")
        (whole,) = store.trials("train", trajectories=True)
        found = store.trial(TrialKey(purpose="train", task_id="t", index=7))
        assert bare.trajectory is None
        assert whole.trajectory == story
        assert found == whole
        assert store.trial(TrialKey(purpose="train", task_id="t", index=8)) is None
    connection = sqlite3.connect(tmp_path / "run.db")
    body, blob = connection.execute("SELECT body, trajectory FROM trials").fetchone()
    connection.close()
    assert "the same line" not in body
    assert Trajectory.model_validate_json(zlib.decompress(blob)) == story
    assert len(blob) < len(story.model_dump_json()) / 20


def test_trials_come_in_order_over_many_pages_each_once(tmp_path: Path) -> None:
    purposes: tuple[Purpose, ...] = ("train", "eval_after")
    with open_store(tmp_path / "run.db") as store:
        for index in reversed(range(230)):
            for purpose in purposes:
                store.add_trial(a_trial(f"t{index % 2}", index, purpose))
        keys = [(t.key.purpose, t.key.task_id, t.key.index) for t in store.trials()]
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys) == 460
        assert [t.key.index for t in store.trials("train", task_id="t1")] == list(range(1, 230, 2))
        assert sum(1 for _ in store.trials(task_id="t0")) == 230


_WRITER = """
import sys
from pathlib import Path
from tmax.records import *
from tmax.store import open_store
report = TestReport(tests=(TestResult(name="t", status="passed"),), exit_code=0)
with open_store(Path(sys.argv[1])) as store:
    for index in range(100_000):
        key = TrialKey(purpose="train", task_id="t", index=index)
        store.add_trial(Trial(key=key, task_hash="h", policy="p", outcome="passed", reward=1.0, report=report))
        print(index, flush=True)
"""


def _start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_midway_loses_no_row_it_has_told_of(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with _start(_WRITER, str(path)) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 300:
                break
        with open_store(path, write=False) as reader:  # a reader is not kept out by the writer
            assert len(reader.trial_keys("train")) >= 300
        os.kill(writer.pid, signal.SIGKILL)
        told = [300, *(int(line) for line in writer.stdout if line.strip().isdigit())]
    assert writer.returncode == -signal.SIGKILL
    with open_store(path) as store:
        kept = store.trial_keys("train")
        assert kept >= {("t", index) for index in range(told[-1])}
        store.add_trial(a_trial("t", len(kept)))  # it goes on where it ended
        assert len(store.trial_keys("train")) == len(kept) + 1


def test_a_second_writer_is_refused_with_a_hint_until_the_first_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with open_store(path):
        with pytest.raises(StoreError, match="another process") as caught:
            open_store(path)
        assert caught.value.hint
    open_store(path).close()


def test_children_of_a_writer_do_not_hold_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    store = open_store(path)
    with _start("import sys; print('up', flush=True); sys.stdin.read()") as child:
        store.close()
        open_store(path).close()
        child.kill()


def test_a_run_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    open_store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    for write in (True, False):
        with pytest.raises(StoreError, match=r"format 99.*format 1") as caught:
            open_store(path, write=write)
        assert caught.value.hint
    with path.with_name("run.db.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the refusal did not keep the lock


def test_somebody_elses_database_gets_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(StoreError, match="format 0"):
        open_store(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    connection.close()


@pytest.mark.parametrize("write", [True, False])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, write: bool) -> None:
    path = tmp_path / "run.db"
    path.write_text("not a database, but long enough to have a header\n" * 40)
    with pytest.raises(StoreError, match="no run database") as caught:
        open_store(path, write=write)
    assert caught.value.hint
    assert path.read_text().startswith("not a database")


def test_reading_a_run_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run at") as caught:
        open_store(tmp_path / "gone" / "run.db", write=False)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_writing_where_nothing_can_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        open_store(tmp_path / "file" / "run.db")


def test_a_reader_sees_what_was_committed_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with open_store(path) as writer, open_store(path, write=False) as reader:
        assert list(reader.trials()) == []
        writer.add_trial(a_trial("t", 0))
        assert reader.trial_keys("train") == {("t", 0)}
        with pytest.raises(StoreError):
            reader.add_trial(a_trial("t", 1))


def test_paths_with_letters_that_mean_something_in_addresses_work(tmp_path: Path) -> None:
    path = tmp_path / "50% #1? ü" / "run.db"
    with open_store(path) as store:
        store.add_trial(a_trial("t", 0))
    with open_store(path, write=False) as store:
        assert len(list(store.trials())) == 1
    assert path.is_file()


_READER = """
import os, sys
from pathlib import Path
from tmax.store import open_store
os.setgid(65534)
os.setuid(65534)
with open_store(Path(sys.argv[1]), write=False) as store:
    print(len(list(store.trials())))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_reads_a_finished_run_in_a_folder_he_cannot_write() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        with open_store(Path(folder) / "run.db") as store:
            store.add_trial(a_trial("t", 0))
        with _start(_READER, str(Path(folder) / "run.db")) as reader:
            assert reader.communicate(timeout=60)[0].strip() == "1"


def test_a_failure_keeps_its_kind_and_hint(tmp_path: Path) -> None:
    failure = Failure(message="no network left", hint="prune", kind="network_pool", log_tail="x" * 100)
    key = TrialKey(purpose="rollout", task_id="t", index=0)
    trial = Trial(
        key=key, task_hash="h", policy="p", outcome=Outcome.INFRA_ERROR, failure=failure, retries=(failure, failure)
    )
    with open_store(tmp_path / "run.db") as store:
        store.add_trial(trial)
        assert list(store.trials()) == [trial]


def test_a_metric_that_is_no_number_does_not_make_the_run_unreadable(tmp_path: Path) -> None:
    with open_store(tmp_path / "run.db") as store:
        store.add_step(StepRow(step=0, version=1, metrics={"gap": math.nan, "ratio": math.inf, "loss": 0.5}), [])
        (step,) = store.steps()
    assert math.isnan(step.metrics.pop("gap"))
    assert step.metrics == {"ratio": math.inf, "loss": 0.5}
