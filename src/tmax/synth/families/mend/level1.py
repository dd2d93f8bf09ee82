"""Level 1 of `mend`: one wrong word in `run.sh`, and the instruction has both the wrong and the right one."""

import random
from collections.abc import Callable

from tmax.synth.families.case import Case, Operation
from tmax.synth.families.content import draw_files, draw_levels, log, prose, table
from tmax.synth.families.mend.script import Data, Fault, Try, mended, script_case, text
from tmax.synth.families.words import LOG_LEVELS, NOUNS, draw_starters
from tmax.task import FileSpec

WRONG_INPUT = (
    "run.sh reads {wrong}, but the data is in {right}. Fix run.sh please.",
    "`bash run.sh` fails because it wants {wrong}. Make it read {right}, that's where the data is.",
    "Typo in run.sh: it says {wrong} where it should say {right}. Correct it.",
    "We renamed {wrong} to {right} last week and forgot run.sh. Could you fix the script?",
    "run.sh still looks for {wrong}, that file is called {right} now. Update run.sh.",
    "I think run.sh trips over {wrong}. It has to be {right}, please fix the script.",
)

WRONG_OUTPUT = (
    "run.sh writes to {wrong}, but everybody expects {right}. Fix the name in run.sh.",
    "Output of run.sh ends up in {wrong}. I want it in {right}, change the script.",
    "Typo in run.sh: the result goes to {wrong}, should be {right}. Correct it please.",
    "Could you make run.sh write {right} instead of {wrong}? I mixed up the names.",
    "Nobody reads {wrong} any more, so let run.sh write its result to {right}.",
    "The uploader finds nothing because run.sh writes {wrong}. It has to be {right}, fix run.sh.",
)

WRONG_LEVEL = (
    "run.sh puts the {wrong} lines of {name} into {out}, but I need {right}. Fix run.sh please.",
    "Somebody set run.sh to {wrong}. Change it to {right} so that {out} makes sense.",
    "{out} from run.sh is full of {wrong}, it was meant to show {right}. Correct the script.",
    "Could you make run.sh filter {name} for {right} instead of {wrong}? My mistake.",
    "Wrong level for {name} in run.sh: it says {wrong}, should say {right}. Fix it please.",
    "run.sh greps {name} for {wrong} and I believe it should be {right}, change that.",
)

WRONG_VARIABLE = (
    "run.sh sets {right} but prints {wrong}, so the result is empty. Fix run.sh.",
    "Variable mix-up in run.sh: it uses {wrong}, but the value is in {right}. Correct it.",
    "`bash run.sh` writes nothing because {wrong} is never set. It should use {right}.",
    "I renamed a variable to {right} and left {wrong} behind in run.sh. Fix that please.",
    "Could you mend run.sh? It echoes {wrong} where it should echo {right}.",
    "There's a {wrong} in run.sh that has to be {right}, otherwise it prints nothing.",
)

WRONG_COMMAND = (
    "run.sh calls {wrong} on {name} where it should call {right}. Fix run.sh please.",
    "What run.sh leaves in {out} is odd, I think it needs {right} instead of {wrong}.",
    "Wrong tool in run.sh: replace {wrong} with {right} so that {out} is correct.",
    "Could you make run.sh use {right} for {out}? I wrote {wrong} late at night.",
    "run.sh was meant to use {right} on {name} but has {wrong} in it. Correct the script.",
    "Please change run.sh from {wrong} to {right}, its {out} is plain wrong now.",
)

WRONG_COLUMN = (
    "run.sh takes column {wrong} of {name}, but I need column {right}. Fix run.sh please.",
    "{name} got a new layout, so run.sh has to cut column {right} instead of {wrong}.",
    "Off in run.sh: it writes column {wrong} to {out}, should be column {right}. Correct it.",
    "Could you change run.sh from column {wrong} to column {right}? The field in {out} is wrong.",
    "I counted wrong, run.sh needs column {right} of {name} and not column {wrong}. Fix the script.",
    "run.sh gives me column {wrong} in {out}. Make it column {right} please.",
)

WRONG_NUMBER = (
    "run.sh keeps {wrong} lines of {name}, but the board shows {right}. Fix run.sh please.",
    "Make run.sh write the first {right} lines to {out}, it stops after {wrong} right now.",
    "Could you change run.sh from {wrong} lines to {right}? {out} has the wrong length.",
    "Somebody set run.sh to {wrong} lines of {name}, it should be {right}. Correct the script.",
    "run.sh cuts {name} off after {wrong} lines, I need {right} of them. Change run.sh.",
    "It was agreed that run.sh puts {right} lines into {out} and not {wrong}. Fix that please.",
)

Maker = Callable[[random.Random], list[str]]
"""Draws the lines of an input file."""

Answer = Callable[[list[str]], list[str]]
"""What a right script makes of an input file's lines."""


def _case(
    rng: random.Random,
    wordings: tuple[str, ...],
    *,
    script: str,
    right: str,
    wrong: str,
    edit: tuple[str, str] | None = None,
    names: tuple[str, str],
    make: Maker,
    answer: Answer,
) -> Case:
    """A case of one word; `script` has the fields {name}, {out} and {word}, `names` are the input's and output's."""
    name, out = names
    old, new = edit or (wrong, right)
    lines = ["#!/bin/bash", *script.format(name=name, out=out, word=wrong).split("\n")]
    mended(lines, [Fault(new, old)])  # raises where the oracle would hit another place

    def attempt(label: str) -> Try:
        lines = make(rng)
        data: Data = {name: text(lines)}
        return Try(label, data, answer(lines))

    tries = [attempt("given_data"), attempt("other_data")]
    while tries[0].wanted == tries[1].wanted:
        tries[1] = attempt("other_data")
    return script_case(
        instruction=rng.choice(wordings).format(wrong=wrong, right=right, name=name, out=out),
        lines=lines,
        steps=(f"sed -i 's/{old}/{new}/' run.sh",),
        output=out,
        tries=tries,
        others=_bystanders(rng, names),
        goal=f"`bash run.sh` writes {out} from {name}; {wrong} became {right}.",
        guards="The script is run on other data too, so a fixed text or a changed input does not pass.",
    )


