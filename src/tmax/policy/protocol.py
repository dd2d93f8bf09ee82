"""What a policy that samples tokens offers; engines batch the calls of concurrent trials by themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tmax.config import Sampling


@dataclass(frozen=True)
class Sampled:
    """One sampled turn: three parallel lists, one entry per token, the end token included where it was sampled."""

    ids: list[int]
    logprobs: list[float]
    """Natural logarithms under the distribution that was sampled from (temperature and top_p applied)."""
    versions: list[int]
    """Version of the policy that sampled each token."""
    stop: Literal["end", "length"]


class TokenPolicy(Protocol):
    """A policy that continues token ids."""

    def sample(self, ids: Sequence[int], sampling: Sampling, stream: Callable[[], float]) -> Sampled:
        """Continue `ids` until the end token or `sampling.max_tokens`; blocks. `stream` gives uniform draws in [0, 1),
        one a token, so that a trial's tokens depend on its own seed. Raises PolicyError."""
        ...
