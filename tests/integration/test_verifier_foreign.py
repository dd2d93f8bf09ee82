"""Tasks that bring their own test.sh: the reward file is believed only fresh, in range, and from a script that ran."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tmax.config import EngineConfig
from tmax.errors import VerifierError, VerifierTimeout
from tmax.sandbox import Image, Sandbox, build_image, open_sandbox
from tmax.verifier import verify_foreign


@pytest.fixture(scope="module")
def image(engine: EngineConfig, write_tiny_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """An image with a working directory."""
    dockerfile = "FROM tmax-base\nWORKDIR /home/agent\n"
    return build_image(engine, write_tiny_task(tmp_path_factory.mktemp("task"), dockerfile))


@pytest.fixture
def sandbox(engine: EngineConfig, image: Image) -> Iterator[Sandbox]:
    """A fresh sandbox, without our interpreter."""
    with open_sandbox(engine, image, label="foreign") as sandbox:
        yield sandbox


def script_folder(tmp_path: Path, script: str) -> Path:
    folder = tmp_path / "tests"
    (folder / "data").mkdir(parents=True)
    (folder / "test.sh").write_text(script)
    (folder / "data" / "expected").write_text("42\n")
    return folder


HARBOR = """
echo "checking $(id -un) in $PWD"
if cmp -s answer /tests/data/expected; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def test_the_scripts_own_verdict_is_the_reward(sandbox: Sandbox, tmp_path: Path) -> None:
    folder = script_folder(tmp_path, HARBOR)
    reward, report = verify_foreign(sandbox, folder, timeout=30.0)
    assert (reward, report.judged, report.exit_code) == (0.0, True, 1)
    assert [(test.name, test.status) for test in report.tests] == [("test.sh", "failed")]
    assert report.tests[0].message == "checking root in /home/agent"
    sandbox.shell(user="agent").run("echo 42 > ~/answer", timeout=10.0)
    reward, report = verify_foreign(sandbox, folder, timeout=30.0)
    assert (reward, report.all_passed) == (1.0, True)


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ('echo \'{"reward": 0.5, "speed": 7}\' > /logs/verifier/reward.json', 0.5),
        ("echo 0 > /logs/verifier/reward.txt; exit 1", 0.0),
    ],
)
def test_rewards_between_are_kept_and_are_no_pass(script: str, reward: float, sandbox: Sandbox, tmp_path: Path) -> None:
    found, report = verify_foreign(sandbox, script_folder(tmp_path, script), timeout=30.0)
    assert found == reward
    assert [test.status for test in report.tests] == ["failed"]


@pytest.mark.parametrize(
    "script",
    [
        "echo nothing",
        "echo 1.5 > /logs/verifier/reward.txt",
        "echo -1 > /logs/verifier/reward.txt",
        "echo nan > /logs/verifier/reward.txt",
        "echo yes > /logs/verifier/reward.txt",
        "echo '{}' > /logs/verifier/reward.json",
        "echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt",
        "mkdir /logs/verifier/reward.txt",
        "mkfifo /logs/verifier/reward.txt",
        "echo 0 > /logs/verifier/reward.txt; no_such_program",
        "echo 0 > /logs/verifier/reward.txt; kill -9 $$",
        "echo 0 > /logs/verifier/reward.txt; exit 2",
    ],
)
def test_no_reward_comes_from_a_script_that_broke(script: str, sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(VerifierError) as caught:
        verify_foreign(sandbox, script_folder(tmp_path, script), timeout=30.0)
    assert not isinstance(caught.value, VerifierTimeout)


def test_a_script_that_never_ends_is_a_time_out(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "echo 1 > /logs/verifier/reward.txt\nsleep 1000"
    with pytest.raises(VerifierTimeout, match="longer than 1 s"):
        verify_foreign(sandbox, script_folder(tmp_path, script), timeout=1.0)


EARLY = """
mkdir -p /tests /logs/verifier && echo 1 > /logs/verifier/reward.txt && echo 'echo 1 > $1' > /tests/test.sh
mkdir -p /elsewhere && echo 1 > /elsewhere/reward.txt && rm -rf /logs && ln -s / /logs && ln -s /elsewhere /verifier
"""


@pytest.mark.parametrize("user", ["agent", "root"])
def test_a_reward_that_an_agent_wrote_is_gone(user: Any, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.shell(user=user).run(EARLY, timeout=20.0)
    keeps_writing = "while true; do echo 1 > /logs/verifier/reward.txt; done"
    sandbox.shell(user=user).run(f"(setsid bash -c '{keeps_writing}' >/dev/null 2>&1 &)", timeout=20.0)
    with pytest.raises(VerifierError, match="no reward"):
        verify_foreign(sandbox, script_folder(tmp_path, "sleep 0.2; echo nothing"), timeout=30.0)
