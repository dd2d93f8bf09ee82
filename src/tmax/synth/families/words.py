"""Word lists and draws from them; no entry occurs inside another, so that `grep` and `sed` hit one thing only."""

import random
from collections.abc import Sequence

_NOUNS = """\
acorn anchor apple badge bagel bamboo banjo barrel basket beacon bench berry blanket bottle branch breeze brick
bridge brook broom bucket button cabin cactus camel candle canvas canyon carpet carrot castle cedar cellar cherry
chimney cider circle clover coast cobalt comet copper coral cotton crane crayon cricket crystal curtain daisy desert
dolphin donkey dragon drum eagle ember engine fabric falcon feather fence fern ferry fiddle flute forest fossil
fountain garden garlic geyser ginger glacier glove goblet granite grape gravel guitar hammer hammock harbor hazel
helmet heron hollow honey horizon igloo island ivory jacket jaguar jasmine jewel jungle kettle kitten koala ladder
lagoon lantern lemon lilac lizard lobster lotus magnet mango maple marble meadow melon meteor mirror mitten
monsoon mosaic mountain muffin napkin nectar needle nickel nutmeg oasis oboe ocean olive onion orbit orchid otter
oyster paddle palace panda parrot pasture peach pebble pelican pencil pepper piano pigeon pillow planet plum pocket
pony poppy prairie pretzel prism pudding puffin pumpkin puzzle quarry quartz quilt rabbit raccoon radish raven
ribbon river robin rocket saddle salmon sandal sapphire saturn shovel silver sparrow spider squash stone summit
sunset swan tartan teapot temple thimble thistle thunder tiger timber tomato trumpet tulip tundra turnip turtle
tunnel umbrella valley velvet violin vulture waffle wagon walnut walrus whistle willow window winter yogurt zebra
zipper
"""

_ADJECTIVES = """\
able amber ancient azure bitter bold brave bright brisk calm clever cloudy cool crisp curious damp deep dusty eager
fancy fast fierce frosty gentle glad golden grand green grey happy heavy hidden humble icy jolly keen kind late
lively lucky mellow mild misty modest muddy noble pale plain polite proud quick quiet rapid rough round rusty sandy
shiny silent simple sleepy slow small smooth snowy soft solid sour steady sunny sweet swift tidy tiny vast warm wild
wise young
"""

_PEOPLE = """\
alice bertil carla dmitri elena felix greta hamid ingrid jorge kenji leila marek nadia omar paula quentin rosa
stefan tamara ulrich vera wanda xavier yusuf zofia
"""

_CITIES = """\
athens bergen cairo dublin essen florence geneva hanoi istanbul jakarta kyoto lisbon madrid nairobi oslo porto quito
riga seville tallinn utrecht vienna warsaw zagreb
"""

_SERVICES = "billing gateway inventory ledger mailer notifier proxy scheduler search shipping uploader webhook"

NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
PEOPLE: tuple[str, ...] = tuple(_PEOPLE.split())
CITIES: tuple[str, ...] = tuple(_CITIES.split())
SERVICES: tuple[str, ...] = tuple(_SERVICES.split())

STARTERS: tuple[str, ...] = NOUNS[::6]
"""The few nouns that level 1 names its files with: a small policy has to copy names before it can do anything else."""

LOG_LEVELS: tuple[str, ...] = ("DEBUG", "INFO", "WARN", "ERROR")

MESSAGES: tuple[str, ...] = (
    "cache refreshed",
    "config reloaded",
    "connection reset",
    "disk almost full",
    "job completed",
    "lock released",
    "queue grew long",
    "reply came late",
    "request served",
    "retry planned",
    "session closed",
    "token renewed",
)


def draw_stems(rng: random.Random, count: int) -> list[str]:
    """`count` file names without an ending: a noun, or an adjective and a noun; no noun comes twice."""
    return [f"{rng.choice(ADJECTIVES)}-{noun}" if rng.random() < 0.5 else noun for noun in rng.sample(NOUNS, count)]


def draw_starters(rng: random.Random, count: int) -> list[str]:
    """`count` different file names without an ending for a task of level 1: single nouns of STARTERS."""
    return rng.sample(STARTERS, count)


def draw_phrase(rng: random.Random, low: int = 2, high: int = 4) -> str:
    """Between `low` and `high` different words, separated by one space: adjectives first, a noun last."""
    count = rng.randint(low, high)
    return " ".join([*rng.sample(ADJECTIVES, count - 1), rng.choice(NOUNS)])


def listed(names: Sequence[str]) -> str:
    """The names as prose: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
