"""Draws specs: points of the axes that become tasks; every item has a random stream of its own."""

import random

from tmax.config import SampleConfig
from tmax.errors import ConfigError
from tmax.records import Spec
from tmax.synth.families import FAMILIES


def sample_specs(config: SampleConfig, *, seed: int) -> list[Spec]:
    """Draw all specs of a run: the training tasks first, then the held-out ones.

    Raises ConfigError for a family or level that there is not.
    """
    for draw in config.families:
        if draw.name not in FAMILIES:
            raise ConfigError(f"unknown family `{draw.name}`", hint=f"families are: {', '.join(FAMILIES)}")
        known = FAMILIES[draw.name].levels
        strange = [level for level in draw.levels if level not in known]
        if strange or not draw.levels:
            raise ConfigError(
                f"family `{draw.name}` has no level {strange[0] if strange else 'given'}",
                hint=f"its levels are {', '.join(map(str, known))}",
            )
    weights = [draw.weight for draw in config.families]
    specs = []
    for index in range(config.num_train + config.num_heldout):
        rng = random.Random(f"{seed}:sample:{index}")
        draw = rng.choices(config.families, weights)[0]
        specs.append(
            Spec(
                index=index,
                family=draw.name,
                level=rng.choice(draw.levels),
                domain=FAMILIES[draw.name].domain,
                split="train" if index < config.num_train else "heldout",
            )
        )
    return specs
