"""Runs a task's hidden test file in a live sandbox and brings back what each test said.

The rule: what comes out of the sandbox is believed only under the seal of a nonce that nobody in there could read.
"""

import base64
import hashlib
import json
import secrets
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tmax.errors import SandboxError, VerifierError, VerifierTimeout
from tmax.records import TestReport
from tmax.sandbox.protocol import Sandbox
from tmax.verifier import frame, warm
from tmax.verifier.interpreter import bundle, command

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OUTPUT_TAIL = 2_000

_NOT_SUPPORT = ("test.sh", "task.json", "instruction.md", "Dockerfile")


@dataclass(frozen=True)
class Spec:
    """What the runner is told, as JSON, and the digest of the test file and its place."""

    body: bytes
    test: str


def verify(
    sandbox: Sandbox, test_file: Path, *, timeout: float, order: Literal["given", "reversed"] = "given"
) -> TestReport:
    """Kill what the agent left running, run `test_file` as root, hermetically, and return its report.

    The sandbox must have been opened with `mounts=[bundle()]`. The other files of the test file's directory that are no
    tests go along; nothing stays in the sandbox. `timeout` is in seconds. The report may be no verdict
    (`TestReport.judged`). Raises VerifierTimeout, VerifierError (no report, or one tampered with), SandboxError.
    """
    home = bundle()
    nonce = secrets.token_bytes(32)
    spec = _specification(sandbox, test_file, nonce, order)
    sandbox.kill_processes(user=None)
    clean = False
    try:
        report = _read(_run(sandbox, home, spec, timeout), nonce)
        clean = True
        return report
    finally:
        _tidy(sandbox, clean=clean)


@cache
def _place() -> str:
    """Where this process lays tests out in sandboxes: one place, so that each is compiled once for all trials."""
    return f"/run/tmax-{secrets.token_hex(12)}"


def _run(sandbox: Sandbox, home: Path, spec: Spec, timeout: float) -> warm.Answer:
    """Run the specification warm where the sandbox can be entered, else cold."""
    answer = None
    if sandbox.leader is not None:
        answer = warm.run(sandbox.leader, home, spec.body, test=spec.test, timeout=timeout)
    if answer is None:
        answer = _run_cold(sandbox, home, f"{_place()}/spec.json", spec.body, timeout)
    if answer.timed_out:
        raise VerifierTimeout(
            f"the hidden tests ran longer than {timeout:g} s; last output: {_tail(answer.output)}",
            hint="raise `verifier.timeout_sec` in task.toml, or look for a test that waits for ever",
        )
    return answer


def _run_cold(sandbox: Sandbox, home: Path, target: str, spec: bytes, timeout: float) -> warm.Answer:
    with tempfile.NamedTemporaryFile(prefix="tmax-spec-") as file:
        file.write(spec)
        file.flush()
        sandbox.put(Path(file.name), target, user="root", mode=0o400)
    result = sandbox.exec(command(home, "runner", target), user="root", timeout=timeout, cwd=str(home))
    return warm.Answer(result.output, result.output, result.exit_code, result.timed_out)


def _specification(sandbox: Sandbox, test_file: Path, nonce: bytes, order: str) -> Spec:
    image = sandbox.image
    env = {"PATH": DEFAULT_PATH, "HOME": "/root", "LANG": "C.UTF-8", **image.env}
    files = _files(test_file)
    spec = {
        "nonce": nonce.hex(),
        "home": _place(),
        "files": files,
        "test": test_file.name,
        "order": order,
        "env": {name: value for name, value in env.items() if not name.startswith(("PYTEST_", "PYTHON", "LD_"))},
        "workdir": image.workdir,
    }
    return Spec(json.dumps(spec).encode(), hashlib.sha256(repr((_place(), files[0])).encode()).hexdigest())


def _files(test_file: Path) -> list[tuple[str, int, str]]:
    """The test file and what it may need: path, mode and content (base64) of each."""
    folder = test_file.parent
    found = [test_file]
    # Some layouts keep tests in the build context, where everything else is not for the verifier.
    if not (folder / "Dockerfile").exists() and not (folder / "task.toml").exists():
        found += [
            file for file in sorted(folder.rglob("*")) if _is_support(file.relative_to(folder)) and file.is_file()
        ]
    try:
        return [
            (
                file.relative_to(folder).as_posix(),
                0o700 if file.stat().st_mode & 0o111 else 0o600,
                base64.b64encode(file.read_bytes()).decode(),
            )
            for file in found
        ]
    except OSError as error:
        raise VerifierError(f"cannot read the hidden tests: {error}", hint="check the task's `tests` folder") from error


def _is_support(path: Path) -> bool:
    is_test = path.suffix == ".py" and (path.name.startswith("test_") or path.stem.endswith("_test"))
    return not is_test and path.name not in _NOT_SUPPORT and "__pycache__" not in path.parts


def _read(answer: warm.Answer, nonce: bytes) -> TestReport:
    payload = frame.decode(answer.report, nonce)
    if payload is None:
        output = frame.without_frame(answer.output, nonce)
        raise VerifierError(
            f"the hidden tests ended without a report (exit code {answer.exit_code}); last output: {_tail(output)}",
            hint="a test ended the process, or the sandbox ran out of memory",
        )
    try:
        return TestReport.model_validate_json(payload)
    except ValidationError as error:
        raise VerifierError(f"the hidden tests' report is malformed: {error}", hint="this is a bug in tmax") from error


def _tail(output: str) -> str:
    return output.strip()[-_OUTPUT_TAIL:] or "none"


def _tidy(sandbox: Sandbox, *, clean: bool) -> None:
    """End what the tests started; after a crash remove what the runner could not. Never hides the first error."""
    try:
        sandbox.kill_processes(user=None)
        if not clean:
            sandbox.exec(["rm", "-rf", _place(), "/run/tmax-scratch"], user="root", timeout=30.0)
    except SandboxError:
        if clean:
            raise
