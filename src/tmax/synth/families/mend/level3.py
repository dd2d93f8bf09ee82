"""Level 3 of `mend`: the script is right on the data that is there and wrong on data that the instruction tells of."""

import random
from collections.abc import Sequence

from tmax.synth.families.case import Case, Operation
from tmax.synth.families.content import draw_files, draw_levels, log, prose
from tmax.synth.families.mend.script import Data, Fault, Try, mended, script_case, sed_step, text
from tmax.synth.families.words import ADJECTIVES, NOUNS, SERVICES, draw_stems

LAST_LINE = (
    "run.sh adds up the amounts in {name} (item,amount) and writes the sum to {out}. With the file here it's "
    "right. When I dropped in the one that comes from the warehouse the sum was short by exactly the last row; "
    "their editor does something funny at the end of the file I think. run.sh should get both right.",
    "The total that `bash run.sh` puts into {out} is fine for this {name}, but with the same file sent through "
    "the web form (which strips white space at the end) one amount was missing. Can you make the script cope? "
    "Same file name.",
    "I can't reproduce it here: run.sh sums {name} into {out} correctly. On the other host {name} is written "
    "by a tool that doesn't end its last line, and there the last amount gets lost. Please fix run.sh for both.",
)

OCTAL = (
    "run.sh adds up the hours in {name} (task,hours, always two digits) and writes the sum to {out}. It worked "
    'all week and then today it died with "value too great for base" or so when somebody put in 08. Needs to '
    "work for any two digits.",
    "Time sheets: `bash run.sh` sums the second column of {name} into {out}. The file here is ok. With hours "
    "like 09 in it the script gives an error about some base and the sum is wrong. Hours are zero padded, that "
    "won't change. Fix run.sh.",
    "Total hours from {name} go to {out}, run.sh does that. A colleague's file has 08 and 09 among the hours "
    "and then it falls over, mine never had those. Please make it robust, the two digit format has to stay.",
)

TEXT_SORT = (
    "run.sh writes the largest number in {name} to {out}. With this file it's correct. Last month the values "
    "went from a few up to hundreds and it reported something in the nineties. Please fix run.sh so it always "
    "finds the real maximum.",
    "Peak load: `bash run.sh` should leave the highest value of {name} in {out}. For the numbers here it does, "
    "but when I fed it a file with 8, 95 and 120 in it I got 95. Mend the script, file names stay.",
    "The maximum that run.sh takes from {name} and puts into {out} isn't always the maximum. It's right as "
    "long as all numbers are equally long, I believe. Make it right for all whole numbers.",
)

SPACES = (
    "run.sh goes through the names in {name} and writes the number of lines of each of those files to {out}, "
    "one number a line. All good here. For a customer whose files have spaces in their names the output is "
    "empty or odd. The list has one name on each line. Please fix run.sh.",
    "{name} lists files, one per line, and `bash run.sh` puts their line counts into {out} in that order. It "
    'breaks as soon as a file is called something like "calm river.txt". I can\'t rename them. Could you make '
    "run.sh handle it?",
    "Line counts of the files in {name} go to {out}, in order, that's all run.sh does. It works on my machine "
    "(no spaces in names here) and fails on the designers' one. Fix the script so both work.",
)

NO_MATCH = (
    'run.sh counts the {level} lines in {name} and writes "{label}: N" to {out}. Works here. On quiet days, '
    "when there's not one {level} in the log, it writes no file at all and the dashboard goes red. I want "
    '"{label}: 0" then.',
    'The dashboard reads {out}, which run.sh makes from {name}: "{label}: N" with the number of {level} lines. '
    "Over the weekend nothing was logged at that level and there was no output whatsoever, I expected a 0. "
    "Please fix run.sh.",
    '`bash run.sh` leaves "{label}: N" in {out}, N being the {level} lines of {name}. It stops half way if N '
    'would be zero, though it took me a while to see that. Make it write "{label}: 0" in that case, otherwise '
    "as now.",
)

EXACT = (
    "run.sh looks up how often the host in {who} occurs in {name}, a host name per line, and writes the count "
    "to {out}. Since somebody set up hosts with the old name as part of theirs ({example} and the like) it "
    "counts too many. Only the very same name is meant.",
    "`bash run.sh` counts the visits of one host: its name is in {who}, the visits are in {name}, the number "
    "goes to {out}. Here it's right. On the shared box it also counts hosts such as {example}, and that's a "
    "different machine.",
    "The count in {out} is too high on some systems. run.sh takes a host name from {who} and counts its lines "
    "in {name}; hosts called {example} are counted along, which they shouldn't. Please make run.sh exact.",
)


