"""One optimiser step on a global batch: forward, loss, backward, clip, AdamW.

The rule: weights are fp32 whatever the body computes in, and the batch's gradient does not depend on how it is
cut into micro-batches.

Shapes: N trainable tokens of a micro-batch, H hidden width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tmax.config import DppoLoss, GrpoLoss
from tmax.errors import TrainError
from tmax.policy.lm_head import body, head_weight_VH
from tmax.train.batch import MicroBatch, TokenSequence, micro_batches
from tmax.train.logprobs import chunked_logprobs
from tmax.train.loss import TokenLoss, policy_loss, sft_loss


@dataclass
class Learner:
    """A model being trained and its optimiser."""

    model: Any
    optimiser: torch.optim.AdamW
    device: str
    pad_id: int
    max_grad_norm: float
    micro_batch_tokens: int
    compute_dtype: torch.dtype = torch.float32

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, not copied."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def make_learner(
    model: Any,
    *,
    device: str,
    pad_id: int,
    weight_decay: float,
    max_grad_norm: float,
    micro_batch_tokens: int,
    compute_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
) -> Learner:
    """Put a model on its device in fp32 and give it an AdamW optimiser (betas .9, .999)."""
    model = model.float().to(device).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=weight_decay)
    return Learner(model, optimiser, device, pad_id, max_grad_norm, micro_batch_tokens, compute_dtype)


def rl_step(
    learner: Learner,
    sequences: Sequence[TokenSequence],
    loss: DppoLoss | GrpoLoss,
    *,
    lr: float,
    temperature: float,
) -> dict[str, float]:
    """Update on a global batch of sampled sequences and say what happened, as step metrics.

    Raises TrainError where the loss or the gradient is not finite; the weights are then as before.
    """
    num_tokens = sum(item.num_trainable for item in sequences)
    if num_tokens == 0:
        raise TrainError("a training step holds no token to train on", hint="are replies empty?")
    seen: list[TokenLoss] = []
    gaps: list[Tensor] = []
    entropies: list[Tensor] = []
    advantages: list[Tensor] = []
    learner.optimiser.zero_grad(set_to_none=True)
    for batch in micro_batches(sequences, max_tokens=learner.micro_batch_tokens, pad_id=learner.pad_id):
        logprobs_N, entropy_N = _forward(learner, batch, temperature)
        behaviour_N = batch.behaviour_N.to(learner.device)
        advantages_N = batch.advantages_N.to(learner.device)
        token_loss = policy_loss(loss, logprobs_N, behaviour_N, advantages_N, num_tokens=num_tokens)
        token_loss.score.backward()  # type: ignore[no-untyped-call]
        seen.append(token_loss)
        gaps.append((logprobs_N.detach() - behaviour_N)[token_loss.valid_N].abs())
        entropies.append(entropy_N.detach())
        advantages.append(advantages_N)
    grad_norm = _apply(learner, lr)
    return {
        "loss": sum(item.surrogate for item in seen),
        "grad_norm": grad_norm,
        "tokens": float(num_tokens),
        "entropy": float(torch.cat(entropies).mean()),
        **_mask_metrics(seen, torch.cat(advantages)),
        **_gap_metrics(torch.cat(gaps)),
    }


def sft_step(learner: Learner, sequences: Sequence[TokenSequence], *, lr: float) -> dict[str, float]:
    """Update on a batch of demonstrations. Raises TrainError as `rl_step` does."""
    num_tokens = sum(item.num_trainable for item in sequences)
    total = 0.0
    learner.optimiser.zero_grad(set_to_none=True)
    for batch in micro_batches(sequences, max_tokens=learner.micro_batch_tokens, pad_id=learner.pad_id):
        logprobs_N, _ = _forward(learner, batch, 1.0)
        loss = sft_loss(logprobs_N, num_tokens=num_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return {"loss": total, "grad_norm": _apply(learner, lr), "tokens": float(num_tokens)}


def linear_schedule(step: int, *, num_steps: int, peak: float, warmup_steps: int) -> float:
    """Learning rate of step 0, 1, …: up linearly over the warm-up, then down linearly to 0 after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (num_steps - step) / max(1, num_steps - warmup_steps)


def constant_schedule(step: int, *, peak: float, warmup_steps: int) -> float:
    """Learning rate of step 0, 1, …: up linearly over the warm-up, then constant."""
    return peak * min(1.0, (step + 1) / (warmup_steps + 1))


def _forward(learner: Learner, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    device = learner.device
    with torch.autocast(torch.device(device).type, learner.compute_dtype, learner.compute_dtype != torch.float32):
        output = body(learner.model)(
            input_ids=batch.ids_BT.to(device), attention_mask=batch.mask_BT.to(device), use_cache=False
        )
    hidden_NH = output.last_hidden_state[batch.rows_N.to(device), batch.columns_N.to(device)]
    return chunked_logprobs(
        hidden_NH, head_weight_VH(learner.model), batch.targets_N.to(device), temperature=temperature
    )


def _apply(learner: Learner, lr: float) -> float:
    grad_norm = float(torch.nn.utils.clip_grad_norm_(learner.model.parameters(), learner.max_grad_norm))
    if not math.isfinite(grad_norm):
        raise TrainError("the gradient is not finite", hint="lower the learning rate; the last checkpoint is whole")
    for group in learner.optimiser.param_groups:
        group["lr"] = lr
    learner.optimiser.step()
    return grad_norm


def _mask_metrics(seen: Sequence[TokenLoss], advantages_N: Tensor) -> dict[str, float]:
    kept_N = torch.cat([item.kept_N for item in seen])
    valid_N = torch.cat([item.valid_N for item in seen])
    ratio_N = torch.cat([item.ratio_N for item in seen])[valid_N]
    divergence_N = torch.cat([item.divergence_N for item in seen])[valid_N]
    masked_N = valid_N & ~kept_N
    count = max(1, int(valid_N.sum()))
    return {
        "mask_fraction": int(masked_N.sum()) / count,
        "mask_fraction_positive": int((masked_N & (advantages_N > 0)).sum()) / count,
        "mask_fraction_negative": int((masked_N & (advantages_N < 0)).sum()) / count,
        "invalid_tokens": float((~valid_N).sum()),
        "ratio_max": float(ratio_N.max()) if len(ratio_N) else 1.0,
        "divergence_max": float(divergence_N.max()) if len(divergence_N) else 0.0,
        "divergence_mean": float(divergence_N.mean()) if len(divergence_N) else 0.0,
    }


def _gap_metrics(gap_N: Tensor) -> dict[str, float]:
    if not len(gap_N):
        return {"logprob_gap_mean": 0.0, "logprob_gap_max": 0.0}
    return {"logprob_gap_mean": float(gap_N.mean()), "logprob_gap_max": float(gap_N.max())}
