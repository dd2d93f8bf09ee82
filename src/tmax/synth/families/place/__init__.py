"""`place`: files are made, moved, joined and removed; level 1 is the starter for a policy that knows nothing."""

from tmax.synth.families.case import make_family
from tmax.synth.families.place import level1, level2, level3

PLACE = make_family(
    name="place",
    domain="file_operations",
    summary="Make, move, join and remove files.",
    levels={1: level1.OPERATIONS, 2: level2.OPERATIONS, 3: level3.OPERATIONS},
)
