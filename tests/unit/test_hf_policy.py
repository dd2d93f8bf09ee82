"""Sampling in process: what comes back is what the model says, token by token."""

import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tmax.config import Sampling, TinyModelConfig
from tmax.errors import PolicyError
from tmax.policy.hf import HfPolicy, load_model
from tmax.policy.tiny import make_model, make_tokenizer
from tmax.train.batch import TokenSequence, micro_batches
from tmax.train.optimise import _forward, make_learner

TEXTS = ["copy amber-river.txt to b.md", "```bash\ncp a b\n```", "(exit_code=0)"]
CONFIG = TinyModelConfig(vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, max_context=256)


@cache
def tokenizer() -> Any:
    return make_tokenizer(TEXTS * 20, CONFIG)


@pytest.fixture
def policy() -> Iterator[HfPolicy]:
    model = make_model(CONFIG, tokenizer(), seed=3).eval()
    opened = HfPolicy(model, tokenizer(), device="cpu", max_batch=8)
    yield opened
    opened.close()


def prompt(text: str) -> list[int]:
    return [int(token) for token in tokenizer().encode(text)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_the_trainer_computes(policy: HfPolicy, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=12)
    prompts = [prompt(text) for text in ("copy a", "copy amber-river.txt to b.md and", "x")]
    sampled: dict[int, Any] = {}

    def ask(number: int) -> None:
        sampled[number] = policy.sample(prompts[number], sampling, random.Random(number).random)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    learner = make_learner(
        make_model(CONFIG, tokenizer(), seed=3),
        device="cpu",
        pad_id=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        micro_batch_tokens=4096,
    )
    sequences = [
        TokenSequence(
            ids=[*prompts[number], *one.ids],
            loss_mask=[0] * len(prompts[number]) + [1] * len(one.ids),
            logprobs=[0.0] * len(prompts[number]) + one.logprobs,
        )
        for number, one in sampled.items()
    ]
    for batch in micro_batches(sequences, max_tokens=4096, pad_id=0):
        logprobs, _ = _forward(learner, batch, temperature)
        torch.testing.assert_close(logprobs.detach(), batch.behaviour_N, atol=1e-5, rtol=1e-5)


def test_a_trials_tokens_depend_on_its_own_draws_alone(policy: HfPolicy) -> None:
    sampling = Sampling(max_tokens=10)
    alone = policy.sample(prompt("copy a"), sampling, random.Random(7).random)
    again = policy.sample(prompt("copy a"), sampling, random.Random(7).random)
    other = policy.sample(prompt("copy a"), sampling, random.Random(8).random)
    assert alone.ids == again.ids
    assert alone.ids != other.ids


def test_sampling_follows_the_distribution(policy: HfPolicy) -> None:
    ids = prompt("copy a")
    with torch.inference_mode():
        expected = torch.softmax(policy.model(torch.tensor([ids])).logits[0, -1].float(), -1)
    rng = random.Random(0)
    counts = torch.zeros(len(expected))
    for _ in range(400):
        counts[policy.sample(ids, Sampling(max_tokens=1), rng.random).ids[0]] += 1
    assert float((counts / 400 - expected).abs().sum()) < 2 * float((expected * (1 - expected) / 400).sqrt().sum())


def test_a_nucleus_never_gives_a_token_outside_it(policy: HfPolicy) -> None:
    ids = prompt("copy a")
    with torch.inference_mode():
        probabilities = torch.softmax(policy.model(torch.tensor([ids])).logits[0, -1].float(), -1)
    ordered = probabilities.sort(descending=True)
    size = int((ordered.values.cumsum(0) < 0.3).sum()) + 1
    nucleus = set(ordered.indices[:size].tolist())
    rng = random.Random(0)
    drawn = {policy.sample(ids, Sampling(max_tokens=1, top_p=0.3), rng.random).ids[0] for _ in range(100)}
    assert drawn <= nucleus


def test_every_token_knows_the_version_that_sampled_it(policy: HfPolicy) -> None:
    first = policy.sample(prompt("x"), Sampling(max_tokens=3), random.Random(0).random)
    policy.update({name: value.clone() for name, value in policy.model.named_parameters()}, 5)
    second = policy.sample(prompt("x"), Sampling(max_tokens=3), random.Random(0).random)
    assert set(first.versions) == {0}
    assert set(second.versions) == {5}


def test_weights_of_another_model_are_refused(policy: HfPolicy) -> None:
    with pytest.raises(PolicyError, match="not this model's"):
        policy.update({"strange": torch.zeros(1)}, 1)


def test_the_end_token_and_the_length_limit_are_told_apart(policy: HfPolicy) -> None:
    stops = set()
    for number in range(60):
        one = policy.sample(prompt("x"), Sampling(max_tokens=40), random.Random(number).random)
        stops.add(one.stop)
        ended = one.ids[-1] == tokenizer().eos_token_id
        assert ended == (one.stop == "end")
        assert ended or len(one.ids) == 40
    assert "end" in stops or "length" in stops


def test_a_directory_without_a_model_is_a_policy_error(tmp_path: Any) -> None:
    with pytest.raises(PolicyError, match="no model can be loaded"):
        load_model(str(tmp_path), dtype=torch.float32)
