"""Build contexts: which files a Dockerfile's COPY means.

The rule: only what `task.context_files` lists and `.dockerignore` leaves can be copied; tests and truth never can.
"""

import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tmax.errors import BuildError
from tmax.task import NOT_CONTEXT, context_files


@dataclass(frozen=True)
class Found:
    """One source of a COPY: itself, and where it is a directory, what is in it by path relative to it."""

    path: Path
    is_directory: bool
    inside: tuple[tuple[str, Path], ...] = ()


class Context:
    """The files that may be sent to a build, by path relative to the context."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = _Ignore(root / ".dockerignore")
        names = [file.relative_to(root).as_posix() for file in context_files(root)]
        self.files = {name: root / name for name in names if not ignored(name)}
        folders = {parent.as_posix() for name in self.files for parent in PurePosixPath(name).parents}
        folders |= {
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.is_dir() and not path.is_symlink() and not ignored(path.relative_to(root).as_posix())
        }
        self.folders = folders | {"."}

    def find(self, source: str, line: int) -> list[Found]:
        """What a source of a COPY means, by name. Raises BuildError where it means nothing or leaves the context."""
        name = os.path.normpath(source.lstrip("/") or ".")
        if name.split("/")[0] == "..":
            raise BuildError(
                f"Dockerfile, line {line}: `{source}` leaves the build context", hint="copy it into environment/"
            )
        if name in NOT_CONTEXT:
            raise BuildError(
                f"Dockerfile, line {line}: `{source}` belongs to the tests or the truth and is kept out of images",
                hint="take it out of the Dockerfile",
            )
        names = [name] if name in self.files or name in self.folders else self._matching(name)
        if not names:
            raise BuildError(
                f"Dockerfile, line {line}: `{source}` is not in the build context", hint="add it to environment/"
            )
        return [self._found(name) for name in names]

    def _matching(self, pattern: str) -> list[str]:
        depth = pattern.count("/")
        return sorted(
            name for name in {*self.files, *self.folders}
            if name.count("/") == depth and name != "."
            and all(
                fnmatch.fnmatchcase(part, wanted)
                for part, wanted in zip(name.split("/"), pattern.split("/"), strict=True)
            )
        )  # fmt: skip

    def _found(self, name: str) -> Found:
        if name in self.files:
            return Found(self.files[name], False)
        prefix = "" if name == "." else f"{name}/"
        inside = {
            path.removeprefix(prefix): self.root / path
            for path in {*self.files, *self.folders}
            if path.startswith(prefix)
        }
        inside.pop(".", None)
        return Found(self.root / name, True, tuple(sorted(inside.items())))


class _Ignore:
    """A `.dockerignore`: the last pattern that matches a path or one of its parents decides."""

    def __init__(self, file: Path) -> None:
        self.patterns: list[tuple[bool, re.Pattern[str]]] = []
        if not file.is_file():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            keeps = text.startswith("!")
            text = os.path.normpath(text.removeprefix("!").strip().lstrip("/"))
            self.patterns.append((keeps, _ignore_pattern(text)))

    def __call__(self, name: str) -> bool:
        parents = [path.as_posix() for path in PurePosixPath(name).parents if path.as_posix() != "."]
        ignored = False
        for keeps, pattern in self.patterns:
            if any(pattern.fullmatch(path) for path in (name, *parents)):
                ignored = not keeps
        return ignored


def _ignore_pattern(text: str) -> re.Pattern[str]:
    out, index = "", 0
    while index < len(text):
        if text.startswith("**/", index):
            out += "(?:.*/)?"
            index += 3
        elif text.startswith("**", index):
            out += ".*"
            index += 2
        elif text[index] == "[" and (end := text.find("]", index)) > 0:
            out += text[index : end + 1].replace("[!", "[^")
            index = end + 1
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(text[index]) or re.escape(text[index])
            index += 1
    return re.compile(out)
