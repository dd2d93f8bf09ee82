"""One instance of an operation, and how it becomes a draft; a case names every file that it changes or makes.

Whatever a case does not name as changed must keep every byte; that check, the initial test and half of the truth
are derived here, so no operation can forget them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tmax.synth.families.family import Family
from tmax.synth.families.manifest import final_source, initial_source
from tmax.task import FileSpec, Settings, TaskDraft, Truth

DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files/ /app/\n"

DOCKERFILE_WITH_PYTHON = (
    "FROM ubuntu:24.04\n"
    "RUN command -v python3 || (apt-get update && apt-get install -y python3)\n"
    "WORKDIR /app\n"
    "COPY files/ /app/\n"
)


@dataclass(frozen=True)
class Case:
    """A starting directory, what is asked, how it is done and how it is checked; paths are relative to /app."""

    instruction: str
    files: dict[str, FileSpec]
    """The starting directory."""
    steps: tuple[str, ...]
    """The oracle's commands."""
    checks: tuple[str, ...]
    """Sources of the final tests (see `checks`), the one for untouched files apart."""
    goal: str
    """What holds after a correct solution."""
    guards: str
    """Which short cuts the tests refuse."""
    absent: tuple[str, ...] = ()
    """Paths that do not exist at the start."""
    changed: tuple[str, ...] = ()
    """Starting files that a correct solution changes, moves or deletes."""
    python: bool = False
    """Whether the oracle needs `python3` in the image."""


Operation = Callable[[random.Random], Case]


def plain(lines: Sequence[str], mode: int = 0o644) -> FileSpec:
    """A text file of these lines, each ended by a newline."""
    return FileSpec("".join(f"{line}\n" for line in lines).encode(), mode)


def make_family(name: str, domain: str, summary: str, levels: Mapping[int, Mapping[str, Operation]]) -> Family:
    """A family whose levels are operations by name, drawn with equal weight."""

    def draw(rng: random.Random, level: int) -> TaskDraft:
        operation = rng.choice(tuple(levels[level]))
        case = levels[level][operation](rng)
        return to_draft(case, family=name, domain=domain, level=level, operation=operation)

    return Family(name=name, domain=domain, levels=tuple(levels), summary=summary, draw=draw)


def to_draft(case: Case, *, family: str, domain: str, level: int, operation: str) -> TaskDraft:
    """The case as a draft. Raises ValueError where it names a changed file that is not there at the start."""
    strangers = [name for name in case.changed if name not in case.files]
    if strangers:
        raise ValueError(f"{family}/{operation} changes files that it does not ship: {strangers}")
    untouched = {name: file for name, file in case.files.items() if name not in case.changed}
    return TaskDraft(
        instruction=case.instruction,
        dockerfile=DOCKERFILE_WITH_PYTHON if case.python else DOCKERFILE,
        files={f"files/{name}": file for name, file in case.files.items()},
        initial_test=initial_source(case.files, case.absent),
        final_test=final_source(untouched, case.checks),
        steps=case.steps,
        truth=Truth(
            initial_state=_initial_state(case),
            final_state=case.goal,
            invariants=f"Every byte of {', '.join(untouched)} stays as it was.",
            guards=case.guards,
        ),
        spec={
            "family": family,
            "level": level,
            "domain": domain,
            "operation": operation,
            "verifier": "exact_text",
            "fixture": "text_only",
            "language": "Bash",
        },
        settings=Settings(agent_timeout=120, verifier_timeout=60),
    )


def _initial_state(case: Case) -> str:
    present = ", ".join(f"{name} ({len(file.content)} bytes)" for name, file in case.files.items())
    absent = f" Not there yet: {', '.join(case.absent)}." if case.absent else ""
    return f"/app holds {present}.{absent}"
