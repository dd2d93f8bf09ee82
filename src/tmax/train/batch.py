"""Turns token traces into padded micro-batches of about equal length.

The rule: only tokens with loss mask 1 are fed to the head, and each predicts from the position before it.

Shapes: B sequences, T padded length, N trainable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """One trajectory's tokens as the trainer takes them: parallel lists, and one advantage for all of them."""

    ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    advantage: float = 0.0

    @property
    def num_trainable(self) -> int:
        """Tokens that carry loss; the first token has nothing to be predicted from."""
        return sum(self.loss_mask[1:])


@dataclass(frozen=True)
class MicroBatch:
    """A padded batch; the arrays of shape N run over its trainable tokens, row by row."""

    ids_BT: Tensor
    mask_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    """Column of the position that predicts the token, one before the token's own."""
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor


def micro_batches(sequences: Sequence[TokenSequence], *, max_tokens: int, pad_id: int) -> list[MicroBatch]:
    """Sort by length and cut so that no padded micro-batch exceeds `max_tokens` (a longer sequence goes alone)."""
    ordered = sorted((item for item in sequences if item.num_trainable), key=lambda item: len(item.ids))
    batches: list[list[TokenSequence]] = []
    for item in ordered:
        if batches and (len(batches[-1]) + 1) * len(item.ids) <= max_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return [_padded(batch, pad_id) for batch in batches]


def _padded(batch: list[TokenSequence], pad_id: int) -> MicroBatch:
    longest = max(len(item.ids) for item in batch)
    ids = [[*item.ids, *[pad_id] * (longest - len(item.ids))] for item in batch]
    mask = [[1] * len(item.ids) + [0] * (longest - len(item.ids)) for item in batch]
    places = [
        (row, column) for row, item in enumerate(batch) for column in range(1, len(item.ids)) if item.loss_mask[column]
    ]
    return MicroBatch(
        ids_BT=torch.tensor(ids),
        mask_BT=torch.tensor(mask),
        rows_N=torch.tensor([row for row, _ in places]),
        columns_N=torch.tensor([column - 1 for _, column in places]),
        targets_N=torch.tensor([batch[row].ids[column] for row, column in places]),
        behaviour_N=torch.tensor([batch[row].logprobs[column] for row, column in places], dtype=torch.float32),
        advantages_N=torch.tensor([batch[row].advantage for row, _ in places], dtype=torch.float32),
    )
