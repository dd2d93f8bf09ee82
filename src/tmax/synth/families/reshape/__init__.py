"""`reshape`: records go from one form to another; one file at levels 1 and 2, several at level 3."""

from tmax.synth.families.case import make_family
from tmax.synth.families.reshape import level1, level2, level3

RESHAPE = make_family(
    name="reshape",
    domain="data_processing",
    summary="Turn tables and records into another form.",
    levels={1: level1.OPERATIONS, 2: level2.OPERATIONS, 3: level3.OPERATIONS},
)
