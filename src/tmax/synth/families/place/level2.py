"""Level 2 of `place`: two or three operations that depend on one another."""

import random

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import (
    directory_holds,
    holds_lines,
    is_executable,
    is_gone,
    is_plain_file,
    same_bytes,
)
from tmax.synth.families.content import draw_files, prose, settings
from tmax.synth.families.words import draw_phrase, draw_stems, listed
from tmax.task import FileSpec

ARCHIVE = (
    "This directory is getting crowded. {names} are done with, so give them a new directory {place}/ and move "
    "them in there under the names they have.",
    "I'm handing over on Friday and nobody reads {names} any more. Make a directory called {place} and put "
    "them into it, off the top level.",
    "Can you clear {names} out of here? I'd like them in {place}/, which doesn't exist yet afaik.",
    "Our sync job only skips {place}/, and that's where {names} were supposed to live. Create it and move them over.",
)

STITCH = (
    "{first} and {second} used to be one file, I split them for a review and never put them back. Join them "
    "again in that order as {out}, the two parts can go afterwards.",
    "The uploader takes one file only. Make {out} out of {first} followed by {second} and drop the two pieces.",
    "I want to be rid of {first} and {second}: merge them into {out}, first one on top, and don't leave the originals.",
    "Can you fold {first} and then {second} into a single {out}? After that I don't need the parts here.",
)

SWAP = (
    "I think I saved these two the wrong way round: what's in {first} belongs in {second} and the other way "
    "about. Swap them.",
    "{first} and {second} have each other's content, my fault, late night. Exchange them, names stay the same.",
    "Could you swap {first} with {second}? Both were exported at once and ended up under the wrong name.",
    "The reviewer says {first} is really {second} and {second} is really {first}. Looks right to me, so swap them.",
)

PUBLISH = (
    "{name} works on my laptop, now the others want it. Put a copy into a new directory {place}/ that people "
    "can run directly; leave mine here as it is, not executable.",
    "I need {name} published: a runnable copy in {place}/ (make that directory), same file name. The draft "
    "here stays untouched, I keep editing it.",
    "Operations picks up whatever is executable in {place}/. Create that directory and drop an executable copy "
    "of {name} in it, without changing the original.",
    "Can you set up {place}/ with a copy of {name} that has its run bit set? Don't touch the one in here, the "
    "linter moans about executable drafts.",
)

PREPEND = (
    'I forgot the heading in {name}. Keep the current version as {out} and then put "{line}" on top of {name}, '
    "everything else below it as before.",
    'The parser wants "{line}" as the very first line of {name}. Save the old file as {out} before you add it, '
    "I don't trust the parser.",
    '{name} needs a first line that says "{line}", above what is there now. I might want to go back, so leave '
    "the unchanged file next to it as {out}.",
    'Can you insert "{line}" at the top of {name}? Copy the file to {out} first, somebody will ask for it.',
)

SETTING = (
    "We're moving away from {old}: in {name} the key {key} has to say {new} instead. Keep the file as it was "
    "under {out} in case I have to roll back.",
    "Please switch {key} in {name} from {old} to {new}, only that one. A backup named {out} with the old "
    "content would calm my nerves.",
    "{key} in {name} still points to {old}, I'm fairly sure it wants {new} now. Copy the file to {out}, then "
    "change it.",
    "Change of plan, {key} becomes {new} in {name} (it's {old} right now). Put the previous version into {out} first.",
)


def _archive(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(4, 6))
    moved = rng.sample(tuple(files), rng.randint(2, 3))
    place = _spare(rng, files)[0]
    return Case(
        instruction=rng.choice(ARCHIVE).format(names=listed(moved), place=place),
        files=files,
        absent=(place,),
        changed=tuple(moved),
        steps=(f"mkdir {place}", f"mv {' '.join(moved)} {place}/"),
        checks=(same_bytes({f"{place}/{name}": files[name] for name in moved}), is_gone(*moved),
                directory_holds(place, moved)),
        goal=f"{place}/ holds {listed(moved)} and nothing else; they are gone from the top directory.",
        guards="Copies leave the old names behind; other files in the new directory fail.",
    )  # fmt: skip


def _stitch(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(3, 5), ("txt", "md"))
    first, second = rng.sample(tuple(files), 2)
    out = f"{_spare(rng, files)[0]}.txt"
    lines = (files[first].content + files[second].content).decode().splitlines()
    return Case(
        instruction=rng.choice(STITCH).format(first=first, second=second, out=out),
        files=files,
        absent=(out,),
        changed=(first, second),
        steps=(f"cat {first} {second} > {out}", f"rm {first} {second}"),
        checks=(is_plain_file(out), holds_lines(out, lines), is_gone(first, second)),
        goal=f"{out} holds the lines of {first} and then of {second}; the two are gone.",
        guards="The other order fails, and so does a part that is still there.",
    )


