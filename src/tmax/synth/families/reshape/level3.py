"""Level 3 of `reshape`: two files that do not quite fit together become one result in a given form."""

import random

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, is_plain_file
from tmax.synth.families.content import draw_files
from tmax.synth.families.words import CITIES, NOUNS, PEOPLE, draw_stems
from tmax.task import FileSpec

JOIN_TOTALS = (
    "{first} has our orders and {second} says in which city each customer lives, different tools so different "
    'formats. I need the order amounts added up per city: lines like "oslo,120" in {out}, largest total first, '
    'no heading. A few customers aren\'t in {second}, put those under "unknown".',
    "Regional numbers are due. Join {first} with {second}, sum the amounts by city and write city,total to "
    "{out}, going down by total and without a heading. Orders of customers nobody has an address for count as "
    '"unknown".',
    "Can you tell me what each city spent? Amounts are in {first}, who lives where is in {second}. Put "
    "city,total lines into {out}, biggest first, no heading line. Whoever is missing from {second} goes into a "
    'city called "unknown".',
)

ABSENTEES = (
    "{first} is everyone who signed up, {second} is what people typed at the door, so capitals are all over "
    "the place. Who didn't show? Names as spelled in {first}, alphabetical, one a line, into {out}.",
    "I have to chase the no-shows: those in {first} whose name isn't on {second}. The second list was typed by "
    "hand, don't rely on upper and lower case. Sorted names as in {first}, one per line, in {out}.",
    "Compare the sign-ups in {first} with the visitors in {second} (somebody had caps lock on for half of it) "
    "and list who is missing at the door in {out}, spelled like in {first}, from a to z, one on each line.",
)

OVERLAY = (
    "We're merging our two config files. Whatever {second} sets wins over {first}, keys that are only in one "
    "of them stay. Write key=value lines sorted by key to {out}, without the comments and blank lines.",
    "{first} has the defaults and {second} overrides some of them. I want what's really in effect as {out}: "
    "key=value, one for each key, alphabetical, comments and empty lines dropped.",
    "Which settings does the service end up with? It reads {first} and then {second} on top, I believe, so the "
    "latter has the last word. Put the effective key=value lines in {out}, sorted by key, nothing else in "
    "there.",
)

PIVOT = (
    "{first} is one long list of readings (sensor id, day, value), {second} has the name behind each id. Make "
    'a table of it in {out}: comma separated, heading "name,mon,tue,wed", a row for every sensor by its name '
    "in alphabetical order, and a - where a reading is missing.",
    "I can't read {first} like this. Could you pivot it into {out} with one row per sensor and the columns "
    "name,mon,tue,wed (that line on top as well)? Names for the ids are in {second}, sort the rows by name, "
    "gaps get a -. Commas between the columns.",
    "The plant manager wants a wide CSV in {out}, starting with the line name,mon,tue,wed and then each sensor "
    "in {second}, by name from a to z, with its values out of {first}. Not every sensor reported every day, so "
    "put a - in the holes.",
)

DAYS = ("mon", "tue", "wed")


def _scene(rng: random.Random, endings: tuple[str, str, str]) -> tuple[str, str, str, dict[str, FileSpec]]:
    """Names of the two inputs and the output, and one more file."""
    others = draw_files(rng, 1, ("txt", "md"))
    nouns = {known.split(".")[0].split("-")[-1] for known in others}
    spare = [stem for stem in draw_stems(rng, 5) if stem.split("-")[-1] not in nouns]
    first, second, out = (f"{stem}.{ending}" for stem, ending in zip(spare, endings, strict=False))
    return first, second, out, others


def _join_totals(rng: random.Random) -> Case:
    while True:
        people = rng.sample(PEOPLE, 10)
        homes = dict(zip(people[:8], rng.choices(rng.sample(CITIES, 4), k=8), strict=True))
        orders = [(rng.choice(people), rng.randint(5, 180)) for _ in range(rng.randint(18, 26))]
        totals: dict[str, int] = {}
        for person, amount in orders:
            city = homes.get(person, "unknown")
            totals[city] = totals.get(city, 0) + amount
        if len(set(totals.values())) == len(totals) and "unknown" in totals and len(totals) >= 4:
            break
    first, second, out, others = _scene(rng, ("csv", "tsv", "csv"))
    rows = [f"{number},{person},{amount}" for number, (person, amount) in enumerate(orders, rng.randint(100, 800))]
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    script = (
        'NR == FNR {home[$1] = $2; next} FNR > 1 {c = ($2 in home) ? home[$2] : "unknown"; sum[c] += $3} '
        'END {for (c in sum) print c "," sum[c]}'
    )
    return Case(
        instruction=rng.choice(JOIN_TOTALS).format(first=first, second=second, out=out),
        files={
            first: plain(["order,customer,amount", *rows]),
            second: plain([f"{person}\t{city}" for person, city in homes.items()]),
            **others,
        },
        absent=(out,),
        steps=(f"awk '{script}' FS='\\t' {second} FS=, {first} | sort -t, -k2,2nr > {out}",),
        checks=(is_plain_file(out), holds_lines(out, [f"{city},{total}" for city, total in ranked])),
        goal=f"{out} has {len(totals)} lines of city and total, largest first.",
        guards="An inner join loses the unknown customers, and the heading is not an order.",
    )


