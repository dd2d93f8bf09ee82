"""Level 1 of `reshape`: one short command that writes one file's content in another form.

The rule: tables have no heading and sorted things are plain lower-case words, so that there is one right answer in
every locale.
"""

import random

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, is_plain_file
from tmax.synth.families.content import draw_files, prose, settings, table
from tmax.synth.families.words import NOUNS, draw_starters

COLUMN = (
    "I only need column {number} of {name}, write it to {out}.",
    "Cut column {number} out of {name} and save it as {out}.",
    "Could you put column {number} of {name} into {out}? One value a line.",
    "The mail tool wants column {number} of {name} by itself, in {out}.",
    "{name} has too much in it. Column {number} only, into {out} please.",
    "Take column {number} from {name}, leave the order alone, and write {out}.",
)

TABS = (
    "Turn the commas in {name} into tabs and write it to {out}.",
    "The loader only eats tabs. Convert {name} from commas to tabs as {out}.",
    "I need {name} with tabs instead of commas, saved as {out}.",
    "Could you make a tab separated {out} out of {name}? Commas break the import.",
    "Same rows as {name}, but tabs where the commas are, in {out} please.",
    "Spreadsheet people again: {name} with tabs for commas, call it {out}.",
)

SORT = (
    "Sort the lines of {name} alphabetically and write them to {out}.",
    "{name} is in no order at all, I'd like it sorted as {out}.",
    "Could you sort {name} from a to z into {out}? Don't touch {name}.",
    "Need an alphabetical version of {name}, save that as {out}.",
    "The diff is unreadable because {name} isn't sorted. Sorted copy into {out} please.",
    "Put the lines of {name} in alphabetical order and save them as {out}.",
)

UNIQUE = (
    "{name} has lots of repeats. Sort it and keep each line once, into {out}.",
    "I need the different lines of {name}, alphabetical and each only once, in {out}.",
    "Sort {name}, drop the duplicates and write the result to {out}.",
    "Could you dedupe {name} into {out}? Sorted from a to z would be great.",
    "Every line of {name} once, in alphabetical order, saved as {out} please.",
    "Make {out} from {name}: sorted, and no line more than once.",
)

UPPER = (
    "Write {name} in capital letters to {out}, I need it for a label.",
    "The old mainframe only reads upper case. Convert {name} and save as {out}.",
    "Could you turn {name} into all upper case and put that in {out}?",
    "I need an upper case version of {name}, lines as they are, in {out}.",
    "All letters of {name} as capitals into {out} please, don't ask me why.",
    "Copy {name} to {out} but with every letter in upper case.",
)

HEAD = (
    "A sample will do: the first {number} lines of {name} into {out}.",
    "Give me just the first {number} lines of {name}, saved as {out}.",
    "Take the top {number} lines of {name} and write them to {out}.",
    "Could you put the first {number} lines of {name} in {out}? It's for a demo.",
    "{name} is too long for the ticket, first {number} lines into {out} please.",
    "I want a short {out} that has only the first {number} lines of {name}.",
)

VALUES = (
    "I need only the values from {name}, without the keys, in {out}.",
    "Strip the keys off {name}, what's right of the = goes into {out}.",
    "Could you list the values in {name}, one a line, as {out}?",
    "Take what comes after the = in each line of {name} and write {out}.",
    "The checker wants the bare values of {name}, same order, saved as {out}.",
    "Drop everything up to the = in {name} and put the rest into {out}.",
)

REVERSE = (
    "{name} is upside down, write it to {out} with the last line first.",
    "Newest entry comes last in {name}. Reverse the lines into {out} please.",
    "I need the lines of {name} in reverse order, saved as {out}.",
    "Could you flip {name} so that its last line comes first, into {out}?",
    "Turn the line order of {name} around and write the result to {out}.",
    "Read {name} from bottom to top and save it that way as {out}.",
)