def _swap(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(3, 5), (rng.choice(("txt", "csv", "conf")),))
    first, second = rng.sample(tuple(files), 2)
    aside = f"{first}.aside"
    return Case(
        instruction=rng.choice(SWAP).format(first=first, second=second),
        files=files,
        changed=(first, second),
        steps=(f"mv {first} {aside}", f"mv {second} {first}", f"mv {aside} {second}"),
        checks=(is_plain_file(first, second), same_bytes({first: files[second]}, "first"),
                same_bytes({second: files[first]}, "second")),
        goal=f"{first} holds what {second} held, and the other way round.",
        guards="Both contents are compared, so one that overwrote the other fails.",
    )  # fmt: skip


def _publish(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(2, 4))
    spare = _spare(rng, files)
    name, place = f"{spare[0]}.sh", spare[1]
    script = plain(["#!/bin/bash", f'echo "{draw_phrase(rng)}"', "date +%F"])
    return Case(
        instruction=rng.choice(PUBLISH).format(name=name, place=place),
        files=files | {name: script},
        absent=(place,),
        steps=(f"mkdir {place}", f"cp {name} {place}/", f"chmod +x {place}/{name}"),
        checks=(same_bytes({f"{place}/{name}": script}), is_executable(f"{place}/{name}"), _not_executable(name)),
        goal=f"{place}/{name} has the text of {name} and may be run; {name} may not.",
        guards="Making the original executable, moving it or linking to it fails.",
    )


def _prepend(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(2, 4))
    spare = _spare(rng, files)
    name, out, line = f"{spare[0]}.md", f"{spare[1]}.md", draw_phrase(rng)
    before = prose(rng, rng.randint(3, 5))
    return Case(
        instruction=rng.choice(PREPEND).format(name=name, out=out, line=line),
        files=files | {name: plain(before)},
        absent=(out,),
        changed=(name,),
        steps=(f"cp {name} {out}", f'{{ echo "{line}"; cat {out}; }} > {name}'),
        checks=(same_bytes({out: plain(before)}, "backup"), is_plain_file(name), holds_lines(name, [line, *before])),
        goal=f"{name} starts with `{line}`, then its {len(before)} old lines; {out} holds the old file.",
        guards="A backup taken after the change differs from the old bytes and fails.",
    )


def _setting(rng: random.Random) -> Case:
    files = draw_files(rng, rng.randint(2, 4))
    spare = _spare(rng, files)
    name, out = f"{spare[0]}.conf", f"{spare[1]}.conf"
    pairs = settings(rng, rng.randint(4, 6))
    key, old = rng.choice(pairs)
    new = f"{old}-{rng.choice(('east', 'west', 'north', 'south'))}"
    # A second key with the old value, so that replacing the word everywhere is wrong.
    pairs.insert(rng.randint(0, len(pairs)), (f"{key}_fallback", old))
    lines = [f"{known}={value}" for known, value in pairs]
    changed = [f"{known}={new if known == key else value}" for known, value in pairs]
    return Case(
        instruction=rng.choice(SETTING).format(name=name, out=out, key=key, old=old, new=new),
        files=files | {name: plain(lines)},
        absent=(out,),
        changed=(name,),
        steps=(f"cp {name} {out}", f"sed -i 's/^{key}=.*/{key}={new}/' {name}"),
        checks=(same_bytes({out: plain(lines)}, "backup"), is_plain_file(name), holds_lines(name, changed)),
        goal=f"{key} is {new} in {name}, every other line is as before, and {out} holds the old file.",
        guards=f"Replacing {old} everywhere changes {key}_fallback too and fails; so does a backup of the new file.",
    )


def _not_executable(name: str) -> str:
    return f"""
def test_original_is_still_not_executable():
    assert not os.stat({name!r}).st_mode & 0o111
"""


def _spare(rng: random.Random, files: dict[str, FileSpec]) -> list[str]:
    nouns = {name.split(".")[0].split("-")[-1] for name in files}
    return [stem for stem in draw_stems(rng, 9) if stem.split("-")[-1] not in nouns]


OPERATIONS: dict[str, Operation] = {
    "archive": _archive,
    "stitch": _stitch,
    "swap": _swap,
    "publish": _publish,
    "prepend": _prepend,
    "setting": _setting,
}
