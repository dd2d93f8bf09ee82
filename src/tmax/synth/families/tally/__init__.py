"""`tally`: questions that the records answer; logs at levels 1 and 2, rotated logs and SQLite databases at level 3."""

from tmax.synth.families.case import make_family
from tmax.synth.families.tally import level1, level2, level3

TALLY = make_family(
    name="tally",
    domain="data_querying",
    summary="Answer a question from logs or a database.",
    levels={1: level1.OPERATIONS, 2: level2.OPERATIONS, 3: level3.OPERATIONS},
)
