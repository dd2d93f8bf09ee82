"""Chunked log-probabilities against the dense computation."""

import pytest
import torch
from torch import Tensor

from tmax.train.logprobs import chunked_logprobs


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_all = torch.log_softmax(hidden.float() @ weight.float().T / temperature, dim=-1)
    return log_all.gather(-1, targets[:, None])[:, 0], -(log_all.exp() * log_all).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 33, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_chunk_gives_the_dense_values_and_gradients(chunk: int, temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(33, 16).to(dtype).requires_grad_()
    weight = torch.randn(50, 16).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (33,))
    pull = torch.randn(33)
    expected, entropy = dense(hidden, weight, targets, temperature)
    wanted = torch.autograd.grad((expected * pull).sum(), (hidden, weight))
    got, got_entropy = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    grads = torch.autograd.grad((got * pull).sum(), (hidden, weight))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_the_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(5, 4)
    weight = torch.randn(6, 4)
    targets = torch.randint(0, 6, (5,))
    hidden.requires_grad_()
    value, _ = chunked_logprobs(hidden, weight, targets, chunk=2)
    (grad,) = torch.autograd.grad(value.sum(), (hidden,))
    for row, column in ((0, 0), (3, 2)):
        moved = hidden.detach().clone()
        moved[row, column] += 1e-2
        up = chunked_logprobs(moved, weight, targets, chunk=2)[0].sum()
        moved[row, column] -= 2e-2
        down = chunked_logprobs(moved, weight, targets, chunk=2)[0].sum()
        assert float(grad[row, column]) == pytest.approx(float(up - down) / 2e-2, abs=2e-3)


def test_the_largest_tensor_kept_is_a_chunk_of_logits() -> None:
    kept: list[int] = []
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(4000, 8, requires_grad=True)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_logprobs(hidden, weight, torch.zeros(512, dtype=torch.long), chunk=64)
    assert max(kept) <= 4000 * 8
