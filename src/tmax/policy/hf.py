"""A policy sampled in this process with transformers; the requests of concurrent trials are decoded together.

The rule: one background loop owns the model, so weights change only between two batches and every token knows
its version.

Shapes: B requests, T tokens, H hidden width, V vocabulary.
"""

import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from tmax.config import HfPolicyConfig, Sampling
from tmax.errors import PolicyError
from tmax.parallel import start_worker
from tmax.policy.lm_head import body, head_weight_VH, logits_NV
from tmax.policy.protocol import Sampled

_COALESCE_SECONDS = 0.004
"""How long the loop waits for more requests once it has one."""


@dataclass
class _Request:
    ids: list[int]
    sampling: Sampling
    stream: Callable[[], float]
    done: threading.Event = field(default_factory=threading.Event)
    sampled: Sampled | None = None
    error: str | None = None


class HfPolicy:
    """A loaded model and the loop that samples from it. Made by `open_hf_policy`."""

    def __init__(self, model: Any, tokenizer: Any, *, device: str, max_batch: int, version: int = 0) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.version = version
        self._device = device
        self._max_batch = max_batch
        self._end_id = int(tokenizer.eos_token_id)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._weights = threading.Lock()
        # transformers renames the argument; both names are in use within the versions that tmax accepts.
        named = inspect.signature(body(model).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        self._worker = start_worker(self._serve, name="tmax-hf-policy")

    def sample(self, ids: Sequence[int], sampling: Sampling, stream: Callable[[], float]) -> Sampled:
        """See `TokenPolicy.sample`."""
        request = _Request(list(ids), sampling, stream)
        self._requests.put(request)
        request.done.wait()
        if request.sampled is None:
            raise PolicyError(f"the model could not continue {len(ids)} tokens: {request.error}")
        return request.sampled

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights, all of them, between two batches. Raises PolicyError where a name does not fit."""
        with self._weights, torch.no_grad():
            own = dict(self.model.named_parameters())
            if own.keys() != weights.keys():
                odd = sorted(own.keys() ^ weights.keys())[:3]
                raise PolicyError(f"the new weights are not this model's: {', '.join(odd)}")
            for name, parameter in own.items():
                parameter.copy_(weights[name])
            self.version = version

    def close(self) -> None:
        """End the loop."""
        self._requests.put(None)
        self._worker.join()

    def _serve(self) -> None:
        while (first := self._requests.get()) is not None:
            batch = [first]
            while len(batch) < self._max_batch:
                try:
                    more = self._requests.get(timeout=_COALESCE_SECONDS)
                except queue.Empty:
                    break
                if more is None:
                    self._requests.put(None)
                    break
                batch.append(more)
            try:
                with self._weights, torch.inference_mode():
                    for request, sampled in zip(batch, self._decode(batch), strict=True):
                        request.sampled = sampled
            except (RuntimeError, ValueError, IndexError) as error:
                for request in batch:
                    request.error = str(error)
            finally:
                for request in batch:
                    request.done.set()

    def _decode(self, batch: list[_Request]) -> list[Sampled]:
        """Prefill left-padded prompts, then sample a token for every unfinished request at a time."""
        longest = max(len(request.ids) for request in batch)
        padded = [[self._end_id] * (longest - len(request.ids)) + request.ids for request in batch]
        ids_BT = torch.tensor(padded, device=self._device)
        lengths_B = torch.tensor([len(request.ids) for request in batch], device=self._device)
        columns_T = torch.arange(longest, device=self._device)
        mask_BT = (columns_T[None, :] >= (longest - lengths_B)[:, None]).long()
        position_B = lengths_B
        cache = DynamicCache(config=self.model.config)
        sampled = [Sampled([], [], [], "length") for _ in batch]
        alive = list(range(len(batch)))
        hidden_BH = self._forward(ids_BT, mask_BT, (mask_BT.cumsum(-1) - 1).clamp(min=0), cache)
        while True:
            ids_B = self._draw(hidden_BH, [batch[row] for row in alive], [sampled[row] for row in alive])
            keep = []
            for column, row in enumerate(alive):
                if sampled[row].ids[-1] == self._end_id:
                    sampled[row] = Sampled(sampled[row].ids, sampled[row].logprobs, sampled[row].versions, "end")
                elif len(sampled[row].ids) < batch[row].sampling.max_tokens:
                    keep.append(column)
            if not keep:
                return sampled
            if len(keep) < len(alive):
                chosen = torch.tensor(keep, device=self._device)
                # Every kind of cache layer can be reordered, and fewer rows than before is an order too.
                cache.reorder_cache(chosen)  # type: ignore[arg-type]
                mask_BT, ids_B, position_B = mask_BT[chosen], ids_B[chosen], position_B[chosen]
                alive = [alive[column] for column in keep]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(alive), 1)], dim=1)
            hidden_BH = self._forward(ids_B[:, None], mask_BT, position_B[:, None], cache)
            position_B = position_B + 1

    def _forward(self, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: Any) -> Tensor:
        output = body(self.model)(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        hidden_BH: Tensor = output.last_hidden_state[:, -1]
        return hidden_BH

    def _draw(self, hidden_BH: Tensor, batch: list[_Request], sampled: list[Sampled]) -> Tensor:
        """Sample by inverting the cumulative distribution at each request's own uniform draw."""
        temperature_B = torch.tensor([request.sampling.temperature for request in batch], device=self._device)
        logits_BV = logits_NV(hidden_BH, head_weight_VH(self.model)) / temperature_B[:, None]
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        top_p_B = torch.tensor([request.sampling.top_p for request in batch], device=self._device)
        if bool((top_p_B < 1).any()):
            logprobs_BV = torch.log_softmax(_nucleus(logprobs_BV, top_p_B), dim=-1)
        cumulative_BV = logprobs_BV.exp().cumsum(-1)
        draws_B = torch.tensor([request.stream() for request in batch], device=self._device)
        targets_B = draws_B * cumulative_BV[:, -1]
        ids_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True)[:, 0]
        ids_B = ids_B.clamp(max=logprobs_BV.shape[-1] - 1)
        # Rounding may land a draw on a token of no probability; the likeliest one takes its place.
        chosen_B = logprobs_BV.gather(-1, ids_B[:, None])[:, 0]
        best_B = logprobs_BV.argmax(-1)
        ids_B = torch.where(torch.isfinite(chosen_B), ids_B, best_B)
        chosen_B = logprobs_BV.gather(-1, ids_B[:, None])[:, 0]
        for one, token, logprob in zip(sampled, ids_B.tolist(), chosen_B.tolist(), strict=True):
            one.ids.append(token)
            one.logprobs.append(logprob)
            one.versions.append(self.version)
        return ids_B


