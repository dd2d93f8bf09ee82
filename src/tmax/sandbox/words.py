"""Words of a Dockerfile: where they end, and what variables, quotes and escapes in them come to.

The rule: this is the builder's own substitution; what follows RUN is left to the shell.
"""

import re
from collections.abc import Mapping
from typing import NoReturn

from tmax.errors import BuildError


def expand(text: str, env: Mapping[str, str], line: int, *, escape: str = "\\") -> str:
    """Substitute variables and take away quotes and escapes, as a builder does outside RUN. Raises BuildError."""
    return _Reader(text, env, line, escape, quotes=True).read()


def expand_body(text: str, env: Mapping[str, str], line: int) -> str:
    """Substitute variables in a heredoc's body; quotes stay. Raises BuildError."""
    return _Reader(text, env, line, "\\", quotes=False).read()


def split_words(text: str, escape: str = "\\") -> list[str]:
    """Cut at white space outside quotes; quotes and escapes stay in the words."""
    words: list[str] = []
    word, quote, index = "", "", 0
    while index < len(text):
        char = text[index]
        if char == escape and quote != "'" and index + 1 < len(text):
            word += text[index : index + 2]
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if word:
                words.append(word)
            word = ""
            index += 1
            continue
        word += char
        index += 1
    return [*words, word] if word else words


class _Reader:
    """Substitutes variables in one text."""

    def __init__(self, text: str, env: Mapping[str, str], line: int, escape: str, *, quotes: bool) -> None:
        self.text, self.env, self.line, self.escape, self.quotes = text, env, line, escape, quotes
        self.at = 0

    def read(self) -> str:
        out, quote = "", ""
        while self.at < len(self.text):
            char = self.text[self.at]
            following = self.text[self.at + 1 : self.at + 2]
            if char == self.escape and quote != "'" and following:
                self.at += 2
                keeps = following not in (self.escape, "$", "\n") if not self.quotes else (
                    quote == '"' and following not in ('"', "$", self.escape)
                )  # fmt: skip
                out += char + following if keeps else following
            elif self.quotes and char in "'\"" and quote in ("", char):
                quote = "" if quote else char
                self.at += 1
            elif char == "$" and quote != "'":
                out += self._variable()
            else:
                out += char
                self.at += 1
        if quote:
            fail(self.line, f"a {quote} is not closed")
        return out

    def _variable(self) -> str:
        simple = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)").match(self.text, self.at)
        if simple:
            self.at = simple.end()
            return self.env.get(simple[1], "")
        if self.text[self.at + 1 : self.at + 2] != "{":
            self.at += 1
            return "$"
        inner = self._braces()
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+?])(.*))?", inner, re.DOTALL)
        if match is None:
            fail(self.line, f"`${{{inner}}}` is not supported")
        name, operator, word = match[1], match[2] or "", match[3] or ""
        value = self.env.get(name)
        is_set = bool(value) if operator.startswith(":") else value is not None
        word = _Reader(word, self.env, self.line, self.escape, quotes=self.quotes).read()
        if operator.endswith("-"):
            return (value or "") if is_set else word
        if operator.endswith("+"):
            return word if is_set else ""
        if operator.endswith("?") and not is_set:
            fail(self.line, f"{name}: {word or 'not set'}")
        return value or ""

    def _braces(self) -> str:
        depth, start = 0, self.at + 2
        for position in range(self.at + 1, len(self.text)):
            depth += {"{": 1, "}": -1}.get(self.text[position], 0)
            if depth == 0:
                self.at = position + 1
                return self.text[start:position]
        return fail(self.line, "a ${ is not closed")


def fail(line: int, message: str) -> NoReturn:
    """Raise the BuildError that names a line."""
    raise BuildError(
        f"Dockerfile, line {line}: {message}",
        hint="one stage, and sources from the build context, are what both engines can build",
    )
