"""One optimiser step: what it moves, that its cut does not matter, and that a checkpoint continues the same numbers."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tmax.config import DppoLoss, TinyModelConfig
from tmax.errors import TrainError
from tmax.policy.hf import load_model
from tmax.policy.saved import newest_checkpoint, read_facts
from tmax.policy.tiny import make_model, make_tokenizer
from tmax.train.batch import TokenSequence, micro_batches
from tmax.train.checkpoint import restore_trainer, save_model, trainer_state
from tmax.train.optimise import Learner, _forward, make_learner, rl_step, sft_step

CONFIG = TinyModelConfig(vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, max_context=128)


@cache
def tokenizer() -> Any:
    return make_tokenizer(["copy amber-river.txt to b.md"] * 20, CONFIG)


def learner(*, micro_batch_tokens: int = 4096, seed: int = 1) -> Learner:
    model = make_model(CONFIG, tokenizer(), seed=seed)
    return make_learner(
        model,
        device="cpu",
        pad_id=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        micro_batch_tokens=micro_batch_tokens,
    )


def scored(student: Learner, sequences: list[TokenSequence]) -> list[TokenSequence]:
    """The sequences with the log-probabilities that the student itself gives, as if it had sampled them."""
    found = []
    for item in sequences:
        (batch,) = micro_batches([item], max_tokens=9999, pad_id=0)
        with torch.no_grad():
            logprobs = _forward(student, batch, 1.0)[0].tolist()
        filled = iter(logprobs)
        behaviour = [next(filled) if flag and place else 0.0 for place, flag in enumerate(item.loss_mask)]
        found.append(TokenSequence(item.ids, item.loss_mask, behaviour, item.advantage))
    return found


def episodes(count: int = 8) -> list[TokenSequence]:
    rng = random.Random(4)
    made = []
    for number in range(count):
        prompt, reply = rng.randint(3, 9), rng.randint(2, 14)
        ids = [rng.randint(2, 250) for _ in range(prompt + reply)]
        made.append(TokenSequence(ids, [0] * prompt + [1] * reply, [0.0] * len(ids), 0.5 if number % 2 else -0.5))
    return made


def total(student: Learner, item: TokenSequence) -> float:
    (batch,) = micro_batches([item], max_tokens=9999, pad_id=0)
    with torch.no_grad():
        return float(_forward(student, batch, 1.0)[0].sum())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rewarded_replies_become_likelier_and_the_others_less_so(sign: float) -> None:
    student = learner()
    batch = [TokenSequence(e.ids, e.loss_mask, e.logprobs, sign * e.advantage) for e in episodes()]
    batch = scored(student, batch)
    before = [total(student, item) for item in batch]
    metrics = rl_step(student, batch, DppoLoss(), lr=1e-3, temperature=1.0)
    after = [total(student, item) for item in batch]
    for item, low, high in zip(batch, before, after, strict=True):
        assert (high > low) == (item.advantage > 0)
    assert metrics["mask_fraction"] == 0.0
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["tokens"] == sum(item.num_trainable for item in batch)


def test_zero_advantages_move_nothing() -> None:
    student = learner()
    batch = scored(student, [TokenSequence(e.ids, e.loss_mask, e.logprobs, 0.0) for e in episodes()])
    before = {name: value.clone() for name, value in student.weights().items()}
    rl_step(student, batch, DppoLoss(), lr=1e-2, temperature=1.0)
    assert all(torch.equal(before[name], value) for name, value in student.weights().items())


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut() -> None:
    gradients = []
    for size in (4096, 60, 20):
        student = learner(micro_batch_tokens=size)
        rl_step(student, scored(learner(), episodes()), DppoLoss(), lr=0.0, temperature=1.0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in student.model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, atol=1e-6, rtol=1e-5)


def test_demonstrations_become_likelier() -> None:
    student = learner()
    losses = [sft_step(student, episodes(), lr=3e-3)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


def test_numbers_that_are_not_finite_stop_the_step_and_leave_the_weights() -> None:
    student = learner()
    batch = scored(student, episodes())
    with torch.no_grad():
        student.model.model.norm.weight[0] = float("nan")
    before = {name: value.clone() for name, value in student.weights().items()}
    with pytest.raises(TrainError, match="not finite"):
        rl_step(student, batch, DppoLoss(), lr=1e-2, temperature=1.0)
    assert all(torch.equal(before[name].nan_to_num(), value.nan_to_num()) for name, value in student.weights().items())


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(TrainError, match="no token"):
        rl_step(learner(), [TokenSequence([1, 2], [0, 0], [0.0, 0.0], 1.0)], DppoLoss(), lr=1e-3, temperature=1.0)


def test_a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    batch = scored(learner(), episodes())
    whole = learner()
    for _ in range(6):
        rl_step(whole, batch, DppoLoss(), lr=1e-3, temperature=1.0)
    first = learner()
    for _ in range(3):
        rl_step(first, batch, DppoLoss(), lr=1e-3, temperature=1.0)
    save_model(tmp_path / "3", first.model, tokenizer(), facts={"step": 3}, state=trainer_state(first))
    model, _ = load_model(str(tmp_path / "3"), dtype=torch.float32)
    second = make_learner(model, device="cpu", pad_id=0, weight_decay=0.0, max_grad_norm=1.0, micro_batch_tokens=4096)
    restore_trainer(tmp_path / "3", second)
    for _ in range(3):
        rl_step(second, batch, DppoLoss(), lr=1e-3, temperature=1.0)
    assert all(torch.equal(value, second.weights()[name]) for name, value in whole.weights().items())


def test_a_checkpoint_is_whole_or_absent_and_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    student = learner()
    for step in (2, 10):
        save_model(tmp_path / str(step), student.model, tokenizer(), facts={"step": step}, state=trainer_state(student))
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".12-abc").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found == (10, tmp_path / "10")
    assert read_facts(tmp_path / "11") is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".12-abc", "10", "11", "2"]
    with pytest.raises(TrainError, match="cannot write"):
        save_model(Path("/proc/nowhere/3"), student.model, tokenizer(), facts={}, state=None)
