"""Log-probabilities and entropies of given tokens, in chunks, with the head in fp32.

The rule: full logits are never held, forward or backward; each chunk is computed again in the backward pass.

Shapes: N tokens, C tokens of a chunk, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from tmax.policy.lm_head import logits_NV


def chunked_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden W' / temperature), and the entropy; both fp32 of shape N.

    Gradients flow from the log-probabilities to `hidden_NH` and `weight_VH`; the entropy carries none.
    """
    if chunk < 1:
        raise ValueError("a chunk holds at least one token")
    both: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, chunk)  # type: ignore[no-untyped-call]
    return both


class _ChunkedLogprobs(torch.autograd.Function):
    """d log p(target) / d logits is onehot - softmax, so the backward needs one chunk's softmax at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_NH.shape[0]
        logprobs_N = torch.empty(num_tokens, dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            scaled_CV = logits_NV(hidden_NH[part], weight_VH) / temperature
            log_all_CV = torch.log_softmax(scaled_CV, dim=-1)
            logprobs_N[part] = log_all_CV.gather(-1, targets_N[part, None])[:, 0]
            entropy_N[part] = -(log_all_CV.exp() * log_all_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = gradients[0]
        hidden_NH, weight_VH, targets_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        weight32_VH = weight_VH.float()
        for start in range(0, hidden_NH.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden32_CH = hidden_NH[part].float()
            grad_CV = -torch.softmax(logits_NV(hidden32_CH, weight32_VH) / ctx.temperature, dim=-1)
            grad_CV.scatter_add_(-1, targets_N[part, None], torch.ones_like(grad_CV[:, :1]))
            grad_CV *= (grad_N[part] / ctx.temperature)[:, None]
            grad_hidden_NH[part] = (grad_CV @ weight32_VH).to(hidden_NH.dtype)
            grad_weight_VH += grad_CV.T @ hidden32_CH
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None