def _case(
    rng: random.Random,
    wordings: tuple[str, ...],
    command: str,
    *,
    endings: tuple[str, str],
    lines: list[str],
    wanted: list[str],
    number: int = 0,
) -> Case:
    """A case that makes a file of `wanted` out of one of `lines`; `command` has the fields of the wordings."""
    others = draw_files(rng, rng.randint(1, 2), stems=draw_starters)
    nouns = {known.split(".")[0].split("-")[-1] for known in others}
    spare = [stem for stem in draw_starters(rng, 4) if stem.split("-")[-1] not in nouns]
    name, out = f"{spare[0]}.{endings[0]}", f"{spare[1]}.{endings[1]}"
    fields = {"name": name, "out": out, "number": number}
    return Case(
        instruction=rng.choice(wordings).format(**fields),
        files={name: plain(lines), **others},
        absent=(out,),
        steps=(command.format(**fields),),
        checks=(is_plain_file(out), holds_lines(out, wanted)),
        goal=f"{out} has {len(wanted)} lines, made from {name}.",
        guards=f"{name} itself has to stay as it is, so a change in place fails.",
    )


def _column(rng: random.Random) -> Case:
    rows = table(rng, rng.randint(4, 8))
    number = rng.randint(1, 4)
    lines, wanted = [",".join(map(str, row)) for row in rows], [str(row[number - 1]) for row in rows]
    command = "cut -d, -f{number} {name} > {out}"
    return _case(rng, COLUMN, command, endings=("csv", "txt"), lines=lines, wanted=wanted, number=number)


def _tabs(rng: random.Random) -> Case:
    rows = [list(map(str, row)) for row in table(rng, rng.randint(3, 6))]
    lines, wanted = [",".join(row) for row in rows], ["\t".join(row) for row in rows]
    return _case(rng, TABS, "tr ',' '\\t' < {name} > {out}", endings=("csv", "tsv"), lines=lines, wanted=wanted)


def _sort(rng: random.Random) -> Case:
    lines = rng.sample(NOUNS, rng.randint(6, 10))
    while lines == sorted(lines):
        rng.shuffle(lines)
    return _case(rng, SORT, "sort {name} > {out}", endings=("txt", "txt"), lines=lines, wanted=sorted(lines))


def _unique(rng: random.Random) -> Case:
    words = rng.sample(NOUNS, rng.randint(4, 6))
    lines = [*words, *rng.choices(words, k=rng.randint(3, 5))]
    rng.shuffle(lines)
    return _case(rng, UNIQUE, "sort -u {name} > {out}", endings=("txt", "txt"), lines=lines, wanted=sorted(words))


def _upper(rng: random.Random) -> Case:
    lines = prose(rng, rng.randint(3, 6))
    wanted = [line.upper() for line in lines]
    return _case(rng, UPPER, "tr a-z A-Z < {name} > {out}", endings=("txt", "txt"), lines=lines, wanted=wanted)


def _head(rng: random.Random) -> Case:
    lines = prose(rng, rng.randint(8, 12))
    number = rng.randint(2, 6)
    command = "head -n {number} {name} > {out}"
    return _case(rng, HEAD, command, endings=("txt", "txt"), lines=lines, wanted=lines[:number], number=number)


def _values(rng: random.Random) -> Case:
    pairs = settings(rng, rng.randint(4, 7))
    lines, wanted = [f"{key}={value}" for key, value in pairs], [value for _, value in pairs]
    return _case(rng, VALUES, "cut -d= -f2 {name} > {out}", endings=("conf", "txt"), lines=lines, wanted=wanted)


def _reverse(rng: random.Random) -> Case:
    lines = prose(rng, rng.randint(4, 8))
    return _case(rng, REVERSE, "tac {name} > {out}", endings=("txt", "txt"), lines=lines, wanted=lines[::-1])


OPERATIONS: dict[str, Operation] = {
    "column": _column,
    "tabs": _tabs,
    "sort": _sort,
    "unique": _unique,
    "upper": _upper,
    "head": _head,
    "values": _values,
    "reverse": _reverse,
}
