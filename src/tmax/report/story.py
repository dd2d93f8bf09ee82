"""A trial as a person reads it: in plain text, turn by turn, and which trials are worth reading.

The rule: control characters of a trial's output never reach a terminal or a page as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tmax.records import Failure, Purpose, TaskRow, Trial, TrialKey, Turn
from tmax.store import Store

_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def visible(text: str) -> str:
    """The text with line ends made plain and control and direction characters replaced by symbols."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: both ends, and a notice of what is left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def describe_trial(trial: Trial) -> str:
    """The whole trial in plain text, turn by turn; nothing is left out."""
    key, timings = trial.key, trial.timings
    result = f"reward {trial.reward:g}" if trial.reward is not None else "no reward"
    seconds = ", ".join(f"{part} {value:.2f}" for part, value in timings.model_dump().items())
    lines = [
        f"task     {key.task_id}",
        f"trial    {key.purpose} {key.index}",
        f"policy   {trial.policy}, version {trial.policy_version}",
        f"outcome  {trial.outcome.value}, {result}",
        f"seconds  {seconds}",
    ]
    lines += [f"retry    {_failure_line(failure)}" for failure in trial.retries]
    if trial.failure is not None:
        lines += ["", "failure", _indent(_failure_line(trial.failure))]
        if trial.failure.hint:
            lines.append(_indent(f"hint: {trial.failure.hint}"))
        if trial.failure.log_tail:
            lines += [_indent("end of the log:"), _indent(_indent(trial.failure.log_tail))]
    if trial.trajectory is None:
        lines += ["", "no trajectory was kept"]
    else:
        lines += ["", "system", _indent(trial.trajectory.system)]
        lines += ["", "instruction", _indent(trial.trajectory.instruction)]
        for number, turn in enumerate(trial.trajectory.turns, start=1):
            lines += ["", *_describe_turn(number, turn)]
        lines += ["", f"stopped  {trial.trajectory.stop}, after {len(trial.trajectory.turns)} turns"]
    if trial.report is not None:
        lines += ["", f"tests    exit code {trial.report.exit_code}, {trial.report.seconds:.2f} s"]
        for test in trial.report.tests:
            lines.append(f"  {test.status:<8} {test.name}  ({test.seconds:.2f} s)")
            if test.message:
                lines.append(_indent(_indent(test.message)))
    return visible("\n".join(lines)) + "\n"


def _describe_turn(number: int, turn: Turn) -> list[str]:
    code = "none" if turn.exit_code is None else str(turn.exit_code)
    lines = [f"turn {number}  ({turn.seconds:.2f} s, exit code {code})", "  reply", _indent(_indent(turn.reply))]
    if turn.command is None:
        lines.append("  no usable command")
    else:
        lines += ["  command", _indent(_indent(turn.command))]
    if turn.observation is not None:
        lines += ["  observation", _indent(_indent(turn.observation))]
    return lines


def _failure_line(failure: Failure) -> str:
    return f"{failure.kind}: {failure.message}" if failure.kind else failure.message


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.rstrip("\n").split("\n"))


@dataclass(frozen=True)
class Example:
    """A task with a trial that passed and one that did not, where there are both."""

    task: TaskRow
    passing: Trial | None
    failing: Trial | None


_PASSING_FROM: tuple[Purpose, ...] = ("eval_after", "train", "eval_before")
_FAILING_FROM: tuple[Purpose, ...] = ("eval_before", "train", "eval_after")


def choose_examples(store: Store, *, limit: int) -> list[Example]:
    """Up to `limit` tasks to read: families in turn, tasks with a pass and a fail first, held-out ones before others.

    Passes are taken from after training where there are any, fails from before it.
    """
    passed: dict[str, dict[Purpose, TrialKey]] = {}
    failed: dict[str, dict[Purpose, TrialKey]] = {}
    for purpose in _PASSING_FROM:
        for trial in store.trials(purpose):
            if trial.reward is not None:
                side = passed if trial.reward == 1.0 else failed
                side.setdefault(trial.key.task_id, {}).setdefault(purpose, trial.key)
    rows = [row for row in store.tasks() if row.task_id in passed or row.task_id in failed]
    rows.sort(
        key=lambda row: (
            not (row.task_id in passed and row.task_id in failed), row.spec.split != "heldout", row.spec.index,
        )
    )  # fmt: skip
    return [
        Example(
            task=row,
            passing=_first(store, passed.get(row.task_id, {}), _PASSING_FROM),
            failing=_first(store, failed.get(row.task_id, {}), _FAILING_FROM),
        )
        for row in _families_in_turn(rows)[:limit]
    ]


def _first(store: Store, keys: dict[Purpose, TrialKey], order: Sequence[Purpose]) -> Trial | None:
    for purpose in order:
        if purpose in keys:
            return store.trial(keys[purpose])
    return None


def _families_in_turn(rows: Iterable[TaskRow]) -> list[TaskRow]:
    seen: dict[str, int] = {}
    ranked: list[tuple[int, int, TaskRow]] = []
    for row in rows:
        seen[row.spec.family] = seen.get(row.spec.family, 0) + 1
        ranked.append((seen[row.spec.family], len(ranked), row))
    return [row for _, _, row in sorted(ranked, key=lambda item: item[:2])]
