"""Test files with their assertions rewritten for pytest, kept by the warm parent for all its children.

The rule: a test file is parsed and compiled here, and run in a sandbox only. The same file is run in many trials, and
rewriting is a fifth of a short run.
"""

import ast
import hashlib
import importlib
from pathlib import Path
from types import CodeType
from typing import Any

_LIMIT = 512

_codes: dict[tuple[str, bytes], CodeType] = {}


def prepare(path: str, source: bytes, config: Any) -> None:
    """Rewrite and compile `source` as what will lie at `path`; one that does not parse is left to who runs it."""
    from _pytest.assertion.rewrite import rewrite_asserts

    key = (path, hashlib.sha256(source).digest())
    if key in _codes:
        return
    try:
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path, config)
        code = compile(tree, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    if len(_codes) >= _LIMIT:
        del _codes[next(iter(_codes))]
    _codes[key] = code


def use() -> None:
    """Have pytest take what is prepared, where it would rewrite and compile."""
    rewrite: Any = importlib.import_module("_pytest.assertion.rewrite")
    original = rewrite._rewrite_test

    def rewritten(path: Path, config: Any) -> tuple[Any, CodeType]:
        code = _codes.get((str(path), hashlib.sha256(path.read_bytes()).digest()))
        # What comes first stamps a cached file, which is never written here.
        return (None, code) if code else original(path, config)

    rewrite._rewrite_test = rewritten
