"""Turns messages into token ids with a tokenizer's own chat template, piece by piece.

The rule: text from tasks and tools is tokenised with special tokens escaped, so nothing in it can open or
close a turn.
"""

from collections.abc import Sequence
from typing import Any

from tmax.errors import PolicyError

_SLOTS = ("\ue000", "\ue001", "\ue002", "\ue003")
"""Private-use characters that stand for messages while the template is rendered."""


class ChatTemplate:
    """The pieces between messages of one tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        if end is None:
            raise PolicyError("the tokenizer has no end token", hint="set `eos_token` in its configuration")
        self.end_id: int = int(end)
        self._opening = self._split(self._rendered(replies=False), _SLOTS[:2])
        tail = self._rendered(replies=True).split(_SLOTS[2], 1)[1]
        end_text = str(tokenizer.eos_token)
        if end_text not in tail.split(_SLOTS[3], 1)[0]:
            raise PolicyError(
                f"the chat template does not end a reply with the tokenizer's end token {end_text}",
                hint="use a tokenizer whose `eos_token` closes an assistant's turn",
            )
        self._bridge = self._split(tail.split(end_text, 1)[1], _SLOTS[3:])

    def opening(self, system: str, task: str) -> list[int]:
        """Ids of the system and task messages and of the first reply's opening."""
        return self._fill(self._opening, (system, task))

    def bridge(self, observation: str) -> list[int]:
        """Ids from after a reply's end token to the next reply's opening, with the observation between them."""
        return self._fill(self._bridge, (observation,))

    def reply(self, text: str) -> list[int]:
        """Ids of a reply that somebody else wrote, its end token included."""
        return [*self._encode(text, escape=True), self.end_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens left in sight."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _rendered(self, *, replies: bool) -> str:
        messages = [{"role": "system", "content": _SLOTS[0]}, {"role": "user", "content": _SLOTS[1]}]
        if replies:
            messages += [{"role": "assistant", "content": _SLOTS[2]}, {"role": "user", "content": _SLOTS[3]}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _split(self, text: str, slots: Sequence[str]) -> list[str]:
        pieces = []
        for slot in slots:
            before, found, text = text.partition(slot)
            if not found:
                raise PolicyError("the chat template drops a message", hint="use a template that keeps every message")
            pieces.append(before)
        return [*pieces, text]

    def _fill(self, pieces: Sequence[str], messages: Sequence[str]) -> list[int]:
        ids = self._encode(pieces[0], escape=False)
        for message, piece in zip(messages, pieces[1:], strict=True):
            ids += self._encode(message, escape=True) + self._encode(piece, escape=False)
        return ids

    def _encode(self, text: str, *, escape: bool) -> list[int]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=escape)
        return [int(token) for token in encoded]
