"""A script to be mended, its faults, and how the tests try it.

The rule: a test runs the script in a fresh directory that holds the script and the test's data and nothing else, as
the user who owns the working directory, because what runs there was written by whoever is being graded.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tmax.synth.families.case import Case, plain
from tmax.synth.families.manifest import literal
from tmax.task import FileSpec

NAME = "run.sh"

Data = dict[str, str]
"""Text by file name."""

_RUN = '''
def run_script(data, output):
    """The lines that run.sh writes to `output` where only `data` is there."""
    assert os.path.isfile("run.sh") and not os.path.islink("run.sh"), "run.sh is not a plain file"
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        shutil.copyfile("run.sh", Path(place, "run.sh"))
        for name, text in data.items():
            Path(place, name).write_text(text, encoding="utf-8")
        owner = os.stat(".").st_uid
        drop = {}
        if os.geteuid() == 0 and owner not in (0, 65534):
            for path in [Path(place), *Path(place).iterdir()]:
                os.chown(path, owner, owner)
            drop = {"user": owner, "group": owner}
        nothing = subprocess.DEVNULL
        subprocess.run(["bash", "run.sh"], cwd=place, stdin=nothing, stdout=nothing, stderr=nothing, timeout=20, **drop)
        return read_lines(os.path.join(place, output))
'''


@dataclass(frozen=True)
class Try:
    """Data and what a right script makes of it."""

    label: str
    data: Data
    wanted: list[str]


@dataclass(frozen=True)
class Fault:
    """A piece of the right script, on one line, that occurs once, and what stands there instead."""

    right: str
    wrong: str


def broken(lines: Sequence[str], faults: Sequence[Fault]) -> list[str]:
    """The right script with the faults in it. Raises ValueError where `sed_step` would not bring it back."""
    wrong = _swapped("\n".join(lines), [(fault.right, fault.wrong) for fault in faults])
    mended(wrong.split("\n"), faults)
    return wrong.split("\n")


def mended(lines: Sequence[str], faults: Sequence[Fault]) -> list[str]:
    """The broken script put right. Raises ValueError where a fault does not stand for exactly one place."""
    return _swapped("\n".join(lines), [(fault.wrong, fault.right) for fault in faults]).split("\n")


def _swapped(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"`{old}` occurs {text.count(old)} times in the script")
        text = text.replace(old, new)
    return text


def sed_step(fault: Fault) -> str:
    """The command that puts a fault right; nothing in it is taken for a pattern by accident."""
    pattern = re.sub(r"([\\.*^$/\[\]])", r"\\\1", fault.wrong)
    replacement = re.sub(r"([\\&/])", r"\\\1", fault.right)
    return f"sed -i 's/{pattern}/{replacement}/' {NAME}"


def script_case(
    *,
    instruction: str,
    lines: Sequence[str],
    steps: tuple[str, ...],
    output: str,
    tries: Sequence[Try],
    others: dict[str, FileSpec],
    goal: str,
    guards: str,
) -> Case:
    """A case around the broken script `lines`; the first try's data is what lies in the directory."""
    data = {name: FileSpec(text.encode()) for name, text in tries[0].data.items()}
    return Case(
        instruction=instruction,
        files={NAME: plain(lines, 0o755), **data, **others},
        absent=(output,),
        changed=(NAME,),
        steps=steps,
        checks=(_RUN, *(_check(attempt, output) for attempt in tries)),
        goal=goal,
        guards=guards,
    )


def text(lines: Sequence[str]) -> str:
    """The lines as a file's text, each ended by a newline."""
    return "".join(f"{line}\n" for line in lines)


def _check(attempt: Try, output: str) -> str:
    return f"""
def test_{attempt.label}():
    data = {literal(attempt.data)}
    assert run_script(data, {output!r}) == {literal(attempt.wanted)}
"""
