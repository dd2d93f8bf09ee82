"""What counts as a command in a reply, and what counts as submitting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmax.agent.reply import SUBMIT_COMMAND, fence, is_submission, parse_reply


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls -l\n```", "ls -l"),
        ("I will look first.\n\n```bash\ncat a.txt\n```\n", "cat a.txt"),
        ("```sh\ncat <<'EOF' > x\nbody ``` inline\nEOF\n```", "cat <<'EOF' > x\nbody ``` inline\nEOF"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "ls"),
        ('<tool_call>\n{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}\n</tool_call>', "ls"),
        ("<think>```bash\nrm -rf /\n```</think>```bash\nls\n```", "ls"),
        ("```bash\nls\n```\nagain:\n```bash\nls\n```", "ls"),
    ],
)
def test_the_command_is_found(text: str, command: str) -> None:
    assert parse_reply(text).command == command


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no command"),
        ("just words", "holds no command"),
        ("```python\nprint(1)\n```", "holds no command"),
        ("```bash\nls", "holds no command"),
        ("```bash\n\n```", "holds no command"),
        ("```bash\nls\n```\n```bash\npwd\n```", "2 commands"),
        ("<tool_call>not json</tool_call>", "a tool call is not"),
        ('<tool_call>{"name": "python", "arguments": {"command": "1"}}</tool_call>', "a tool call is not"),
    ],
)
def test_a_reply_without_one_command_says_why(text: str, problem: str) -> None:
    parsed = parse_reply(text)
    assert parsed.command is None
    assert problem in parsed.problem


def test_only_the_marker_command_by_itself_submits() -> None:
    assert is_submission(f"  {SUBMIT_COMMAND}\n")
    for command in (
        f"{SUBMIT_COMMAND}; ls",
        f"cat x && {SUBMIT_COMMAND}",
        "cat file-with-marker",
        f"# {SUBMIT_COMMAND}",
    ):
        assert not is_submission(command)


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="`<\r"), min_size=1))
def test_a_fenced_command_is_read_back(command: str) -> None:
    stripped = command.strip("\n")
    if stripped.strip():
        assert parse_reply(fence(command)).command == stripped
