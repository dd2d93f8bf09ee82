"""Level 2 of `reshape`: filter, order and reduce one table; its columns have to be looked up in the file."""

import random
from collections import Counter

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, is_plain_file
from tmax.synth.families.content import draw_files
from tmax.synth.families.words import CITIES, NOUNS, PEOPLE, draw_stems
from tmax.task import FileSpec

FILTER_UNIQUE = (
    "We're only opening offices where somebody has more than {limit} points. From {name} give me those cities, "
    "alphabetical, every city once, one a line and no heading, as {out}.",
    "Which cities in {name} have anyone with over {limit} points? Sorted list without repeats into {out}, just "
    "the city names, one per line.",
    "I need a list of cities out of {name}, but only from rows with points above {limit}. Each city once, a to "
    "z, in {out}, one on a line.",
    "Can you boil {name} down to the distinct cities of people with more than {limit} points and save that, "
    "sorted and one per line, as {out}?",
)

RANKING = (
    "The {city} people want their leaderboard. Names only, most points first, from {name} into {out}, one a line.",
    "Take everyone in {name} who sits in {city}, order them by points with the highest on top, and put just "
    "the names into {out}, one per line.",
    "For the {city} newsletter I need the names from {name} ranked by points, best one first, in {out}. Other "
    "cities have their own list. One name a line.",
    "Who leads in {city}? From {name} make {out}, names only and one per line, going down by points.",
)

RECORDS = (
    "{name} came out of some old address book, blocks of key: value lines with blank lines in between, keys in "
    "any order. I need it as CSV in {out}: name, city and item of each, in that order, no heading, sorted by "
    "name.",
    "The importer can't read {name} (blocks of key: value). Make a CSV {out} from it with the columns "
    "name,city,item, one row for each block and no heading row, rows alphabetical by name. Mind that the keys "
    "jump around.",
    "Can you flatten {name}? Each paragraph in there is one person. I want lines like name,city,item in {out}, "
    "sorted by name, without a heading.",
)

REORDER = (
    "The other side wants {name} as tab separated values with item first and then the name, nothing else. Rows "
    "without points are drafts, leave them out. No heading please, same order as now, in {out}.",
    "Convert {name} for the label printer: item, tab, name on each line of {out}, in the order of the file and "
    "without the heading. If the points are missing the row isn't real, skip it.",
    "I need {out} with two columns from {name}, item and name in that order with a tab between. Skip the "
    "heading and every row whose points are empty, keep the order of the rest.",
)

COUNT_BY = (
    'How are we spread out? From {name} count the people in each city and write lines like "oslo 3" to {out}, '
    "the biggest city first. No two are the same size.",
    "Facilities wants head counts: one line per city in {name} with the city, a space and the number of "
    "people, largest number on top, saved as {out}.",
    "Summarise {name} by city for me, city then number of people with a space between, going down by number, in {out}.",
)


def _people(rng: random.Random, count: int, num_cities: int) -> list[tuple[str, str, str, int]]:
    """Rows of name, city, item, points; nobody and no number of points occurs twice."""
    cities = rng.sample(CITIES, num_cities)
    names, items = rng.sample(PEOPLE, count), rng.sample(NOUNS, count)
    # From one digit to three, so that alphabetical order of numbers is wrong.
    points = [*rng.sample(range(2, 10), 2), *rng.sample(range(10, 200), count - 2)]
    rng.shuffle(points)
    return [(name, rng.choice(cities), item, mark) for name, item, mark in zip(names, items, points, strict=True)]


def _scene(rng: random.Random, ending: str, out_ending: str) -> tuple[str, str, dict[str, FileSpec]]:
    others = draw_files(rng, rng.randint(1, 2))
    nouns = {known.split(".")[0].split("-")[-1] for known in others}
    spare = [stem for stem in draw_stems(rng, 4) if stem.split("-")[-1] not in nouns]
    return f"{spare[0]}.{ending}", f"{spare[1]}.{out_ending}", others


def _csv(rows: list[tuple[str, str, str, int]]) -> FileSpec:
    return plain(["name,city,item,points", *(",".join(map(str, row)) for row in rows)])


def _filter_unique(rng: random.Random) -> Case:
    while True:
        rows = _people(rng, rng.randint(10, 16), 6)
        limit = rng.randint(30, 90)
        hits = [city for _, city, _, points in rows if points > limit]
        if len(set(hits)) < min(len(hits), len({city for _, city, _, _ in rows})):
            break
    name, out, others = _scene(rng, "csv", "txt")
    return Case(
        instruction=rng.choice(FILTER_UNIQUE).format(name=name, out=out, limit=limit),
        files={name: _csv(rows), **others},
        absent=(out,),
        steps=(f"awk -F, 'NR > 1 && $4 > {limit} {{print $2}}' {name} | sort -u > {out}",),
        checks=(is_plain_file(out), holds_lines(out, sorted(set(hits)))),
        goal=f"{out} lists {len(set(hits))} cities in alphabetical order.",
        guards="Some city has no such row and some city has several.",
    )