def _bystanders(rng: random.Random, taken: tuple[str, ...]) -> dict[str, FileSpec]:
    nouns = {name.split(".")[0].split("-")[-1] for name in taken}
    files = draw_files(rng, 3, ("txt", "md", "conf"), stems=draw_starters)
    return dict([(name, file) for name, file in files.items() if name.split(".")[0].split("-")[-1] not in nouns][:2])


def _names(rng: random.Random, ending: str) -> tuple[str, str, str]:
    """An input's name, an output's name, and one more stem."""
    stems = draw_starters(rng, 3)
    return f"{stems[0]}.{ending}", f"{stems[1]}.txt", stems[2]


def _words(rng: random.Random) -> list[str]:
    lines = rng.sample(NOUNS, rng.randint(6, 10))
    while lines == sorted(lines):
        rng.shuffle(lines)
    return lines


def _wrong_input(rng: random.Random) -> Case:
    name, out, other = _names(rng, "txt")
    return _case(rng, WRONG_INPUT, script="sort {word} > {out}", right=name, wrong=f"{other}.txt",
                 names=(name, out), make=_words, answer=sorted)  # fmt: skip


def _wrong_output(rng: random.Random) -> Case:
    name, out, other = _names(rng, "txt")
    return _case(rng, WRONG_OUTPUT, script="sort {name} > {word}", right=out, wrong=f"{other}.txt",
                 names=(name, out), make=_words, answer=sorted)  # fmt: skip


def _wrong_level(rng: random.Random) -> Case:
    name, out, _ = _names(rng, "log")
    wrong, right = rng.sample(LOG_LEVELS, 2)
    return _case(rng, WRONG_LEVEL, script="grep {word} {name} > {out}", right=right, wrong=wrong, names=(name, out),
                 make=lambda rng: [str(line) for line in log(rng, draw_levels(rng, 2, 6))],
                 answer=lambda lines: [line for line in lines if f" {right} " in line])  # fmt: skip


def _wrong_variable(rng: random.Random) -> Case:
    name, out, _ = _names(rng, "txt")
    taken = f"{name} {out}"
    right, wrong = [noun for noun in rng.sample(NOUNS, 6) if noun not in taken][:2]
    script = f'{right}=$(wc -l < {{name}})\necho "${{word}}" > {{out}}'
    return _case(rng, WRONG_VARIABLE, script=script, right=right, wrong=wrong,
                 names=(name, out), make=lambda rng: prose(rng, rng.randint(3, 12)),
                 answer=lambda lines: [str(len(lines))])  # fmt: skip


def _wrong_command(rng: random.Random) -> Case:
    name, out, _ = _names(rng, "txt")
    right, wrong = rng.choice((("head", "tail"), ("tail", "head"), ("sort", "tac"), ("tac", "sort")))
    answers: dict[str, Answer] = {
        "head": lambda lines: lines[:3],
        "tail": lambda lines: lines[-3:],
        "sort": sorted,
        "tac": lambda lines: lines[::-1],
    }
    option = "-n 3 " if right in ("head", "tail") else ""

    def make(rng: random.Random) -> list[str]:
        lines = _words(rng)
        while sorted(lines) == lines[::-1]:
            lines = _words(rng)
        return lines

    return _case(rng, WRONG_COMMAND, script=f"{{word}} {option}{{name}} > {{out}}", right=right, wrong=wrong,
                 names=(name, out), make=make, answer=answers[right])  # fmt: skip


def _wrong_column(rng: random.Random) -> Case:
    name, out, _ = _names(rng, "csv")
    right, wrong = rng.sample(range(1, 5), 2)
    return _case(rng, WRONG_COLUMN, script="cut -d, -f{word} {name} > {out}", right=str(right), wrong=str(wrong),
                 edit=(f"-f{wrong}", f"-f{right}"), names=(name, out),
                 make=lambda rng: [",".join(map(str, row)) for row in table(rng, rng.randint(4, 8))],
                 answer=lambda lines: [line.split(",")[right - 1] for line in lines])  # fmt: skip


def _wrong_number(rng: random.Random) -> Case:
    name, out, _ = _names(rng, "txt")
    right, wrong = rng.sample(range(2, 9), 2)
    return _case(rng, WRONG_NUMBER, script="head -n {word} {name} > {out}", right=str(right), wrong=str(wrong),
                 edit=(f"-n {wrong}", f"-n {right}"), names=(name, out),
                 make=lambda rng: prose(rng, rng.randint(9, 12)), answer=lambda lines: lines[:right])  # fmt: skip


OPERATIONS: dict[str, Operation] = {
    "wrong_input": _wrong_input,
    "wrong_output": _wrong_output,
    "wrong_level": _wrong_level,
    "wrong_variable": _wrong_variable,
    "wrong_command": _wrong_command,
    "wrong_column": _wrong_column,
    "wrong_number": _wrong_number,
}
