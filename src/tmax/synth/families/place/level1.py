"""Level 1 of `place`: one short command; each kind of operation has one form of command and names all it needs."""

import random
from typing import Any

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import (
    directory_holds,
    holds_lines,
    is_directory,
    is_executable,
    is_gone,
    is_plain_file,
    no_copy_left,
    not_same_file,
    same_bytes,
)
from tmax.synth.families.content import draw_files, prose
from tmax.synth.families.words import draw_phrase, draw_starters
from tmax.task import FileSpec

TEXTS = ("txt", "md")

WRITE = (
    'Put the line "{line}" into a new file called {out} here.',
    'I need a {out} in this directory that just says "{line}", nothing else.',
    'Start {out} for me with only one line in it: "{line}".',
    'Could you create {out} with the single line "{line}" before standup?',
    'My editor is stuck again. Write "{line}" to a new {out} please.',
    'Deploy looks for {out} I think, so make one that says "{line}".',
    '{out} got lost somehow. It only ever said "{line}", write it again.',
)

APPEND = (
    'Add the line "{line}" to the end of {name}, keep the rest.',
    '{name} is missing its last line I think, append "{line}" to it.',
    'Forgot one thing in {name}: "{line}" goes at the very bottom.',
    'Please tack "{line}" onto the bottom of {name} as its own line.',
    'Can you append "{line}" to {name}? Nothing else in there changes.',
    'One more entry for {name}, put "{line}" after the last line.',
)

COPY = (
    "I'm about to edit {name}, keep a copy of it as {out} first.",
    "Need a backup of {name} before tonight, call it {out} and leave the original.",
    "Copy {name} to {out} please, I want both around for now.",
    "Can you duplicate {name} as {out}? The old one has to stay.",
    "{out} went missing I guess, just make it again from {name}, same content.",
    "Somebody will break {name} sooner or later, so copy it to {out}.",
)

RENAME = (
    "{name} has a silly name, call it {out} from now on.",
    "Rename {name} to {out} for me, the content is fine.",
    "We agreed on {out} last week, but it's still called {name}. Rename it.",
    "Could you rename {name}? It was meant to be {out} all along.",
    "The importer only takes {out}, so rename {name} to that please.",
    "Typo of mine: {name} needs the name {out}, content stays the same.",
)

MOVE = (
    "{name} belongs into the {place}/ directory here, move it there please.",
    "I left {name} in the wrong spot, move it into {place}/ for me.",
    "Tidying up: {name} goes into the {place}/ directory, same file name.",
    "Can you move {name} into {place}/? It only gets in the way here.",
    "Move {name} under {place}/ please, I never know where to look for it.",
    "Pretty sure {name} was always meant to sit in {place}/. Move it.",
)

DELETE = (
    "{name} is left over from some old test, delete it please.",
    "Get rid of {name} in here, nobody has used it for months.",
    "I don't need {name} any more, remove it and leave the rest.",
    "Could you delete {name}? I think it confuses the build.",
    "Remove {name} from this directory, it was never meant to be here.",
    "Disk quota is nagging me again, so throw {name} away please.",
)

DIRECTORY = (
    "Make an empty directory called {place} here, the exporter wants it.",
    "I need a directory named {place} next to these files, nothing in it yet.",
    "Could you create an empty directory {place} in here? The job fails without it.",
    "The script expects an empty {place} directory I believe, so make it please.",
    "Set up a new directory {place} here for tomorrow's batch, empty for now.",
    "Somebody deleted the {place} directory, just create it again, it was empty.",
)

EXECUTABLE = (
    "{name} won't start, says permission denied. Make it executable please.",
    "Make the script {name} in here executable, I keep forgetting that.",
    "Could you make {name} executable? The cron job can't run it.",
    "I copied {name} over and it lost its run bit, make it executable again.",
    "{name} has to be executable before the release, could you do that?",
    "Need to run {name} directly later, so make it executable for me.",
)

CONCATENATE = (
    "Join {name} and {other}, in that order, into a new file {out}.",
    "I need {name} followed by {other} in one file, call it {out}.",
    "Stitch {name} and then {other} together as {out}, keep both parts.",
    "Could you put {name} and {other} one after the other into {out}?",
    "Legal wants one file: {name} first, then {other}, saved as {out}.",
    "{out} is just {name} plus {other} below it, please build that.",
)


def _sketch(rng: random.Random, endings: tuple[str, ...] | None = None) -> tuple[dict[str, FileSpec], list[str]]:
    """Three to five files, in a drawn order, and spare stems that none of them uses."""
    files = (
        draw_files(rng, rng.randint(3, 5), endings, stems=draw_starters)
        if endings
        else draw_files(rng, rng.randint(3, 5), stems=draw_starters)
    )
    nouns = {name.split(".")[0].split("-")[-1] for name in files}
    return files, [stem for stem in draw_starters(rng, 8) if stem.split("-")[-1] not in nouns]


def _line(rng: random.Random) -> str:
    return " ".join(draw_starters(rng, rng.randint(2, 3)))


