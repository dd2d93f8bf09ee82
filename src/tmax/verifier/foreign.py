"""Compatibility mode: tasks of others that have only `tests/test.sh`, which writes its own reward file.

The rule: the file is read by the host, after everything in the sandbox is dead, from a directory that was made fresh
after the agent was. What the script runs runs as root, so this is as trustworthy as the script and no more.
"""

import json
import math
from pathlib import Path

from tmax.errors import VerifierError, VerifierTimeout
from tmax.records import TestReport, TestResult
from tmax.sandbox.protocol import Sandbox

_OUTPUT_TAIL = 2_000

_VERDICTS = (0, 1)
"""Exit codes with which a script may say that the work failed; any other says that the script did."""

_FRESH = """\
[ ! -L /logs ] || rm -f /logs
rm -rf /tests /logs/verifier && mkdir -p /logs/verifier && chown 0:0 /logs/verifier && chmod 755 /logs/verifier
"""


def verify_foreign(sandbox: Sandbox, tests_dir: Path, *, timeout: float) -> tuple[float, TestReport]:
    """Run `bash /tests/test.sh` as root and return the reward it wrote, in [0, 1], with a report of one pseudo-test.

    `timeout` is in seconds. Raises VerifierTimeout; VerifierError where the reward is missing, malformed or out of
    range, or where it is 0 and the script itself broke; SandboxError.
    """
    sandbox.kill_processes(user=None)
    fresh = sandbox.exec(["sh", "-c", _FRESH], user="root", timeout=60.0, cwd="/")
    if fresh.exit_code != 0:
        raise VerifierError(
            f"cannot make a fresh /tests and /logs/verifier: {_tail(fresh.output)}", hint="look at the task's image"
        )
    sandbox.put(tests_dir, "/tests", user="root", mode=0o755)
    result = sandbox.exec(["bash", "/tests/test.sh"], user="root", timeout=timeout)
    sandbox.kill_processes(user=None)
    if result.timed_out:
        raise VerifierTimeout(
            f"tests/test.sh ran longer than {timeout:g} s; last output: {_tail(result.output)}",
            hint="raise `verifier.timeout_sec` in task.toml, or look for a test that waits for ever",
        )
    reward = _reward(sandbox, result.exit_code, _tail(result.output))
    if reward == 0.0 and result.exit_code not in _VERDICTS:
        raise VerifierError(
            f"tests/test.sh broke (exit code {result.exit_code}); last output: {_tail(result.output)}",
            hint="the script must end with 0 or 1 where it gives a verdict",
        )
    test = TestResult(
        name="test.sh",
        status="passed" if reward == 1.0 else "failed",
        seconds=result.seconds,
        message=_tail(result.output),
    )
    return reward, TestReport(tests=(test,), exit_code=0 if reward == 1.0 else 1, seconds=result.seconds)


def _reward(sandbox: Sandbox, exit_code: int | None, output: str) -> float:
    for name, parse in (("reward.txt", _from_text), ("reward.json", _from_json)):
        try:
            content = sandbox.get(f"/logs/verifier/{name}")
        except FileNotFoundError:
            continue
        reward = parse(content)
        if reward is None or not 0.0 <= reward <= 1.0:
            raise VerifierError(
                f"/logs/verifier/{name} holds no number from 0 to 1: {content[:100]!r}",
                hint="tests/test.sh must write one number",
            )
        return reward
    raise VerifierError(
        f"tests/test.sh wrote no reward (exit code {exit_code}); last output: {output}",
        hint="it must write /logs/verifier/reward.txt or reward.json, as a file and not as a link",
    )


def _from_text(content: bytes) -> float | None:
    try:
        return float(content.decode("ascii").strip())
    except ValueError:
        return None


def _from_json(content: bytes) -> float | None:
    try:
        data = json.loads(content)
    except ValueError:
        return None
    reward = data.get("reward") if isinstance(data, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        return None
    return float(reward)


def _tail(output: str) -> str:
    return output.strip()[-_OUTPUT_TAIL:] or "none"