def _case(
    rng: random.Random,
    *,
    instruction: str,
    script: Sequence[str],
    faults: Sequence[Fault],
    output: str,
    tries: Sequence[tuple[Data, list[str]]],
    guards: str,
) -> Case:
    """`script` has its faults in it; tries are the given data, the data that shows the fault, and ordinary data."""
    mended(script, faults)  # raises where the oracle would hit another place
    labels = ("given_data", "data_that_showed_the_fault", "ordinary_data")
    return script_case(
        instruction=instruction,
        lines=script,
        steps=tuple(sed_step(fault) for fault in faults),
        output=output,
        tries=[Try(label, *attempt) for label, attempt in zip(labels, tries, strict=True)],
        others=draw_files(rng, 1, ("conf",)),
        goal="; ".join(f"`{fault.wrong}` became `{fault.right}`" for fault in faults) + " in run.sh, or the like.",
        guards=guards + " The script has to stay right on the given data and on data of the same kind.",
    )


def _names(rng: random.Random, ending: str) -> tuple[str, str]:
    first, second = draw_stems(rng, 2)
    return f"{first}.{ending}", f"{second}.txt"


def _adder(name: str, out: str, read: str, term: str) -> list[str]:
    return [
        "#!/bin/bash",
        "# Adds up the second column.",
        "total=0",
        f"while IFS=, {read}; do",
        f"    total=$((total + {term}))",
        f"done < {name}",
        f'echo "$total" > {out}',
    ]


def _last_line(rng: random.Random) -> Case:
    name, out = _names(rng, "csv")

    def attempt(end: str) -> tuple[Data, list[str]]:
        rows = [(noun, rng.randint(2, 99)) for noun in rng.sample(NOUNS, rng.randint(4, 8))]
        body = "\n".join(f"{item},{amount}" for item, amount in rows)
        return {name: body + end}, [str(sum(amount for _, amount in rows))]

    fault = Fault('read -r item amount || [ -n "$item" ]', "read -r item amount")
    return _case(
        rng,
        instruction=rng.choice(LAST_LINE).format(name=name, out=out),
        script=_adder(name, out, fault.wrong, "amount"),
        faults=[fault],
        output=out,
        tries=[attempt("\n"), attempt(""), attempt("\n")],
        guards="A file whose last line has no newline is tried.",
    )


def _octal(rng: random.Random) -> Case:
    name, out = _names(rng, "csv")

    def attempt(hours: list[int]) -> tuple[Data, list[str]]:
        rng.shuffle(hours)
        items = rng.sample(NOUNS, len(hours))
        lines = [f"{item},{hour:02d}" for item, hour in zip(items, hours, strict=True)]
        return {name: text(lines)}, [str(sum(hours))]

    def harmless() -> list[int]:
        return [*rng.sample(range(1, 8), 3), *rng.sample(range(10, 40), 3)]

    fault = Fault("total + 10#$hours", "total + hours")
    return _case(
        rng,
        instruction=rng.choice(OCTAL).format(name=name, out=out),
        script=_adder(name, out, "read -r task hours", "hours"),
        faults=[fault],
        output=out,
        tries=[attempt(harmless()), attempt([*harmless(), 8, 9]), attempt(harmless())],
        guards="Hours of 08 and 09 are tried, which bash takes for octal numbers.",
    )


def _text_sort(rng: random.Random) -> Case:
    name, out = _names(rng, "txt")

    def attempt(numbers: list[int]) -> tuple[Data, list[str]]:
        rng.shuffle(numbers)
        return {name: text(list(map(str, numbers)))}, [str(max(numbers))]

    fault = Fault("sort -n", "sort")
    mixed = [rng.randint(3, 9), *rng.sample(range(20, 99), 4), *rng.sample(range(100, 200), 2)]
    return _case(
        rng,
        instruction=rng.choice(TEXT_SORT).format(name=name, out=out),
        script=["#!/bin/bash", "# Writes the largest number.", f"sort {name} | tail -n 1 > {out}"],
        faults=[fault],
        output=out,
        tries=[attempt(rng.sample(range(10, 99), 7)), attempt(mixed), attempt(rng.sample(range(100, 999), 6))],
        guards="Numbers of one, two and three digits are tried.",
    )


