"""Finds the one command in a policy's reply, tolerant of form but never guessing between two."""

import json
import re
from dataclasses import dataclass

SUBMIT_MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT_COMMAND = f"echo {SUBMIT_MARKER}"

_FENCE = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class ParsedReply:
    """A reply's command, or why there is none."""

    command: str | None
    problem: str = ""


def parse_reply(text: str) -> ParsedReply:
    """Find the command of a reply: a fenced ```bash block, or a `<tool_call>` whose JSON names `bash`.

    Commands inside finished `<think>` passages do not count. Two different commands are a problem, the same
    one twice is not.
    """
    spoken = _THINKING.sub("", text)
    commands: list[str] = [match.strip("\n") for match in _FENCE.findall(spoken)]
    for body in _TOOL_CALL.findall(spoken):
        command = _tool_command(body)
        if command is None:
            return ParsedReply(None, 'a tool call is not {"name": "bash", "arguments": {"command": …}}')
        commands.append(command)
    distinct = list(dict.fromkeys(command for command in commands if command.strip()))
    if not distinct:
        return ParsedReply(None, "the reply holds no command")
    if len(distinct) > 1:
        return ParsedReply(None, f"the reply holds {len(distinct)} commands, give one")
    return ParsedReply(distinct[0])


def is_submission(command: str) -> bool:
    """True if the command does nothing but submit; a file or an echo chain that holds the marker does not."""
    return command.strip() == SUBMIT_COMMAND


def fence(command: str) -> str:
    """A command as a reply; what `parse_reply` reads back."""
    return f"```bash\n{command}\n```"


def _tool_command(body: str) -> str | None:
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or call.get("name") != "bash":
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    return command if isinstance(command, str) else None
