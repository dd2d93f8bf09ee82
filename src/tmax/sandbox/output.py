"""Collects a command's output while it is read, so that a gigabyte of it costs no more memory than a page.

The rule: half of OUTPUT_LIMIT is kept from the head and half from the tail; what lies between is only counted.
"""

import codecs

from tmax.sandbox.protocol import OUTPUT_LIMIT


class Output:
    """One command's output as it arrives."""

    def __init__(self, limit: int = OUTPUT_LIMIT) -> None:
        self._half = limit // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head: list[str] = []
        self._head_chars = 0
        self._tail: list[str] = []
        self._tail_chars = 0
        self._total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; invalid UTF-8 is replaced."""
        self._add(self._decoder.decode(data))

    def finish(self) -> tuple[str, int]:
        """The text that was kept, with a notice where characters are missing, and how many are."""
        self._add(self._decoder.decode(b"", True))
        head, tail = "".join(self._head), "".join(self._tail)[-self._half :]
        missing = self._total - len(head) - len(tail)
        if missing <= 0:
            return head + tail, 0
        return f"{head}\n[... {missing} characters left out ...]\n{tail}", missing

    def _add(self, text: str) -> None:
        if not text:
            return
        self._total += len(text)
        room = self._half - self._head_chars
        if room > 0:
            self._head.append(text[:room])
            self._head_chars += len(self._head[-1])
            text = text[room:]
        if text:
            self._tail.append(text)
            self._tail_chars += len(text)
        if self._tail_chars > 2 * self._half:
            kept = "".join(self._tail)[-self._half :]
            self._tail, self._tail_chars = [kept], len(kept)
