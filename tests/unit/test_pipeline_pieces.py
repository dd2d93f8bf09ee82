"""Small pieces of the stages, worked by hand."""

import random

import pytest

from tmax.config import FamilyDraw, SampleConfig
from tmax.errors import ConfigError
from tmax.parallel import map_unordered
from tmax.records import Failure, Outcome, Spec, TaskRow, TestReport, TestResult, Trial, TrialKey
from tmax.stages.train import Curriculum
from tmax.synth.draft import instruction_digest
from tmax.synth.sampler import sample_specs
from tmax.train.batch import TokenSequence, micro_batches
from tmax.train.optimise import constant_schedule, linear_schedule


def row(index: int) -> TaskRow:
    spec = Spec(index=index, family="place", level=1, domain="file_operations", split="train")
    return TaskRow(task_id=f"t{index}", spec=spec, task_hash="h")


def test_a_curriculum_shows_every_task_once_an_epoch_and_goes_on_from_its_counts() -> None:
    pool = [row(index) for index in range(5)]
    whole = Curriculum(pool, seed=3)
    draws = whole.rows()
    order = [next(draws).task_id for _ in range(12)]
    assert sorted(order[:5]) == sorted(order[5:10]) == [f"t{index}" for index in range(5)]
    resumed = Curriculum(pool, seed=3)
    resumed.drawn.update(order[:7])
    again = resumed.rows()
    assert [next(again).task_id for _ in range(5)] == order[7:]


def test_specs_follow_weights_and_levels_and_every_item_has_its_own_stream() -> None:
    families = (FamilyDraw(name="place", levels=(1, 2), weight=3), FamilyDraw(name="tally", levels=(3,), weight=1))
    config = SampleConfig(families=families, num_train=900, num_heldout=100)
    specs = sample_specs(config, seed=1)
    assert [spec.index for spec in specs] == list(range(1000))
    assert sum(spec.split == "heldout" for spec in specs) == 100
    assert {spec.level for spec in specs if spec.family == "tally"} == {3}
    share = sum(spec.family == "place" for spec in specs) / 1000
    assert 0.7 < share < 0.8
    longer = sample_specs(config.model_copy(update={"num_train": 950}), seed=1)
    assert [spec.family for spec in longer[:1000]] == [spec.family for spec in specs]


def test_an_unknown_level_is_a_config_error() -> None:
    config = SampleConfig(families=(FamilyDraw(name="place", levels=(7,)),), num_train=1, num_heldout=1)
    with pytest.raises(ConfigError, match="no level 7"):
        sample_specs(config, seed=0)


def test_white_space_does_not_make_another_instruction() -> None:
    assert instruction_digest("do  this\n") == instruction_digest("do this")
    assert instruction_digest("do this") != instruction_digest("do that")


def test_micro_batches_hold_every_trainable_token_once_whatever_their_size() -> None:
    rng = random.Random(0)
    sequences = []
    for _ in range(20):
        length = rng.randint(2, 30)
        ids = [rng.randint(0, 99) for _ in range(length)]
        mask = [0, *[rng.randint(0, 1) for _ in range(length - 1)]]
        sequences.append(TokenSequence(ids, mask, [0.0] * length, advantage=rng.random()))
    wanted = sorted(
        (item.ids[place - 1], item.ids[place], round(item.advantage, 5))
        for item in sequences
        for place in range(1, len(item.ids))
        if item.loss_mask[place]
    )
    for size in (30, 64, 10_000):
        batches = micro_batches(sequences, max_tokens=size, pad_id=0)
        seen: list[tuple[int, int, float]] = []
        for batch in batches:
            assert batch.ids_BT.shape[0] == 1 or batch.ids_BT.numel() <= size
            before = batch.ids_BT[batch.rows_N, batch.columns_N]
            seen += zip(
                before.tolist(),
                batch.targets_N.tolist(),
                [round(a, 5) for a in batch.advantages_N.tolist()],
                strict=True,
            )
        assert sorted(seen) == wanted


def test_schedules() -> None:
    linear = [linear_schedule(step, num_steps=6, peak=1.0, warmup_steps=2) for step in range(6)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [constant_schedule(step, peak=1.0, warmup_steps=1) for step in range(3)] == [0.5, 1.0, 1.0]
    assert constant_schedule(0, peak=1.0, warmup_steps=0) == 1.0


def test_a_trial_has_a_reward_or_a_failure_and_never_both() -> None:
    key = TrialKey(purpose="rollout", task_id="t", index=0)
    report = TestReport(tests=(TestResult(name="a", status="passed"),), exit_code=0)
    Trial(key=key, task_hash="h", policy="p", outcome=Outcome.PASSED, reward=1.0, report=report)
    Trial(key=key, task_hash="h", policy="p", outcome=Outcome.INFRA_ERROR, failure=Failure(message="m"))
    wrong = [
        {"outcome": Outcome.PASSED, "reward": 1.0, "failure": Failure(message="m"), "report": report},
        {"outcome": Outcome.PASSED},
        {"outcome": Outcome.INFRA_ERROR, "reward": 0.0, "report": report},
        {"outcome": Outcome.FAILED, "failure": Failure(message="m")},
        {"outcome": Outcome.FAILED, "reward": 0.0},
        {"outcome": Outcome.PASSED, "reward": 1.5, "report": report},
    ]
    for fields in wrong:
        with pytest.raises(ValueError, match=r"reward|outcome"):
            Trial(key=key, task_hash="h", policy="p", **fields)  # type: ignore[arg-type]


def test_a_report_is_a_verdict_only_if_something_was_judged() -> None:
    def report(exit_code: int, *statuses: str) -> TestReport:
        tests = [{"name": str(number), "status": status} for number, status in enumerate(statuses)]
        return TestReport.model_validate({"tests": tests, "exit_code": exit_code})

    assert report(0, "passed").all_passed
    assert report(1, "passed", "failed").judged
    assert not report(1, "passed", "failed").all_passed
    for broken in (report(5), report(0, "skipped"), report(1, "passed", "error"), report(2, "passed"), report(3)):
        assert not broken.judged
        assert not broken.all_passed


def test_work_in_threads_comes_back_whole_and_an_error_starts_nothing_new() -> None:
    assert sorted(map_unordered(lambda item: item * item, range(50), workers=4)) == [(n, n * n) for n in range(50)]
    started = []

    def fail(item: int) -> int:
        started.append(item)
        if item == 3:
            raise ValueError("three")
        return item

    with pytest.raises(ValueError, match="three"):
        list(map_unordered(fail, range(1000), workers=2))
    assert len(started) < 20
