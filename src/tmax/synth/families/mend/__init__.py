"""`mend`: a script that is broken; the tests run it on data of their own, so its output cannot be written by hand."""

from tmax.synth.families.case import make_family
from tmax.synth.families.mend import level1, level2, level3

MEND = make_family(
    name="mend",
    domain="debugging",
    summary="Repair a bash script.",
    levels={1: level1.OPERATIONS, 2: level2.OPERATIONS, 3: level3.OPERATIONS},
)