def _absentees(rng: random.Random) -> Case:
    people = rng.sample(PEOPLE, rng.randint(10, 14))
    missing = sorted(rng.sample(people, rng.randint(3, 5)))
    typed = [rng.choice((str.lower, str.title, str.upper))(person) for person in people if person not in missing]
    # At least one spelling that differs, and one visitor who never signed up.
    typed[0] = typed[0].upper()
    typed.append(rng.choice([person for person in PEOPLE if person not in people]).title())
    rng.shuffle(typed)
    first, second, out, others = _scene(rng, ("csv", "txt", "txt"))
    rows = [f"{person},{rng.choice(CITIES)}" for person in people]
    return Case(
        instruction=rng.choice(ABSENTEES).format(first=first, second=second, out=out),
        files={first: plain(["name,city", *rows]), second: plain(typed), **others},
        absent=(out,),
        steps=(f"tail -n +2 {first} | cut -d, -f1 | grep -vixFf {second} | sort > {out}",),
        checks=(is_plain_file(out), holds_lines(out, missing)),
        goal=f"{out} lists {len(missing)} names in alphabetical order.",
        guards="Comparing with case counts visitors in capitals as missing; the heading is not a name.",
    )


def _overlay(rng: random.Random) -> Case:
    words = rng.sample(NOUNS, 30)
    keys, values = words[:10], words[10:]
    defaults = dict(zip(keys[:8], values[:8], strict=True))
    overrides = dict(zip(keys[5:], values[8:13], strict=True))
    first, second, out, others = _scene(rng, ("conf", "conf", "conf"))
    base = [f"{key}={value}" for key, value in defaults.items()]
    over = [f"{key}={value}" for key, value in overrides.items()]
    rng.shuffle(base)
    rng.shuffle(over)
    base.insert(rng.randint(1, 4), "")
    base.insert(0, f"# defaults for {values[13]}")
    # A comment that looks like a setting.
    over.insert(rng.randint(0, 3), f"# {keys[0]}={values[14]}")
    wanted = [f"{key}={value}" for key, value in sorted((defaults | overrides).items())]
    return Case(
        instruction=rng.choice(OVERLAY).format(first=first, second=second, out=out),
        files={first: plain(base), second: plain(over), **others},
        absent=(out,),
        steps=(f"cat {second} {first} | grep -v '^#' | grep . | awk -F= '!seen[$1]++' | sort > {out}",),
        checks=(is_plain_file(out), holds_lines(out, wanted)),
        goal=f"{out} has {len(wanted)} settings sorted by key; {second} wins.",
        guards="A setting that is commented out does not count; a plain concatenation holds keys twice.",
    )


def _pivot(rng: random.Random) -> Case:
    count = rng.randint(4, 6)
    names = dict(zip(rng.sample(range(11, 99), count), rng.sample(NOUNS, count), strict=True))
    readings = {(sensor, day): rng.randint(10, 99) for sensor in names for day in DAYS}
    for hole in rng.sample(sorted(readings), rng.randint(2, 3)):
        del readings[hole]
    rows = [f"{sensor},{day},{value}" for (sensor, day), value in readings.items()]
    rng.shuffle(rows)
    first, second, out, others = _scene(rng, ("csv", "conf", "csv"))
    wanted = [
        ",".join([name, *(str(readings.get((sensor, day), "-")) for day in DAYS)])
        for sensor, name in sorted(names.items(), key=lambda item: item[1])
    ]
    script = (
        "NR == FNR {name[$1] = $2; next} {seen[$1, $2] = $3} END {for (s in name) {row = name[s]; "
        'n = split("mon tue wed", day, " "); for (d = 1; d <= n; d++) '
        'row = row "," ((s, day[d]) in seen ? seen[s, day[d]] : "-"); print row}}'
    )
    return Case(
        instruction=rng.choice(PIVOT).format(first=first, second=second, out=out),
        files={first: plain(rows), second: plain([f"{sensor}={name}" for sensor, name in names.items()]), **others},
        absent=(out,),
        steps=(
            f"echo name,mon,tue,wed > {out}",
            f"awk '{script}' FS== {second} FS=, {first} | sort >> {out}",
        ),
        checks=(is_plain_file(out), holds_lines(out, ["name,mon,tue,wed", *wanted])),
        goal=f"{out} has the heading and {count} rows in order of name.",
        guards="Rows without a value for every day need the dash, so nothing may shift to the left.",
    )


OPERATIONS: dict[str, Operation] = {
    "join_totals": _join_totals,
    "absentees": _absentees,
    "overlay": _overlay,
    "pivot": _pivot,
}