def _spaces(rng: random.Random) -> Case:
    name, out = _names(rng, "list")
    spare = [noun for noun in rng.sample(NOUNS, 20) if noun not in f"{name} {out}"]

    def attempt(files: list[str]) -> tuple[Data, list[str]]:
        counts = rng.sample(range(1, 9), len(files))
        data = {file: text(prose(rng, count)) for file, count in zip(files, counts, strict=True)}
        return {name: text(files), **data}, list(map(str, counts))

    def spaced() -> list[str]:
        return [f"{rng.choice(ADJECTIVES)} {noun}.txt" for noun in rng.sample(spare, 3)]

    loop = Fault("while IFS= read -r file; do", f"for file in $(cat {name}); do")
    end = Fault(f"done < {name}", "done")
    return _case(
        rng,
        instruction=rng.choice(SPACES).format(name=name, out=out),
        script=["#!/bin/bash", "# Writes the number of lines of each file.", f": > {out}", loop.wrong,
                f'    wc -l < "$file" >> {out}', end.wrong],
        faults=[loop, end],
        output=out,
        tries=[attempt([f"{noun}.txt" for noun in spare[:4]]), attempt(spaced()),
               attempt([f"{noun}.md" for noun in spare[4:7]])],
        guards="Files with spaces in their names are tried.",
    )  # fmt: skip


def _no_match(rng: random.Random) -> Case:
    name, out = _names(rng, "log")
    level, label = rng.choice((("ERROR", "errors"), ("WARN", "warnings"), ("DEBUG", "debug lines")))

    def attempt(levels: list[str]) -> tuple[Data, list[str]]:
        lines = [str(line) for line in log(rng, levels, services=tuple(rng.sample(SERVICES, 3)))]
        return {name: text(lines)}, [f"{label}: {levels.count(level)}"]

    fault = Fault(f"grep -c {level} {name} || true", f"grep -c {level} {name}")
    quiet = [other for other in draw_levels(rng) if other != level]
    return _case(
        rng,
        instruction=rng.choice(NO_MATCH).format(name=name, out=out, level=level, label=label),
        script=["#!/bin/bash", "# Counts the lines of one level.", "set -e", f"count=$({fault.wrong})",
                f'echo "{label}: $count" > {out}'],
        faults=[fault],
        output=out,
        tries=[attempt(draw_levels(rng)), attempt(quiet), attempt(draw_levels(rng))],
        guards=f"A log without any {level} is tried.",
    )  # fmt: skip


def _exact(rng: random.Random) -> Case:
    stems = draw_stems(rng, 3)
    name, out, who = f"{stems[0]}.log", f"{stems[1]}.txt", f"{stems[2]}.txt"
    host, *hosts = [noun for noun in rng.sample(NOUNS, 12) if all(noun not in stem for stem in stems)][:5]
    lookalikes = [f"{rng.choice(ADJECTIVES)}-{host}", f"{host}-{rng.choice(ADJECTIVES)}", f"{host}2"]

    def attempt(also: list[str]) -> tuple[Data, list[str]]:
        count = rng.randint(2, 6)
        lines = [host] * count + rng.choices(hosts, k=5) + also
        rng.shuffle(lines)
        return {name: text(lines), who: text([host])}, [str(count)]

    fault = Fault("grep -cxF", "grep -c")
    return _case(
        rng,
        instruction=rng.choice(EXACT).format(name=name, out=out, who=who, example=lookalikes[0]),
        script=["#!/bin/bash", "# Counts the visits of one host.", f"host=$(cat {who})",
                f'grep -c "$host" {name} > {out}'],
        faults=[fault],
        output=out,
        tries=[attempt([]), attempt(lookalikes), attempt([])],
        guards="Names that have the host's name at their start or end, with and without a hyphen, are tried.",
    )  # fmt: skip


OPERATIONS: dict[str, Operation] = {
    "last_line": _last_line,
    "octal": _octal,
    "text_sort": _text_sort,
    "spaces": _spaces,
    "no_match": _no_match,
    "exact": _exact,
}
