"""The objectives: pure functions in fp32 from log-probabilities and advantages to a sum over tokens.

The rule: the sum is divided by the number of response tokens of the *global* batch before the first backward, so
a batch's gradient does not depend on how it is cut. Tokens that carry no gradient are selected away, not
multiplied by zero.

Shapes: N trainable tokens.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from tmax.config import DppoLoss, GrpoLoss

MAX_RATIO = 20.0
"""Cap of the detached ratio in the gradient; a token this far off is masked or rare."""

_MAX_LOG_RATIO = 30.0
"""Log-ratios are clamped to ± this before exp, against overflow in fp32."""


@dataclass(frozen=True)
class TokenLoss:
    """What an objective says of a batch's tokens; everything but `score` is for looking at, without gradient."""

    score: Tensor
    """Scalar with the right gradient: the sum over tokens, already divided by `num_tokens`."""
    surrogate: float
    """The paper's value of the loss, - sum M A r / N."""
    kept_N: Tensor
    """Which tokens carry gradient."""
    ratio_N: Tensor
    """exp(log π - log μ)."""
    divergence_N: Tensor
    """What the mask was decided on: |μ - π|, or the binary KL."""
    valid_N: Tensor
    """Which tokens had a finite behaviour log-probability."""


def policy_loss(
    config: DppoLoss | GrpoLoss, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, num_tokens: int
) -> TokenLoss:
    """The configured objective over `logprobs_N` (with gradient), the sampler's `behaviour_N` and `advantages_N`.

    `num_tokens` counts the response tokens of the global batch, masked ones included.
    """
    match config:
        case DppoLoss():
            return dppo_loss(config, logprobs_N, behaviour_N, advantages_N, num_tokens=num_tokens)
        case GrpoLoss():
            return grpo_loss(config, logprobs_N, behaviour_N, advantages_N, num_tokens=num_tokens)
        case _:
            assert_never(config)


def dppo_loss(
    config: DppoLoss, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, num_tokens: int
) -> TokenLoss:
    """Divergence PPO (arXiv 2602.04879): a token is dropped only where its divergence exceeds δ *and* the update
    would take it further that way; a rare token with a large ratio but a small divergence keeps its gradient."""
    logprobs_N, behaviour_N, advantages_N, valid_N = _prepared(logprobs_N, behaviour_N, advantages_N)
    log_ratio_N = (logprobs_N.detach() - behaviour_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    mu_N, pi_N = behaviour_N.exp(), logprobs_N.detach().exp()
    if config.divergence == "tv":
        divergence_N = (mu_N - pi_N).abs()
    else:
        divergence_N = _binary_kl(mu_N, pi_N, behaviour_N, logprobs_N.detach())
    outward_N = ((advantages_N > 0) & (ratio_N > 1)) | ((advantages_N < 0) & (ratio_N < 1))
    kept_N = valid_N & ~((divergence_N > config.delta) & outward_N)
    weight_N = torch.where(kept_N, ratio_N.clamp(max=MAX_RATIO) * advantages_N, torch.zeros_like(ratio_N))
    score = -(weight_N * logprobs_N).sum() / num_tokens
    surrogate = -torch.where(kept_N, ratio_N * advantages_N, torch.zeros_like(ratio_N)).sum() / num_tokens
    return TokenLoss(score, float(surrogate), kept_N, ratio_N, divergence_N, valid_N)


def grpo_loss(
    config: GrpoLoss, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, num_tokens: int
) -> TokenLoss:
    """PPO's clipped ratio with asymmetric bounds (clip-higher, DAPO), anchored at the sampler's log-probabilities."""
    logprobs_N, behaviour_N, advantages_N, valid_N = _prepared(logprobs_N, behaviour_N, advantages_N)
    ratio_N = (logprobs_N.detach() - behaviour_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    clipped_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
    kept_N = valid_N & ~clipped_N
    weight_N = torch.where(kept_N, ratio_N.clamp(max=MAX_RATIO) * advantages_N, torch.zeros_like(ratio_N))
    score = -(weight_N * logprobs_N).sum() / num_tokens
    pessimist_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    surrogate = -torch.where(valid_N, pessimist_N, torch.zeros_like(pessimist_N)).sum() / num_tokens
    return TokenLoss(
        score, float(surrogate), kept_N, ratio_N, (behaviour_N.exp() - logprobs_N.detach().exp()).abs(), valid_N
    )


def sft_loss(logprobs_N: Tensor, *, num_tokens: int) -> Tensor:
    """Cross-entropy: the mean of - log π over the global batch's tokens that carry loss."""
    return -logprobs_N.float().sum() / num_tokens


def _prepared(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 inputs with unusable tokens replaced before any exp: `where` after it still gives NaN gradients."""
    logprobs_N, behaviour_N, advantages_N = logprobs_N.float(), behaviour_N.float(), advantages_N.float()
    valid_N = torch.isfinite(behaviour_N)
    zeros_N = torch.zeros_like(behaviour_N)
    behaviour_N = torch.where(valid_N, behaviour_N, zeros_N)
    logprobs_N = torch.where(valid_N, logprobs_N, zeros_N)
    return logprobs_N, behaviour_N, torch.where(valid_N, advantages_N, zeros_N), valid_N


def _binary_kl(mu_N: Tensor, pi_N: Tensor, log_mu_N: Tensor, log_pi_N: Tensor) -> Tensor:
    """μ log(μ/π) + (1-μ) log((1-μ)/(1-π)) of the event that the sampled token is drawn."""
    tiny = torch.finfo(torch.float32).tiny
    rest_mu_N, rest_pi_N = (1 - mu_N).clamp(min=tiny), (1 - pi_N).clamp(min=tiny)
    kl_N = mu_N * (log_mu_N - log_pi_N) + rest_mu_N * (rest_mu_N.log() - rest_pi_N.log())
    return kl_N.clamp(min=0)