def _say(rng: random.Random, wordings: tuple[str, ...], **names: Any) -> str:
    return rng.choice(wordings).format(**names)


def _write(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    line, out = _line(rng), f"{spare[0]}.{rng.choice(TEXTS)}"
    return Case(
        instruction=_say(rng, WRITE, line=line, out=out),
        files=files,
        absent=(out,),
        steps=(f'echo "{line}" > {out}',),
        checks=(is_plain_file(out), holds_lines(out, [line])),
        goal=f"{out} is a plain file whose only line is `{line}`.",
        guards="A link, a second line or other words in the line fail.",
    )


def _append(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    name, line = f"{spare[0]}.{rng.choice(TEXTS)}", _line(rng)
    before = prose(rng, rng.randint(2, 4))
    return Case(
        instruction=_say(rng, APPEND, line=line, name=name),
        files=files | {name: plain(before)},
        changed=(name,),
        steps=(f'echo "{line}" >> {name}',),
        checks=(is_plain_file(name), holds_lines(name, [*before, line])),
        goal=f"{name} holds its {len(before)} old lines and then `{line}`.",
        guards="Old lines that were overwritten, or a line added at the top, fail.",
    )


def _copy(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    name = rng.choice(tuple(files))
    out = f"{spare[0]}.{name.split('.')[1]}"
    return Case(
        instruction=_say(rng, COPY, name=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"cp {name} {out}",),
        checks=(same_bytes({out: files[name]}), not_same_file(name, out)),
        goal=f"{out} is a file of its own with the bytes of {name}.",
        guards="A link is not a copy; moving the original breaks the untouched files.",
    )


def _rename(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    name = rng.choice(tuple(files))
    out = f"{spare[0]}.{name.split('.')[1]}"
    return Case(
        instruction=_say(rng, RENAME, name=name, out=out),
        files=files,
        absent=(out,),
        changed=(name,),
        steps=(f"mv {name} {out}",),
        checks=(same_bytes({out: files[name]}), is_gone(name)),
        goal=f"{out} holds the bytes of {name}, which is gone.",
        guards="A copy leaves the old name behind and fails; so does a link.",
    )


def _move(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    name, place = rng.choice(tuple(files)), spare[0]
    inside = {f"{place}/{spare[1]}.txt": plain(prose(rng, 2))}
    return Case(
        instruction=_say(rng, MOVE, name=name, place=place),
        files=files | inside,
        absent=(f"{place}/{name}",),
        changed=(name,),
        steps=(f"mv {name} {place}/",),
        checks=(same_bytes({f"{place}/{name}": files[name]}), is_gone(name)),
        goal=f"{place}/{name} holds the bytes of {name}, which is gone from the top directory.",
        guards="A copy leaves the old file behind and fails; so does a replaced directory.",
    )


def _delete(rng: random.Random) -> Case:
    files, _ = _sketch(rng)
    name = rng.choice(tuple(files))
    return Case(
        instruction=_say(rng, DELETE, name=name),
        files=files,
        changed=(name,),
        steps=(f"rm {name}",),
        checks=(is_gone(name), no_copy_left({name: files[name]})),
        goal=f"{name} does not exist.",
        guards="An emptied or renamed file is not a deleted one.",
    )


def _directory(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    place = spare[0]
    return Case(
        instruction=_say(rng, DIRECTORY, place=place),
        files=files,
        absent=(place,),
        steps=(f"mkdir {place}",),
        checks=(is_directory(place), directory_holds(place, [])),
        goal=f"{place} is an empty directory.",
        guards="A file or a link of that name fails.",
    )


def _executable(rng: random.Random) -> Case:
    files, spare = _sketch(rng)
    name = f"{spare[0]}.sh"
    script = plain(["#!/bin/bash", f'echo "{draw_phrase(rng)}"'])
    return Case(
        instruction=_say(rng, EXECUTABLE, name=name),
        files=files | {name: script},
        changed=(name,),
        steps=(f"chmod +x {name}",),
        checks=(is_executable(name), same_bytes({name: script})),
        goal=f"{name} has the same text and may be run by its owner.",
        guards="A script that was written anew fails.",
    )


def _concatenate(rng: random.Random) -> Case:
    files, spare = _sketch(rng, TEXTS)
    name, other = rng.sample(tuple(files), 2)
    out = f"{spare[0]}.txt"
    joined = FileSpec(files[name].content + files[other].content)
    return Case(
        instruction=_say(rng, CONCATENATE, name=name, other=other, out=out),
        files=files,
        absent=(out,),
        steps=(f"cat {name} {other} > {out}",),
        checks=(is_plain_file(out), holds_lines(out, joined.content.decode().splitlines())),
        goal=f"{out} holds the lines of {name} and then those of {other}.",
        guards="The other order, or one part only, fails.",
    )


OPERATIONS: dict[str, Operation] = {
    "write": _write,
    "append": _append,
    "copy": _copy,
    "rename": _rename,
    "move": _move,
    "delete": _delete,
    "directory": _directory,
    "executable": _executable,
    "concatenate": _concatenate,
}
