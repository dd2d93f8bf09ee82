"""Which files go with a test, how messages are bounded, and which rewards of others are believed."""

import base64
from pathlib import Path
from types import SimpleNamespace

import pytest

from tmax.errors import VerifierError
from tmax.verifier import foreign, hidden_tests, interpreter, runner


def names(test_file: Path) -> list[str]:
    return [name for name, _, _ in hidden_tests._files(test_file)]


def test_support_files_go_along_and_other_tests_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    for name in ("test_final_state.py", "test_initial_state.py", "old_test.py", "test.sh", "helper.py", "conftest.py",
                 "data/expected.json", "data/test_cases.txt", "__pycache__/helper.pyc"):  # fmt: skip
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    wanted = ["test_final_state.py", "conftest.py", "data/expected.json", "data/test_cases.txt", "helper.py"]
    assert names(folder / "test_final_state.py") == wanted


def test_from_a_build_context_only_the_test_goes(tmp_path: Path) -> None:
    for name in ("test_initial_state.py", "Dockerfile", "task.json", "seed.csv"):
        (tmp_path / name).write_text(name)
    assert names(tmp_path / "test_initial_state.py") == ["test_initial_state.py"]


def test_content_is_carried_byte_for_byte_and_programs_stay_programs(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_bytes(b"# \xff\x00")
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    files = {
        name: (mode, base64.b64decode(content)) for name, mode, content in hidden_tests._files(tmp_path / "test_a.py")
    }
    assert files == {"test_a.py": (0o600, b"# \xff\x00"), "run.sh": (0o700, b"#!/bin/sh\n")}


def test_a_missing_test_file_is_a_verifier_error(tmp_path: Path) -> None:
    with pytest.raises(VerifierError):
        names(tmp_path / "test_final_state.py")


def message(text: str) -> str:
    return runner._message(SimpleNamespace(longrepr="x", longreprtext=text), Path("/run/tmax-1/tests"))


def test_a_message_keeps_its_last_whole_lines() -> None:
    lines = [f"line {number:04}" for number in range(1000)]
    kept = message("\n".join(lines))
    # 4 characters of "...\n", then lines of 9 characters and a line feed: (2000 - 4 + 1) // 10 = 199.
    assert kept.splitlines() == ["...", *lines[-199:]]
    assert len(kept) <= runner.MESSAGE_LIMIT


def test_one_long_line_is_cut_too() -> None:
    assert message("x" * 5000) == "...\n" + "x" * 1996


def test_a_message_names_no_random_place_and_no_lone_surrogate() -> None:
    assert message("/run/tmax-1/tests/test_a.py:3: in test_a\nE  \udcff") == "test_a.py:3: in test_a\nE  ?"


@pytest.mark.parametrize(
    ("content", "reward"),
    [(b"1\n", 1.0), (b" 0.25 ", 0.25), (b"", None), (b"pass", None), (b"\xff", None), (b"1 0", None)],
)
def test_a_reward_file_holds_one_number(content: bytes, reward: float | None) -> None:
    assert foreign._from_text(content) == reward


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        (b'{"reward": 1}', 1.0), (b'{"reward": 0.5, "more": 3}', 0.5), (b'{"score": 1}', None), (b"[1]", None),
        (b'{"reward": true}', None), (b'{"reward": "1"}', None), (b'{"reward": NaN}', None), (b"{", None),
    ],
)  # fmt: skip
def test_a_reward_object_holds_a_number_under_its_name(content: bytes, reward: float | None) -> None:
    assert foreign._from_json(content) == reward


def test_a_program_that_is_no_elf_cannot_be_bundled(tmp_path: Path) -> None:
    script = tmp_path / "python3"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(VerifierError, match="ELF"):
        interpreter._loader(script)
