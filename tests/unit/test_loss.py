"""The objectives against numbers worked by hand."""

import math
import random

import pytest
import torch

from tmax.config import DppoLoss, GrpoLoss
from tmax.train.loss import dppo_loss, policy_loss, sft_loss

MU = [0.60, 0.90, 0.02, 0.90, 0.30]
PI = [0.72, 0.75, 0.08, 0.78, 0.45]
A = [0.5, 0.5, 0.5, -0.5, -0.5]


def run(config: DppoLoss | GrpoLoss, mu=MU, pi=PI, a=A, n=5):  # type: ignore[no-untyped-def]
    logprobs = torch.tensor(pi).log().requires_grad_()
    loss = policy_loss(config, logprobs, torch.tensor(mu).log(), torch.tensor(a), num_tokens=n)
    loss.score.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss, logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("config", "kept", "surrogate", "gradient"),
    [
        (DppoLoss(delta=0.1), [0, 1, 1, 0, 1], -0.333333333, [0, -0.0833333, -0.4, 0, 0.15]),
        (DppoLoss(delta=0.2), [1, 1, 1, 1, 1], -0.366666667, [-0.12, -0.0833333, -0.4, 0.0866667, 0.15]),
        (
            DppoLoss(divergence="kl", delta=0.05),
            [1, 1, 1, 1, 1],
            -0.366666667,
            [-0.12, -0.0833333, -0.4, 0.0866667, 0.15],
        ),
        (DppoLoss(divergence="kl", delta=0.03), [0, 1, 0, 0, 1], 0.0666667, [0, -0.0833333, 0, 0, 0.15]),
        (GrpoLoss(clip_low=0.2, clip_high=0.28), None, -0.0946667, [-0.12, -0.0833333, 0, 0.0866667, 0.15]),
    ],
)
def test_the_worked_example_gives_the_mask_the_value_and_the_gradient(config, kept, surrogate, gradient):  # type: ignore[no-untyped-def]
    loss, grad = run(config)
    if kept is not None:
        assert loss.kept_N.long().tolist() == kept
    assert loss.surrogate == pytest.approx(surrogate, abs=1e-6)
    assert grad == pytest.approx(gradient, abs=1e-6)


def test_binary_kl_is_the_divergence_of_the_sampled_token_event() -> None:
    loss, _ = run(DppoLoss(divergence="kl", delta=0.05))
    assert loss.divergence_N.tolist() == pytest.approx([0.033277, 0.072460, 0.034189, 0.049945, 0.047174], abs=2e-6)


def test_a_token_without_a_usable_behaviour_log_probability_changes_nothing() -> None:
    for unusable in (math.nan, -math.inf):
        logprobs = torch.tensor([*PI, 0.5]).log().requires_grad_()
        behaviour = torch.cat([torch.tensor(MU).log(), torch.tensor([unusable])])
        loss = dppo_loss(DppoLoss(), logprobs, behaviour, torch.tensor([*A, 0.5]), num_tokens=5)
        loss.score.backward()  # type: ignore[no-untyped-call]
        assert loss.surrogate == pytest.approx(-0.333333333, abs=1e-6)
        assert logprobs.grad is not None
        assert logprobs.grad[-1] == 0
        assert torch.isfinite(logprobs.grad).all()
        assert loss.valid_N.tolist() == [True] * 5 + [False]


def test_an_extreme_log_ratio_stays_finite() -> None:
    logprobs = torch.tensor([-0.1, -200.0]).requires_grad_()
    loss = dppo_loss(DppoLoss(), logprobs, torch.tensor([-200.0, -0.1]), torch.tensor([1.0, -1.0]), num_tokens=2)
    loss.score.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(loss.score.detach()))
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_on_policy_the_gradient_is_reinforce() -> None:
    _, grad = run(DppoLoss(), mu=PI, pi=PI)
    assert grad == pytest.approx([-a / 5 for a in A])


def test_without_a_bound_no_token_is_masked() -> None:
    loss, grad = run(DppoLoss(delta=1e9))
    assert loss.kept_N.all()
    assert grad == pytest.approx([-a * p / m / 5 for a, p, m in zip(A, PI, MU, strict=True)], abs=1e-6)


def test_no_advantage_is_never_masked_and_the_boundary_is_kept() -> None:
    loss, grad = run(DppoLoss(delta=0.1), mu=[0.2, 0.25], pi=[0.9, 0.375], a=[0.0, 1.0], n=2)
    assert loss.kept_N.tolist() == [True, False]
    assert grad[0] == 0
    exact, _ = run(DppoLoss(delta=0.125), mu=[0.25], pi=[0.375], a=[1.0], n=1)
    assert exact.kept_N.tolist() == [True]


def test_the_mask_agrees_with_a_naive_loop_on_many_tokens() -> None:
    rng = random.Random(0)
    mu = [rng.uniform(0.01, 0.99) for _ in range(20_000)]
    pi = [min(0.99, max(0.01, m + rng.gauss(0, 0.12))) for m in mu]
    a = [rng.choice((-1.0, -0.5, 0.0, 0.5)) for _ in mu]
    loss, _ = run(DppoLoss(), mu=mu, pi=pi, a=a, n=len(mu))
    wrong = 0
    for m, p, adv, kept, seen in zip(mu, pi, a, loss.kept_N.tolist(), loss.divergence_N.tolist(), strict=True):
        distance = abs(m - p)
        expected = not (distance > 0.1 and ((adv > 0 and p > m) or (adv < 0 and p < m)))
        assert seen == pytest.approx(distance, abs=1e-5)
        wrong += kept != expected and abs(distance - 0.1) > 1e-5
    assert wrong == 0


def test_sft_is_the_mean_cross_entropy() -> None:
    assert float(sft_loss(torch.tensor([-1.0, -2.0, -3.0]), num_tokens=3)) == 2.0
