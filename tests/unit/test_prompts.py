"""Prompts as they are rendered, held against files under review; run with TMAX_GOLDEN=write to write them anew."""

import os
from pathlib import Path

import pytest

from tmax.agent.reply import SUBMIT_COMMAND
from tmax.errors import PromptError
from tmax.prompt import prompts_dir, render

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "prompts"

VARIABLES: dict[str, dict[str, object]] = {
    "system": {"command_timeout": "120", "submit_command": SUBMIT_COMMAND},
    "task": {"instruction": "Count the lines of web.log.", "user": "agent", "workdir": "/app", "max_calls": 64},
    "observation": {"output": "a\nb", "exit_code": "0"},
    "timeout": {"output": "half", "seconds": "120", "exit_code": "none"},
    "malformed": {"problem": "the reply holds no command"},
    "truncated": {"dropped": 2000},
}

FILES = sorted(path.relative_to(prompts_dir()) for path in prompts_dir().glob("*/*.j2"))


@pytest.mark.parametrize("name", FILES, ids=str)
def test_the_rendering_is_the_reviewed_one(name: Path) -> None:
    rendered = render(name.parent.name, name.stem, **VARIABLES[name.stem])
    golden = GOLDEN / name.with_suffix(".txt")
    if os.environ.get("TMAX_GOLDEN") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(rendered + "\n", encoding="utf-8")
    assert rendered + "\n" == golden.read_text(encoding="utf-8")


def test_both_sets_of_the_agents_prompts_have_every_message() -> None:
    for caller in ("agent", "agent_brief"):
        assert {path.stem for path in (prompts_dir() / caller).glob("*.j2")} == set(VARIABLES)


def test_a_variable_that_is_not_given_is_an_error() -> None:
    with pytest.raises(PromptError, match="instruction"):
        render("agent", "task", user="agent", workdir="/", max_calls=1)


def test_a_prompt_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PromptError, match="no prompt file"):
        render("agent", "nothing")