@contextmanager
def open_hf_policy(config: HfPolicyConfig, path: str, *, version: int = 0) -> Iterator[HfPolicy]:
    """Load a model and its tokenizer and sample from them until the block ends. Raises PolicyError."""
    device = choose_device(config.device)
    model, tokenizer = load_model(path, dtype=getattr(torch, config.dtype))
    policy = HfPolicy(model.to(device).eval(), tokenizer, device=device, max_batch=config.max_batch, version=version)
    try:
        yield policy
    finally:
        policy.close()


def load_model(path: str, *, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer. Raises PolicyError where `path` holds none."""
    # Its own bars would stand between the stages' ones.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "give a directory that holds config.json, weights and a tokenizer" if Path(path).exists() else None
        raise PolicyError(f"no model can be loaded from `{path}`: {first}", hint=hint) from error
    return model, tokenizer


def choose_device(name: str) -> str:
    """A device's name; `auto` takes a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _nucleus(logprobs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Set to -inf what lies outside the smallest set of tokens whose probability reaches top_p."""
    ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.exp().cumsum(-1) - ordered_BV.exp()
    ordered_BV = ordered_BV.masked_fill(before_BV >= top_p_B[:, None], float("-inf"))
    return torch.full_like(logprobs_BV, float("-inf")).scatter(-1, order_BV, ordered_BV)
