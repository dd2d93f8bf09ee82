"""What the loop talks to: a conversation gives replies and takes observations.

The rule of `TokenConversation`: ids are appended and never re-tokenised, and the next prompt begins with
everything that went before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmax.agent.reply import fence
from tmax.config import Sampling
from tmax.errors import ContextExhausted
from tmax.policy.protocol import TokenPolicy
from tmax.policy.template import ChatTemplate
from tmax.records import TokenTrace


@dataclass(frozen=True)
class Reply:
    """One reply of a policy; `finished` is False where it ran into its length limit."""

    text: str
    finished: bool = True


class Conversation(Protocol):
    """One dialogue between a policy and a machine."""

    def reply(self) -> Reply | None:
        """The policy's next reply, or None where a script has ended. Raises ContextExhausted, PolicyError."""
        ...

    def observe(self, observation: str) -> None:
        """Hand over the machine's answer to the last reply."""
        ...

    def trace(self) -> TokenTrace | None:
        """The tokens so far; None where the policy hands out none."""
        ...


class ScriptedConversation:
    """A list of commands, given one by one whatever the machine answers."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = list(commands)
        self._next = 0

    def reply(self) -> Reply | None:
        """The next command, fenced as a model would; None after the last."""
        if self._next >= len(self._commands):
            return None
        self._next += 1
        return Reply(fence(self._commands[self._next - 1]))

    def observe(self, observation: str) -> None:
        """A script does not listen."""

    def trace(self) -> TokenTrace | None:
        """A script has no tokens."""
        return None


class TokenConversation:
    """A conversation with a policy that samples token ids."""

    def __init__(
        self,
        policy: TokenPolicy,
        template: ChatTemplate,
        *,
        system: str,
        task: str,
        sampling: Sampling,
        max_context: int,
        stream: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._template = template
        self._sampling = sampling
        self._max_context = max_context
        self._stream = stream
        self._ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._given(template.opening(system, task))

    def reply(self) -> Reply:
        """Sample a turn. Raises ContextExhausted where not one more token fits."""
        room = self._max_context - len(self._ids)
        if room <= 0:
            raise ContextExhausted(f"the conversation has reached {self._max_context} tokens")
        sampling = self._sampling.model_copy(update={"max_tokens": min(room, self._sampling.max_tokens)})
        sampled = self._policy.sample(self._ids, sampling, self._stream)
        self._ids += sampled.ids
        self._loss_mask += [1] * len(sampled.ids)
        self._logprobs += sampled.logprobs
        self._versions += sampled.versions
        finished = sampled.stop == "end"
        spoken = sampled.ids[:-1] if finished else sampled.ids
        if not finished:
            # The turn is closed for the policy; a token it did not sample carries no loss.
            self._given([self._template.end_id])
        return Reply(self._template.decode(spoken), finished=finished)

    def observe(self, observation: str) -> None:
        """Append the template's bridge: the observation's turn and the next reply's opening."""
        self._given(self._template.bridge(observation))

    def trace(self) -> TokenTrace:
        """The four parallel arrays so far."""
        return TokenTrace(
            ids=tuple(self._ids),
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
        )

    def _given(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._loss_mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)
        self._versions += [-1] * len(ids)
