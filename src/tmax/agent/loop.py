"""The agent loop: prompt, reply, command, observation, until it submits or something ends it.

The rule: whatever ended the loop is a stop reason, not an error; the final state is verified all the same.
"""

import time
from dataclasses import dataclass

from tmax.agent.conversation import Conversation
from tmax.agent.observation import word_observation
from tmax.agent.reply import SUBMIT_MARKER, is_submission, parse_reply
from tmax.config import AgentConfig
from tmax.errors import ContextExhausted
from tmax.prompt import render
from tmax.records import StopReason, Turn
from tmax.sandbox.protocol import Shell


@dataclass(frozen=True)
class Ended:
    """The turns of a finished loop and what ended it."""

    turns: tuple[Turn, ...]
    stop: StopReason


def run_agent(conversation: Conversation, shell: Shell, config: AgentConfig, *, timeout: float) -> Ended:
    """Let a conversation work in a shell for at most `timeout` seconds.

    Raises PolicyError and SandboxError; everything a policy can do wrong is a stop reason.
    """
    deadline = time.monotonic() + timeout
    turns: list[Turn] = []
    num_calls = num_malformed = 0
    while True:
        if time.monotonic() >= deadline:
            return Ended(tuple(turns), "timeout")
        if num_calls >= config.max_calls:
            return Ended(tuple(turns), "max_calls")
        try:
            reply = conversation.reply()
        except ContextExhausted:
            return Ended(tuple(turns), "context")
        if reply is None:
            return Ended(tuple(turns), "script_ended")
        parsed = parse_reply(reply.text)
        if parsed.command is None:
            num_malformed += 1
            if num_malformed >= config.max_malformed:
                turns.append(Turn(reply=reply.text, command=None, observation=None))
                return Ended(tuple(turns), "malformed" if reply.finished else "max_tokens")
            problem = parsed.problem if reply.finished else "the reply was cut off at its length limit"
            observation = render(config.prompts, "malformed", problem=problem)
            turns.append(Turn(reply=reply.text, command=None, observation=observation))
            conversation.observe(observation)
            continue
        num_malformed = 0
        num_calls += 1
        if is_submission(parsed.command):
            turns.append(Turn(reply=reply.text, command=parsed.command, observation=SUBMIT_MARKER, exit_code=0))
            return Ended(tuple(turns), "submitted")
        turn = _act(parsed.command, reply.text, shell, config, deadline)
        turns.append(turn)
        conversation.observe(turn.observation or "")


def _act(command: str, reply: str, shell: Shell, config: AgentConfig, deadline: float) -> Turn:
    started = time.monotonic()
    allowed = max(0.1, min(config.command_timeout, deadline - started))
    result = shell.run(command, timeout=allowed)
    return Turn(
        reply=reply,
        command=command,
        observation=word_observation(result, config),
        exit_code=result.exit_code,
        seconds=time.monotonic() - started,
    )
