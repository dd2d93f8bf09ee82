"""Level 2 of `tally`: two conditions, different values, or the one that comes out on top, still from one log."""

import random
from collections import Counter

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, holds_number, is_plain_file
from tmax.synth.families.content import LogLine, draw_files, draw_levels, log
from tmax.synth.families.words import PEOPLE, SERVICES, draw_stems
from tmax.task import FileSpec

BOTH = (
    "Support claims {service} is the one failing. How many {level} lines in {log} come from {service}? Just "
    "the number in {out}, I'll paste it into the ticket.",
    "I'd like to know how bad {service} was: count its {level} lines in {log} and leave the number in {out}.",
    "Quick one before the call. Number of {level} lines that {service} wrote to {log}, into {out}. Other "
    "services don't matter right now.",
    "Trying to settle an argument here, so in {out} please the count of lines in {log} that are {level} and "
    "from {service}.",
)

DISTINCT = (
    "How many different users show up in {log}? I'd guess about five but who knows. Number into {out}.",
    "Licensing wants the number of distinct users in {log}, each counted once no matter how often they come "
    "back. Put it in {out}.",
    "I can't tell from {log} how many people really use this thing. Count the different users in there and "
    "write that to {out}.",
    "Need a head count out of {log}: number of unique users, in {out}.",
)

TOP_SERVICE = (
    "Which service is behind most of the {level} lines in {log}? Only its name in {out}, there is one clear winner.",
    "Something floods {log} with {level}. Work out which service writes the most of those lines and put its "
    "name, nothing else, into {out}.",
    "I'm going to page exactly one team about {log}: whoever has the most {level} lines. Name of that service "
    "in {out}.",
    "My hunch is the proxy but check {log} please, the service with the highest number of {level} lines goes "
    "into {out}, name only.",
)

USERS_HIT = (
    "I have to write to everyone who ran into an {level} in {log}. Put their user names into {out}, one a "
    "line, alphabetical, nobody twice.",
    "Which users had {level} lines in {log}? A sorted list without repeats in {out}, just the names, one on each line.",
    "Sales wants the list of people affected, so all users with an {level} line in {log}, alphabetical and "
    "each of them once, in {out}, one per line.",
    "Need the names of the users that {log} shows with {level}, sorted from a to z, one a line without "
    "doubles, as {out}.",
)

SLOWEST = (
    "{service} got slow, or so they say. What's the highest ms value it has in {log}? Only the number in {out}.",
    "For the latency review I need the worst time of {service} in {log}, that's the largest ms, in {out} as a "
    "bare number.",
    "Find the slowest {service} line in {log} and write its milliseconds, just the number, to {out}.",
    "Somebody promised {service} stays under a second. Put the maximum ms of its lines in {log} into {out}.",
)

LATEST_PER = (
    "For each service in {log} I want to know what its last word was: one line per service with the service "
    "and the level of its last line, space between, sorted by service, in {out}.",
    "Status page is down, so give me a poor man's one: {out} with the name of each service in {log}, a space, "
    "and the level it logged last. Sort by name.",
    "What state did every service end in? Take the last line of each one in {log} and write service and level, "
    "separated by a space, alphabetically into {out}.",
)


def _scene(
    rng: random.Random, *, services: int = 4, users: int = 6, low: int = 4, high: int = 12
) -> tuple[list[LogLine], str, str, dict[str, FileSpec]]:
    lines = log(
        rng,
        draw_levels(rng, low, high),
        services=tuple(rng.sample(SERVICES, services)),
        users=tuple(rng.sample(PEOPLE, users)),
    )
    files = draw_files(rng, rng.randint(1, 2), ("txt", "csv", "conf"))
    nouns = {name.split(".")[0].split("-")[-1] for name in files}
    spare = [stem for stem in draw_stems(rng, 4) if stem.split("-")[-1] not in nouns]
    name, out = f"{spare[0]}.log", f"{spare[1]}.txt"
    return lines, name, out, {name: plain([str(line) for line in lines]), **files}