def _ranking(rng: random.Random) -> Case:
    while True:
        rows = _people(rng, rng.randint(10, 16), 3)
        city = rng.choice(rows)[1]
        here = [row for row in rows if row[1] == city]
        wanted = [row[0] for row in sorted(here, key=lambda row: -row[3])]
        textual = [row[0] for row in sorted(here, key=lambda row: str(row[3]), reverse=True)]
        if len(wanted) >= 3 and wanted != textual:
            break
    name, out, others = _scene(rng, "csv", "txt")
    return Case(
        instruction=rng.choice(RANKING).format(name=name, out=out, city=city),
        files={name: _csv(rows), **others},
        absent=(out,),
        steps=(f"grep ,{city}, {name} | sort -t, -k4,4nr | cut -d, -f1 > {out}",),
        checks=(is_plain_file(out), holds_lines(out, wanted)),
        goal=f"{out} ranks {len(wanted)} names.",
        guards="Points have one to three digits, so alphabetical order of them is wrong.",
    )


def _records(rng: random.Random) -> Case:
    rows = _people(rng, rng.randint(5, 8), 4)
    while rows == sorted(rows):
        rng.shuffle(rows)
    lines: list[str] = []
    for name, city, item, _ in rows:
        block = [f"name: {name}", f"city: {city}", f"item: {item}"]
        rng.shuffle(block)
        lines += [*block, ""]
    name, out, others = _scene(rng, "txt", "csv")
    script = '/^name:/ {n = $2} /^city:/ {c = $2} /^item:/ {i = $2} /^$/ {print n "," c "," i}'
    return Case(
        instruction=rng.choice(RECORDS).format(name=name, out=out),
        files={name: plain(lines), **others},
        absent=(out,),
        steps=(f"awk '{script}' {name} | sort > {out}",),
        checks=(is_plain_file(out), holds_lines(out, sorted(",".join(row[:3]) for row in rows))),
        goal=f"{out} has {len(rows)} rows of name, city and item, sorted by name.",
        guards="The keys come in another order in each block, so cutting by line number mixes the columns.",
    )


def _reorder(rng: random.Random) -> Case:
    rows = _people(rng, rng.randint(8, 12), 4)
    drafts = set(rng.sample(range(len(rows)), rng.randint(2, 3)))
    lines = [",".join([*row[:3], "" if position in drafts else str(row[3])]) for position, row in enumerate(rows)]
    wanted = [f"{row[2]}\t{row[0]}" for position, row in enumerate(rows) if position not in drafts]
    name, out, others = _scene(rng, "csv", "tsv")
    return Case(
        instruction=rng.choice(REORDER).format(name=name, out=out),
        files={name: plain(["name,city,item,points", *lines]), **others},
        absent=(out,),
        steps=(f'awk -F, \'NR > 1 && $4 != "" {{print $3 "\\t" $1}}\' {name} > {out}',),
        checks=(is_plain_file(out), holds_lines(out, wanted)),
        goal=f"{out} has {len(wanted)} rows of item, tab and name.",
        guards=f"{len(drafts)} rows without points are in the table and have to be left out.",
    )


def _count_by(rng: random.Random) -> Case:
    while True:
        rows = _people(rng, rng.randint(12, 20), 4)
        counts = Counter(row[1] for row in rows)
        if len(set(counts.values())) == len(counts) >= 3:
            break
    name, out, others = _scene(rng, "csv", "txt")
    return Case(
        instruction=rng.choice(COUNT_BY).format(name=name, out=out),
        files={name: _csv(rows), **others},
        absent=(out,),
        steps=(f"tail -n +2 {name} | cut -d, -f2 | sort | uniq -c | sort -rn | awk '{{print $2, $1}}' > {out}",),
        checks=(is_plain_file(out), holds_lines(out, [f"{city} {count}" for city, count in counts.most_common()])),
        goal=f"{out} has {len(counts)} cities with their counts, largest first.",
        guards="The heading is not a person, and the order is by number, not by name.",
    )


OPERATIONS: dict[str, Operation] = {
    "filter_unique": _filter_unique,
    "ranking": _ranking,
    "records": _records,
    "reorder": _reorder,
    "count_by": _count_by,
}
