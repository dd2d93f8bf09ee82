"""What small files hold: prose, logs, tables and settings; every byte comes from `rng`.

The rule: log lines are in order of time, and no level, service or user name occurs in a message or inside another
name, so that every sensible way to count gives the same number.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tmax.synth.families.case import plain
from tmax.synth.families.words import (
    CITIES,
    LOG_LEVELS,
    MESSAGES,
    NOUNS,
    PEOPLE,
    SERVICES,
    draw_phrase,
    draw_stems,
)
from tmax.task import FileSpec

StemDraw = Callable[[random.Random, int], list[str]]

ENDINGS: tuple[str, ...] = ("txt", "md", "csv", "log", "conf")
"""Endings that `file_for` knows."""


@dataclass(frozen=True)
class LogLine:
    """One line of a service's log; `str` gives the line."""

    time: datetime
    level: str
    service: str
    user: str
    millis: int
    message: str

    def __str__(self) -> str:
        return (
            f"{self.time:%Y-%m-%d %H:%M:%S} {self.level} {self.service} "
            f"user={self.user} ms={self.millis} {self.message}"
        )


def prose(rng: random.Random, count: int) -> list[str]:
    """`count` different lines of two to four words."""
    lines: list[str] = []
    while len(lines) < count:
        line = draw_phrase(rng)
        if line not in lines:
            lines.append(line)
    return lines


def table(rng: random.Random, count: int) -> list[tuple[str, str, str, int]]:
    """`count` rows of name, city, item and points; no name, item or number of points comes twice."""
    return [
        (name, rng.choice(CITIES), item, points)
        for name, item, points in zip(
            rng.sample(PEOPLE, count), rng.sample(NOUNS, count), rng.sample(range(11, 99), count), strict=True
        )
    ]


def settings(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` pairs of key and value, both single words; no key and no value comes twice."""
    words = rng.sample(NOUNS, 2 * count)
    return list(zip(words[:count], words[count:], strict=True))


def log(
    rng: random.Random,
    levels: list[str],
    *,
    services: tuple[str, ...] | None = None,
    users: tuple[str, ...] | None = None,
) -> list[LogLine]:
    """One line for each entry of `levels`, in that order, some seconds to some minutes apart."""
    services = services or tuple(rng.sample(SERVICES, 3))
    users = users or tuple(rng.sample(PEOPLE, 4))
    time = datetime(2025, rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 20), rng.randint(0, 59))
    lines = []
    for level in levels:
        time += timedelta(seconds=rng.randint(2, 600))
        line = LogLine(time, level, rng.choice(services), rng.choice(users), rng.randint(3, 900), rng.choice(MESSAGES))
        lines.append(line)
    return lines


def draw_levels(rng: random.Random, low: int = 2, high: int = 9) -> list[str]:
    """Levels for a log, mixed; each level occurs `low` to `high` times, no two equally often."""
    counts = rng.sample(range(low, high + 1), len(LOG_LEVELS))
    levels = [level for level, count in zip(LOG_LEVELS, counts, strict=True) for _ in range(count)]
    rng.shuffle(levels)
    return levels


def file_for(rng: random.Random, ending: str) -> FileSpec:
    """A small file whose content suits its ending. Raises KeyError for one that is not in ENDINGS."""
    count = rng.randint(2, 5)
    if ending == "csv":
        return plain([",".join(map(str, row)) for row in table(rng, count)])
    if ending == "conf":
        return plain([f"{key}={value}" for key, value in settings(rng, count)])
    if ending == "log":
        return plain([str(line) for line in log(rng, [rng.choice(LOG_LEVELS) for _ in range(count)])])
    if ending in ("txt", "md"):
        return plain(prose(rng, count))
    raise KeyError(ending)


def draw_files(
    rng: random.Random, count: int, endings: tuple[str, ...] = ENDINGS, *, stems: StemDraw = draw_stems
) -> dict[str, FileSpec]:
    """`count` small files with different stems and different content."""
    files: dict[str, FileSpec] = {}
    for stem in stems(rng, count):
        ending = rng.choice(endings)
        file = file_for(rng, ending)
        while any(file.content == other.content for other in files.values()):
            file = file_for(rng, ending)
        files[f"{stem}.{ending}"] = file
    return files
