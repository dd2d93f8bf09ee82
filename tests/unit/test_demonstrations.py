"""Demonstrations: slips that only a test can tell, and names exchanged as one."""

import random

import pytest

from tmax.config import TinyModelConfig
from tmax.policy.template import ChatTemplate
from tmax.policy.tiny import make_tokenizer
from tmax.records import Trajectory, Turn
from tmax.stages.sft import demonstration_tokens
from tmax.synth.families import FAMILIES
from tmax.synth.families.words import STARTERS
from tmax.synth.renaming import renamed
from tmax.synth.slips import slip, with_slip

STORY = Trajectory(
    system="S",
    instruction=f"Copy {STARTERS[0]}.txt to {STARTERS[1]}.md, not {STARTERS[0]}s.",
    turns=(
        Turn(reply="a", command=f"cp {STARTERS[0]}.txt {STARTERS[1]}.md", observation=f"{STARTERS[1]}.md"),
        Turn(reply="b", command=None, observation=None),
    ),
    stop="submitted",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_command_of_level_1_has_a_slip_that_is_another_command(name: str) -> None:
    for seed in range(80):
        (command,) = FAMILIES[name].draw(random.Random(seed), 1).steps
        wrong = slip(command)
        assert wrong is not None, command
        assert wrong != command
        assert slip("true") is None


def test_one_command_of_several_slips() -> None:
    commands = ["true", "cp a b", "sort x > y"]
    for seed in range(20):
        slipped = with_slip(commands, random.Random(seed))
        assert sum(one != other for one, other in zip(commands, slipped, strict=True)) == 1
        assert slipped[0] == "true"
    assert with_slip(["true"], random.Random(0)) == ["true"]


def test_names_are_exchanged_as_one_in_all_texts_and_nothing_else_is() -> None:
    told = renamed(STORY, random.Random(3))
    first, second = told.instruction.split()[1].split(".")[0], told.instruction.split()[3].split(".")[0]
    assert first != second
    assert {first, second} <= set(STARTERS)
    assert told.instruction == f"Copy {first}.txt to {second}.md, not {STARTERS[0]}s."
    assert told.turns[0].command == f"cp {first}.txt {second}.md"
    assert told.turns[0].observation == f"{second}.md"
    assert told.turns[1].command is None
    assert renamed(STORY, random.Random(3)) == told
    assert renamed(STORY, random.Random(4)) != told


def test_loss_falls_on_replies_alone_unless_everything_is_asked_for() -> None:
    tokenizer = make_tokenizer(["copy a b"] * 9, TinyModelConfig(vocab_size=300))
    template = ChatTemplate(tokenizer)
    tokens = demonstration_tokens(template, STORY, everything=False)
    taught = [token for token, flag in zip(tokens.ids, tokens.loss_mask, strict=True) if flag]
    assert taught == [*template.reply("a"), *template.reply("b")]
    assert sum(demonstration_tokens(template, STORY, everything=True).loss_mask) == len(tokens.ids)
    assert tokenizer.decode(tokens.ids).count("<|im_start|>") == 5
