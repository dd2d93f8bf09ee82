"""The procedural families, by name: code that makes any number of proven tasks with no model."""

from tmax.synth.families.family import Family
from tmax.synth.families.mend import MEND
from tmax.synth.families.place import PLACE
from tmax.synth.families.reshape import RESHAPE
from tmax.synth.families.tally import TALLY

FAMILIES: dict[str, Family] = {
    "place": PLACE,
    "tally": TALLY,
    "reshape": RESHAPE,
    "mend": MEND,
}

__all__ = ["FAMILIES", "Family"]
