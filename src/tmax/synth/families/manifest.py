"""Test sources about what is in the directory at all: the initial test, and the frame of the final one.

The rule: a source is self-contained, imports the standard library only, and touches no file before a test runs.
"""

import hashlib
import pprint
from collections.abc import Mapping, Sequence

from tmax.task import FileSpec

_INITIAL = '''\
"""The directory before anything was done."""

import hashlib
import os
from pathlib import Path

PRESENT = {present}

EXECUTABLE = {executable}

ABSENT = {absent}


def test_inputs_are_in_place():
    for name, digest in PRESENT.items():
        assert hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest, name


def test_only_programs_are_executable():
    for name in PRESENT:
        assert bool(os.stat(name).st_mode & 0o100) == (name in EXECUTABLE), name


def test_nothing_is_done_yet():
    for name in ABSENT:
        assert not os.path.lexists(name), name
'''

_FINAL = '''\
"""The directory after a correct solution."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

UNTOUCHED = {untouched}


def read_lines(name):
    """Lines of a plain file, without blanks at the end of a line or empty lines at the end of the file."""
    assert os.path.isfile(name), f"there is no file {{name}}"
    assert not os.path.islink(name), f"{{name}} is a link"
    return [line.rstrip() for line in Path(name).read_text(encoding="utf-8").rstrip().splitlines()]


def digest(name):
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def test_other_files_are_unchanged():
    for name, wanted in UNTOUCHED.items():
        assert os.path.isfile(name) and not os.path.islink(name), f"{{name}} is gone"
        assert digest(name) == wanted, f"{{name}} was changed"


{checks}
'''


def literal(value: object) -> str:
    """A Python literal of plain data, keys in the order given."""
    return pprint.pformat(value, width=110, sort_dicts=False)


def sha256(file: FileSpec) -> str:
    """What `digest(name)` gives in a final test."""
    return hashlib.sha256(file.content).hexdigest()


def initial_source(files: Mapping[str, FileSpec], absent: Sequence[str]) -> str:
    """Source of `test_initial_state.py`: every file exact, every output absent."""
    return _INITIAL.format(
        present=literal({name: sha256(file) for name, file in files.items()}),
        executable=literal([name for name, file in files.items() if file.mode & 0o100]),
        absent=literal(list(absent)),
    )


def final_source(untouched: Mapping[str, FileSpec], checks: Sequence[str]) -> str:
    """Source of `test_final_state.py`: untouched files, then the checks; they may use `read_lines` and `digest`."""
    return _FINAL.format(
        untouched=literal({name: sha256(file) for name, file in untouched.items()}),
        checks="\n\n\n".join(check.strip("\n") for check in checks),
    )
