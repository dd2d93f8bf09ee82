"""Runs a causal language model as body and head, the head in fp32 whatever the body's type.

The rule: weights are cast where they are used and never in place; a tied embedding would change type with the head.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def body(model: Any) -> Any:
    """The part of a transformers model that makes hidden states (its `base_model`)."""
    return model.base_model


def head_weight_VH(model: Any) -> Tensor:
    """The output embedding, tied or not."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def logits_NV(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """fp32 logits."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return functional.linear(hidden_NH.float(), weight_VH.float())
