"""Level 2 of `mend`: two faults in one script; the instruction says what should come out, the script has to be read."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmax.synth.families.case import Case, Operation
from tmax.synth.families.content import draw_files, draw_levels, log, prose
from tmax.synth.families.mend.script import Data, Fault, Try, broken, script_case, sed_step, text
from tmax.synth.families.words import ADJECTIVES, NOUNS, PEOPLE, draw_stems

SUMMARY = (
    'run.sh boils {name} down to two lines in {out}, "errors N" and "warnings N". I cleaned it up yesterday '
    "and now it's broken, probably in more than one spot. Please get it working again; only run.sh is "
    "deployed, so the fix has to be in there.",
    "The morning summary is wrong. `bash run.sh` should count the ERROR and WARN lines of {name} and leave "
    '"errors N" and then "warnings N" in {out}. It did once, I swear. Fix the script, the log is fine.',
    'Can you look at run.sh? Out of {name} it\'s supposed to make {out} with one line "errors N" and one '
    '"warnings N" below it. I merged two branches of it by hand, might have been sloppy.',
)

COLUMN_SUM = (
    "run.sh adds up the amounts in {name} (item,amount on each line) and writes the sum to {out}. At least it "
    "should, all I get is rubbish. I retyped it from a photo, so there may be several typos. Repair run.sh "
    "please.",
    '`bash run.sh` was written to put the total of the second column of {name} into {out}. Somebody "improved" '
    "it and it no longer does. Could you fix the script? The data is right, I checked.",
    "The total in {out} is off, or not there at all. run.sh makes it from {name}, item,amount lines, by adding "
    "up the amounts. Mend run.sh, please don't touch the numbers.",
)

PAGE = (
    "run.sh builds {out}: {top} first, then {body}, with @NAME@ replaced by the name that's in {title}. The "
    "build has been off since I moved things around. Please make run.sh do that again, the parts themselves "
    "are good.",
    "Our tiny site build is broken. `bash run.sh` should glue {top} and {body} together as {out}, top first, "
    "and fill in the name from {title} for @NAME@. I suspect the last two commits to run.sh. Fix it there.",
    "Could you repair run.sh? It makes {out} out of {top} followed by {body} and puts the content of {title} "
    "where @NAME@ is. Or used to. I think more than one thing is wrong with it.",
)

LEADERS = (
    "run.sh should write the names of the three people with the most points in {name} (name,team,points) to "
    "{out}, best first. It doesn't, and I've been staring at it for too long. Can you fix run.sh? Leave {name} "
    "alone.",
    "`bash run.sh` prints the top three of {name} into {out}: names only, most points first; the columns are "
    "name,team,points. After my refactoring it's nonsense. Please fix the script.",
    "The leaderboard is broken again. From {name} (name,team,points) run.sh is meant to put three names into "
    "{out}, highest points on top. Two people edited it at once, I believe. Repair it please.",
)


@dataclass(frozen=True)
class Plan:
    """A right script, what can be wrong with it, and what it does."""

    wordings: Sequence[str]
    fields: dict[str, str]
    script: Sequence[str]
    faults: Sequence[Fault]
    output: str
    draw: Callable[[], tuple[Data, list[str]]]
    """Draws data and what the right script makes of it."""


def _case(rng: random.Random, plan: Plan) -> Case:
    faults = rng.sample(plan.faults, 2)
    tries = [Try("given_data", *plan.draw()), Try("other_data", *plan.draw())]
    while tries[0].wanted == tries[1].wanted:
        tries[1] = Try("other_data", *plan.draw())
    return script_case(
        instruction=rng.choice(plan.wordings).format(**plan.fields),
        lines=broken(plan.script, faults),
        steps=tuple(sed_step(fault) for fault in faults),
        output=plan.output,
        tries=tries,
        others=draw_files(rng, 1, ("conf",)),
        goal="; ".join(f"`{fault.wrong}` became `{fault.right}`" for fault in faults) + " in run.sh, or the like.",
        guards="The script is run on other data too; either fault alone makes its output wrong.",
    )


def _summary(rng: random.Random) -> Case:
    stems = draw_stems(rng, 3)
    name, out, other = f"{stems[0]}.log", f"{stems[1]}.txt", f"{stems[2]}.log"

    def draw() -> tuple[Data, list[str]]:
        lines = log(rng, draw_levels(rng))
        errors, warnings = (sum(line.level == level for line in lines) for level in ("ERROR", "WARN"))
        return {name: text([str(line) for line in lines])}, [f"errors {errors}", f"warnings {warnings}"]

    script = (
        "#!/bin/bash",
        "# Sums up the log: one line for errors, one for warnings.",
        f"log={name}",
        'errors=$(grep -c ERROR "$log")',
        'warnings=$(grep -c WARN "$log")',
        f'echo "errors $errors" > {out}',
        f'echo "warnings $warnings" >> {out}',
    )
    faults = (
        Fault(f"log={name}", f"log={other}"),
        Fault("-c WARN", "-c WARNING"),
        Fault(f'$warnings" >> {out}', f'$warnings" > {out}'),
        Fault('$errors"', '$error"'),
    )
    return _case(rng, Plan(SUMMARY, {"name": name, "out": out}, script, faults, out, draw))


def _column_sum(rng: random.Random) -> Case:
    stems = draw_stems(rng, 3)
    name, out, other = f"{stems[0]}.csv", f"{stems[1]}.txt", f"{stems[2]}.csv"

    def draw() -> tuple[Data, list[str]]:
        rows = [(noun, rng.randint(2, 99)) for noun in rng.sample(NOUNS, rng.randint(4, 8))]
        return {name: text([f"{item},{amount}" for item, amount in rows])}, [str(sum(amount for _, amount in rows))]

    script = (
        "#!/bin/bash",
        "# Adds up the amounts.",
        "total=0",
        "while IFS=, read -r item amount; do",
        "    total=$((total + amount))",
        f"done < {name}",
        f'echo "$total" > {out}',
    )
    faults = (
        Fault("IFS=,", "IFS=:"),
        Fault("(total + amount", "(total + amounts"),
        Fault(f"done < {name}", f"done < {other}"),
        Fault('"$total"', '"$totals"'),
    )
    return _case(rng, Plan(COLUMN_SUM, {"name": name, "out": out}, script, faults, out, draw))


def _page(rng: random.Random) -> Case:
    stems = draw_stems(rng, 5)
    top, body, title, other = (f"{stem}.txt" for stem in stems[:4])
    out = f"{stems[4]}.html"

    def draw() -> tuple[Data, list[str]]:
        name = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        head, rest = prose(rng, 2), prose(rng, 3)
        head.insert(rng.randint(0, 2), "welcome to @NAME@")
        rest.insert(rng.randint(0, 3), "written by @NAME@")
        wanted = [line.replace("@NAME@", name) for line in [*head, *rest]]
        return {top: text(head), body: text(rest), title: text([name])}, wanted

    script = (
        "#!/bin/bash",
        "# Builds the page out of its parts.",
        f"name=$(cat {title})",
        f"cat {top} {body} > {out}",
        f'sed -i "s/@NAME@/$name/" {out}',
    )
    faults = (
        Fault(f"$(cat {title}", f"$(cat {other}"),
        Fault(f"{top} {body}", f"{body} {top}"),
        Fault("@NAME@", "@TITLE@"),
        Fault("$name", "$title"),
    )
    fields = {"top": top, "body": body, "title": title, "out": out}
    return _case(rng, Plan(PAGE, fields, script, faults, out, draw))


def _leaders(rng: random.Random) -> Case:
    stems = draw_stems(rng, 3)
    name, out, other = f"{stems[0]}.csv", f"{stems[1]}.txt", f"{stems[2]}.csv"

    def draw() -> tuple[Data, list[str]]:
        people = rng.sample(PEOPLE, rng.randint(7, 10))
        points = [*rng.sample(range(2, 10), 2), *rng.sample(range(10, 300), len(people) - 2)]
        rng.shuffle(points)
        rows = [(person, rng.choice(("red", "blue")), mark) for person, mark in zip(people, points, strict=True)]
        ranked = [person for person, _, _ in sorted(rows, key=lambda row: -row[2])]
        return {name: text([",".join(map(str, row)) for row in rows])}, ranked[:3]

    script = (
        "#!/bin/bash",
        "# Writes the names of the leaders, best first.",
        "limit=3",
        f"sort -t, -k3,3 -rn {name} |",
        '    head -n "$limit" |',
        f"    cut -d, -f1 > {out}",
    )
    faults = (
        Fault("limit=3", "limits=3"),
        Fault("-k3,3 -rn", "-k3,3 -n"),
        Fault("-f1", "-f2"),
        Fault(f" {name} |", f" {other} |"),
    )
    return _case(rng, Plan(LEADERS, {"name": name, "out": out}, script, faults, out, draw))


OPERATIONS: dict[str, Operation] = {
    "summary": _summary,
    "column_sum": _column_sum,
    "page": _page,
    "leaders": _leaders,
}
