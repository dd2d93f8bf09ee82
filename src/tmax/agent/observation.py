"""Words what a command did, as the policy reads it: bounded, and ending with the exit code."""

from tmax.config import AgentConfig
from tmax.prompt import render
from tmax.records import ExecResult


def word_observation(result: ExecResult, config: AgentConfig) -> str:
    """The observation for a command's result."""
    output = truncate(result.output.rstrip("\n"), config.observation_chars, config.prompts)
    exit_code = "none" if result.exit_code is None else str(result.exit_code)
    if result.timed_out:
        worded = render(
            config.prompts, "timeout", output=output, seconds=f"{config.command_timeout:g}", exit_code=exit_code
        )
    else:
        worded = render(config.prompts, "observation", output=output, exit_code=exit_code)
    return worded.lstrip("\n")


def truncate(text: str, limit: int, prompts: str) -> str:
    """Keep `limit` characters, half from each end, with a notice between them that says how many are gone."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    notice = render(prompts, "truncated", dropped=len(text) - limit)
    return f"{text[:head]}\n{notice}\n{text[-tail:]}"
