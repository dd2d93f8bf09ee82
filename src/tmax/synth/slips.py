"""How a demonstrator who does not check goes wrong: a command becomes one of the same make that does another thing.

The rule: a slip can be told from the right command by nothing but its effect, so only a test finds it.
"""

import random
import re
from collections.abc import Sequence

_SLIPS: tuple[tuple[str, str], ...] = (
    (r"^sed -i ", "sed "),
    (r"^mkdir ", "touch "),
    (r"^chmod \+x ", "chmod -x "),
    (r"^rm ", "ls "),
    (r"^mv ", "cp "),
    (r"^cp ", "mv "),
    (r"^cat (\S+) (\S+) >", r"cat \2 \1 >"),
    (r"^(echo .*) >> ", r"\1 > "),
    (r"^echo (.*) > ", r"echo -n > "),
    (r"^grep -vc ", "grep -c "),
    (r"^grep -c ", "grep "),
    (r"\| head -n 1 ", "| tail -n 1 "),
    (r"\| tail -n 1 ", "| head -n 1 "),
    (r"^grep ", "grep -c "),
    (r"^wc -l ", "wc -c "),
    (r"^sort -u ", "sort "),
    (r"^sort ", "sort -r "),
    (r"^tac ", "cat "),
    (r"^head ", "tail "),
    (r"^tr a-z A-Z ", "tr A-Z a-z "),
    (r"^tr ',' '\\t' ", r"tr '\\t' ',' "),
    (r"^cut -d= -f2 ", "cut -d= -f1 "),
    (r"^cut -d, -f1 ", "cut -d, -f2 "),
    (r"^cut -d, -f\d ", "cut -d, -f1 "),
)
"""The first pattern that a command matches says how it goes wrong."""


def slip(command: str) -> str | None:
    """The command as it comes out wrong, or None where no slip is known for it."""
    for pattern, wrong in _SLIPS:
        slipped, count = re.subn(pattern, wrong, command, count=1)
        if count:
            return slipped
    return None


def with_slip(commands: Sequence[str], rng: random.Random) -> list[str]:
    """The commands with a slip in one of those that can go wrong, drawn by `rng`; as they are where none can."""
    slipped = {place: slip(command) for place, command in enumerate(commands)}
    places = [place for place, command in slipped.items() if command is not None]
    if not places:
        return list(commands)
    chosen = rng.choice(places)
    return [slipped[place] or command if place == chosen else command for place, command in enumerate(commands)]