def _both(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng, services=3)
    level, service = rng.choice([(line.level, line.service) for line in lines])
    number = sum(line.level == level and line.service == service for line in lines)
    return Case(
        instruction=rng.choice(BOTH).format(level=level, service=service, log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"grep {level} {name} | grep -c {service} > {out}",),
        checks=(holds_number(out, number),),
        goal=f"{out} holds {number}, the lines with both {level} and {service}.",
        guards="Counting by one of the two conditions gives another number.",
    )


def _distinct(rng: random.Random) -> Case:
    lines, name, out, files = _scene(rng, users=rng.randint(4, 9))
    number = len({line.user for line in lines})
    return Case(
        instruction=rng.choice(DISTINCT).format(log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"grep -o 'user=[a-z]*' {name} | sort -u | wc -l > {out}",),
        checks=(holds_number(out, number),),
        goal=f"{out} holds {number}, the number of different users.",
        guards="Counting lines instead of users gives a larger number.",
    )


def _top_service(rng: random.Random) -> Case:
    while True:
        lines, name, out, files = _scene(rng)
        level = rng.choice(("WARN", "ERROR"))
        ranks = Counter(line.service for line in lines if line.level == level).most_common(2)
        overall = Counter(line.service for line in lines).most_common(1)[0][0]
        if len(ranks) == 2 and ranks[0][1] > ranks[1][1] and ranks[0][0] != overall:
            break
    pipe = f"grep {level} {name} | awk '{{print $4}}' | sort | uniq -c | sort -rn"
    return Case(
        instruction=rng.choice(TOP_SERVICE).format(level=level, log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"{pipe} | awk 'NR == 1 {{print $2}}' > {out}",),
        checks=(is_plain_file(out), holds_lines(out, [ranks[0][0]])),
        goal=f"{out} holds {ranks[0][0]}, which has {ranks[0][1]} {level} lines.",
        guards=f"The service with the most lines of all levels is another one, {overall}.",
    )


def _users_hit(rng: random.Random) -> Case:
    while True:
        lines, name, out, files = _scene(rng)
        hit = [line.user for line in lines if line.level == "ERROR"]
        if 1 < len(set(hit)) < min(len(hit), 6):
            break
    return Case(
        instruction=rng.choice(USERS_HIT).format(level="ERROR", log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"grep ERROR {name} | grep -o 'user=[a-z]*' | cut -d= -f2 | sort -u > {out}",),
        checks=(is_plain_file(out), holds_lines(out, sorted(set(hit)))),
        goal=f"{out} lists {len(set(hit))} users in alphabetical order.",
        guards="At least one user occurs twice and at least one only in other lines.",
    )


def _slowest(rng: random.Random) -> Case:
    while True:
        lines, name, out, files = _scene(rng, services=3)
        service = rng.choice(lines).service
        times = [line.millis for line in lines if line.service == service]
        slowest = max(times)
        # Alphabetical order and the slowest of all services both have to be wrong.
        if str(slowest) != max(map(str, times)) and slowest != max(line.millis for line in lines):
            break
    return Case(
        instruction=rng.choice(SLOWEST).format(service=service, log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"grep {service} {name} | grep -o 'ms=[0-9]*' | cut -d= -f2 | sort -n | tail -n 1 > {out}",),
        checks=(holds_number(out, slowest),),
        goal=f"{out} holds {slowest}.",
        guards="Alphabetical order gives another value, and so does the whole log.",
    )


def _latest_per(rng: random.Random) -> Case:
    while True:
        lines, name, out, files = _scene(rng)
        last = {line.service: line.level for line in lines}
        first = {line.service: line.level for line in reversed(lines)}
        if first != last:
            break
    return Case(
        instruction=rng.choice(LATEST_PER).format(log=name, out=out),
        files=files,
        absent=(out,),
        steps=(f"awk '{{last[$4] = $3}} END {{for (s in last) print s, last[s]}}' {name} | sort > {out}",),
        checks=(is_plain_file(out), holds_lines(out, [f"{service} {last[service]}" for service in sorted(last)])),
        goal=f"{out} has one line for each of {len(last)} services.",
        guards="At least one service started at another level than it ended.",
    )


OPERATIONS: dict[str, Operation] = {
    "both": _both,
    "distinct": _distinct,
    "top_service": _top_service,
    "users_hit": _users_hit,
    "slowest": _slowest,
    "latest_per": _latest_per,
}
