"""Level 1 of `tally`: one question that one short command answers, about one log file."""

import random

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, holds_number, is_plain_file
from tmax.synth.families.content import LogLine, draw_files, draw_levels, log
from tmax.synth.families.words import LOG_LEVELS, draw_starters
from tmax.task import FileSpec

COUNT_LEVEL = (
    "How many {level} lines are in {log}? Just write the number into {out}.",
    "Count the {level} lines of {log} for me and save the number as {out}.",
    "{log} feels worse than yesterday, write its number of {level} lines to {out}.",
    "On call and {log} is noisy again. Number of {level} lines into {out} please.",
    "Somebody asked for the {level} total of {log}, put that one number in {out}.",
    "I need the count of {level} lines in {log}, nothing but the number, in {out}.",
)

COUNT_SERVICE = (
    "How many lines did {service} write in {log}? Only the number goes into {out}.",
    "Count the {service} lines in {log} and put the number in {out}.",
    "I think {service} spams {log}, write its number of lines to {out}.",
    "Number of lines from {service} in {log}, saved as {out}, that's all I need.",
    "Could you count how many {log} lines come from {service}? Result into {out}.",
    "Capacity review: count the lines of {service} in {log}, number into {out} please.",
)

COUNT_OTHER = (
    "How many lines of {log} are not {level}? Just the number, into {out}.",
    "Count everything in {log} except the {level} lines and write the number to {out}.",
    "{level} lines don't interest me. Number of all other lines of {log} into {out}.",
    "I need the count of lines in {log} that aren't {level}, put it in {out}.",
    "Leave out {level} and count the rest of {log}, number goes to {out}.",
    "Could you count the lines in {log} without the {level} ones? Save it as {out}.",
)

COUNT_LINES = (
    "How many lines does {log} have by now? Write the number into {out}.",
    "Count the lines of {log} for me and save just the number as {out}.",
    "I lost track of how long {log} is, put its number of lines in {out}.",
    "Need the total number of lines in {log}, nothing else, in {out}.",
    "Could you write the line count of {log} to {out}? The number only.",
    "Rotation starts soon I guess. Number of lines in {log} into {out} please.",
)

LINES_OF_LEVEL = (
    "Pull the {level} lines out of {log} into {out}, same order, nothing else.",
    "I only care about {level} in {log}, save those lines as {out}.",
    "Copy all {level} lines of {log} to {out} so I can send them on.",
    "Vendor wants to see every {level} line of {log}, put them in {out}.",
    "Could you collect the {level} lines from {log} in {out}? Don't reorder them.",
    "{out} gets the {level} lines of {log} please, as they are in there.",
)

FIRST_OF_LEVEL = (
    "When did it start? Put the first {level} line of {log} into {out}.",
    "I need the very first {level} line in {log}, saved as {out}.",
    "Write only the first {level} line of {log} to {out}, the whole line.",
    "Could you find the first {level} line in {log} and put it in {out}?",
    "The first {level} line of {log} started all this I believe, copy it to {out}.",
    "Postmortem needs the first {level} line from {log}, in a file called {out}.",
)

LAST_OF_LEVEL = (
    "Is it still going on? Put the last {level} line of {log} into {out}.",
    "I need the most recent {level} line in {log}, the last one, as {out}.",
    "Write only the last {level} line of {log} to {out}, the whole line.",
    "Could you find the last {level} line in {log} and put it in {out}?",
    "The last {level} line of {log} should tell us more, copy it to {out}.",
    "Handover needs the last {level} line from {log}, in a file called {out}.",
)


def _scene(rng: random.Random) -> tuple[list[LogLine], str, str, dict[str, FileSpec]]:
    """A log's lines and name, an output's name, and the whole directory with one or two other files."""
    lines = log(rng, draw_levels(rng))
    files = draw_files(rng, rng.randint(1, 2), stems=draw_starters)
    nouns = {name.split(".")[0].split("-")[-1] for name in files}
    spare = [stem for stem in draw_starters(rng, 4) if stem.split("-")[-1] not in nouns]
    name, out = f"{spare[0]}.log", f"{spare[1]}.txt"
    return lines, name, out, {name: plain([str(line) for line in lines]), **files}


def _counted(files: dict[str, FileSpec], instruction: str, step: str, out: str, number: int, what: str) -> Case:
    return Case(
        instruction=instruction,
        files=files,
        absent=(out,),
        steps=(step,),
        checks=(holds_number(out, number),),
        goal=f"{out} holds the number {number}: {what}.",
        guards="The lines themselves, or the number with a file name beside it, fail.",
    )


def _picked(files: dict[str, FileSpec], instruction: str, step: str, out: str, lines: list[LogLine], what: str) -> Case:
    return Case(
        instruction=instruction,
        files=files,
        absent=(out,),
        steps=(step,),
        checks=(is_plain_file(out), holds_lines(out, [str(line) for line in lines])),
        goal=f"{out} holds {what} and nothing else.",
        guards="Other lines, or the right ones in another order, fail.",
    )


def _count_level(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    level = rng.choice(LOG_LEVELS)
    number = sum(line.level == level for line in lines)
    instruction = rng.choice(COUNT_LEVEL).format(level=level, log=name, out=out)
    return _counted(files, instruction, f"grep -c {level} {name} > {out}", out, number, f"the {level} lines of {name}")


def _count_service(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    service = rng.choice(lines).service
    number = sum(line.service == service for line in lines)
    instruction = rng.choice(COUNT_SERVICE).format(service=service, log=name, out=out)
    return _counted(files, instruction, f"grep -c {service} {name} > {out}", out, number, f"the lines of {service}")


def _count_other(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    # Not a level that half of the lines have, or counting it instead of the others would be right.
    level = rng.choice([level for level in LOG_LEVELS if 2 * sum(line.level == level for line in lines) != len(lines)])
    number = sum(line.level != level for line in lines)
    instruction = rng.choice(COUNT_OTHER).format(level=level, log=name, out=out)
    return _counted(files, instruction, f"grep -vc {level} {name} > {out}", out, number, f"all lines but the {level}")


def _count_lines(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    instruction = rng.choice(COUNT_LINES).format(log=name, out=out)
    return _counted(files, instruction, f"wc -l < {name} > {out}", out, len(lines), f"the lines of {name}")


def _lines_of_level(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    level = rng.choice(LOG_LEVELS)
    picked = [line for line in lines if line.level == level]
    instruction = rng.choice(LINES_OF_LEVEL).format(level=level, log=name, out=out)
    return _picked(files, instruction, f"grep {level} {name} > {out}", out, picked, f"the {level} lines of {name}")


def _first_of_level(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    level = rng.choice(LOG_LEVELS)
    picked = [line for line in lines if line.level == level][:1]
    instruction = rng.choice(FIRST_OF_LEVEL).format(level=level, log=name, out=out)
    step = f"grep {level} {name} | head -n 1 > {out}"
    return _picked(files, instruction, step, out, picked, f"the first {level} line of {name}")


def _last_of_level(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng)
    level = rng.choice(LOG_LEVELS)
    picked = [line for line in lines if line.level == level][-1:]
    instruction = rng.choice(LAST_OF_LEVEL).format(level=level, log=name, out=out)
    step = f"grep {level} {name} | tail -n 1 > {out}"
    return _picked(files, instruction, step, out, picked, f"the last {level} line of {name}")


OPERATIONS: dict[str, Operation] = {
    "count_level": _count_level,
    "count_service": _count_service,
    "count_other": _count_other,
    "count_lines": _count_lines,
    "lines_of_level": _lines_of_level,
    "first_of_level": _first_of_level,
    "last_of_level": _last_of_level,
}
