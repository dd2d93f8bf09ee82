"""What the policy reads after a command."""

from tmax.agent.observation import truncate, word_observation
from tmax.config import AgentConfig
from tmax.records import ExecResult


def result(output: str, exit_code: int | None = 0, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(output=output, exit_code=exit_code, seconds=0.1, timed_out=timed_out)


def test_an_observation_ends_with_the_exit_code() -> None:
    assert word_observation(result("a\nb\n", 3), AgentConfig()) == "a\nb\n(exit_code=3)"
    assert word_observation(result(""), AgentConfig()) == "(exit_code=0)"


def test_a_time_out_says_after_how_long() -> None:
    worded = word_observation(result("half", None, timed_out=True), AgentConfig(command_timeout=2.5))
    assert worded == "half\nThe command was stopped after 2.5 seconds.\n(exit_code=none)"


def test_a_long_output_keeps_half_at_each_end_and_says_what_is_gone() -> None:
    text = "a" * 6000 + "b" * 6000
    short = truncate(text, 10_000, "agent")
    assert short == "a" * 5000 + "\n[… 2000 characters left out …]\n" + "b" * 5000
    assert truncate("x" * 10_000, 10_000, "agent") == "x" * 10_000
