"""Tasks on disk: what is written is read back, the same draft gives the same bytes, nothing leads out."""

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tmax.errors import TaskError
from tmax.task import (
    STEP_MARK,
    FileSpec,
    Settings,
    TaskDraft,
    Truth,
    context_files,
    find_tasks,
    read_task,
    task_hash,
    write_task,
)


def a_draft(**changes: object) -> TaskDraft:
    draft = TaskDraft(
        instruction="Sort the lines of /app/in.txt into /app/out.txt.",
        dockerfile="FROM debian:bookworm-slim\nWORKDIR /app\nCOPY data/ /app/\n",
        files={"data/in.txt": FileSpec(b"b\na\n"), "bin/tool": FileSpec(b"#!/bin/sh\n", 0o755)},
        initial_test="def test_start():\n    assert True\n",
        final_test="def test_end():\n    assert False\n",
        steps=("cd /app", "sort in.txt > out.txt"),
        truth=Truth("two lines", "sorted", "in.txt is untouched", "out.txt is not hard-coded"),
        spec={"family": "sorting", "level": 2, "domain": "text"},
        settings=Settings(agent_timeout=30.0, memory_mb=512),
    )
    return dataclasses.replace(draft, **changes)  # type: ignore[arg-type]


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything under `root`."""
    return {
        entry.relative_to(root).as_posix(): (entry.stat().st_mode, b"" if entry.is_dir() else entry.read_bytes())
        for entry in root.rglob("*")
    }


def harbor_task(root: Path, toml: str = 'version = "1.0"\n') -> Path:
    """A task of somebody else: Harbor's layout, no `task.json`."""
    (root / "environment").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "instruction.md").write_text("Do it.\n")
    (root / "task.toml").write_text(toml)
    (root / "environment" / "Dockerfile").write_text("FROM debian\n")
    (root / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    return root


# writing and reading


def test_a_written_task_is_read_back_whole(tmp_path: Path) -> None:
    draft = a_draft()
    task = write_task(draft, tmp_path)
    assert task == read_task(task.path)
    assert task.task_id == f"sorting-{task.hash[:12]}" == task.path.name
    assert task.instruction == draft.instruction
    assert task.oracle_steps() == draft.steps
    assert (task.settings.agent_timeout, task.settings.memory_mb, task.settings.network) == (30.0, 512, False)
    assert task.settings.metadata == draft.spec == task.card["spec"]
    assert task.card["hash"] == task.hash
    assert task.card["truth"]["invariants"] == "in.txt is untouched"
    assert (task.agent_user, task.unknown_keys) == ("agent", ())
    assert task.initial_test is not None
    assert task.initial_test.read_text() == draft.initial_test
    assert task.final_test is not None
    assert task.final_test.read_text() == draft.final_test
    assert [file.relative_to(task.context).as_posix() for file in context_files(task.context)] == [
        "Dockerfile", "bin/tool", "data/in.txt",
    ]  # fmt: skip
    assert os.access(task.context / "bin/tool", os.X_OK)


def test_the_same_draft_gives_the_same_bytes_and_modes_under_any_umask(tmp_path: Path) -> None:
    first = write_task(a_draft(), tmp_path / "one")
    old = os.umask(0o077)
    try:
        second = write_task(a_draft(), tmp_path / "two")
    finally:
        os.umask(old)
    assert tree(first.path) == tree(second.path)
    assert stat.S_IMODE(second.path.stat().st_mode) == 0o755


def test_writing_a_task_twice_leaves_one_and_no_scraps(tmp_path: Path) -> None:
    first = write_task(a_draft(), tmp_path)
    assert write_task(a_draft(), tmp_path) == first
    assert list(tmp_path.iterdir()) == [first.path]


@pytest.mark.parametrize("setting", [{"agent_user": "root"}, {"network": True}, {"storage_mb": 77}, {"cpus": 3}])
def test_every_setting_of_a_draft_arrives(tmp_path: Path, setting: dict[str, object]) -> None:
    wanted = dataclasses.replace(Settings(), **setting)  # type: ignore[arg-type]
    found = write_task(a_draft(settings=wanted), tmp_path).settings
    assert dataclasses.replace(found, metadata={}) == wanted


def test_labels_may_hold_any_text(tmp_path: Path) -> None:
    spec = {"family": "f", "level": 1, "domain": 'a "quoted" 🦀 \n line', "tags": ["x"], "none": None}
    task = write_task(a_draft(spec=spec), tmp_path)
    assert task.settings.metadata["domain"] == spec["domain"]
    assert task.card["spec"] == spec


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../tests/x", "a/../../x", "", ".", "Dockerfile", "./Dockerfile", "task.json", "test_outputs.py"],
)
def test_files_that_are_not_of_the_build_context_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError) as caught:
        write_task(a_draft(files={name: FileSpec(b"")}), tmp_path / "tasks")
    assert caught.value.hint
    assert not (tmp_path / "tasks").exists()


def test_a_draft_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot write"):
        write_task(a_draft(files={"a": FileSpec(b""), "a/b": FileSpec(b"")}), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="cannot write"):
        write_task(a_draft(), tmp_path / "file")


# the oracle

_STEP = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda s: bool(s.strip()) and STEP_MARK not in s)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEP, min_size=1, max_size=4))
def test_oracle_steps_come_back_to_the_letter(tmp_path: Path, steps: list[str]) -> None:
    task = write_task(a_draft(steps=tuple(steps)), tmp_path)
    assert task.oracle_steps() == tuple(step.strip("\n") for step in steps)


def test_a_carriage_return_in_a_heredoc_survives(tmp_path: Path) -> None:
    step = "cat > f <<'END'\none\r\ntwo\f\u2028\nEND"
    assert write_task(a_draft(steps=(step,)), tmp_path).oracle_steps() == (step,)


def test_a_step_that_holds_the_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="mark"):
        write_task(a_draft(steps=(f"echo '{STEP_MARK}'",)), tmp_path)


def test_an_oracle_without_marks_is_one_step_and_none_is_none(tmp_path: Path) -> None:
    path = harbor_task(tmp_path / "t")
    assert read_task(path).oracle_steps() == ()
    (path / "solution").mkdir()
    (path / "solution" / "solve.sh").write_text("#!/bin/bash\nset -e\n\necho hi\n")
    assert read_task(path).oracle_steps() == ("set -e\n\necho hi",)
    (path / "solution" / "solve.sh").write_bytes(b"echo \xff")
    with pytest.raises(TaskError, match="decode"):
        read_task(path).oracle_steps()


# the hash


def test_the_hash_ignores_labels_and_the_card(tmp_path: Path) -> None:
    task = write_task(a_draft(), tmp_path)
    toml = (task.path / "task.toml").read_text()
    (task.path / "task.toml").write_text("# a remark\n" + toml.replace("level = 2", "level = 9"))
    (task.path / "task.json").write_text("{}")
    (task.path / "environment" / "task.json").write_text("{}")
    assert task_hash(task.path) == task.hash


def _append(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with (path / name).open("a") as file:
            file.write("# more\n")

    return change


def _swap_bytes_between_files(path: Path) -> None:
    (path / "environment/data/in.txt").rename(path / "environment/data/other.txt")


@pytest.mark.parametrize(
    "change",
    [
        _append("instruction.md"),
        _append("environment/Dockerfile"),
        _append("environment/data/in.txt"),
        _append("tests/test_final_state.py"),
        _append("tests/test_initial_state.py"),
        _append("tests/test.sh"),
        _append("solution/solve.sh"),
        _append("tests/new.py"),
        _swap_bytes_between_files,
        lambda path: (path / "environment/data/in.txt").chmod(0o755),
        lambda path: (path / "environment/data/link").symlink_to("in.txt"),
        lambda path: (path / "task.toml").write_text(
            (path / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 31.0")
        ),
    ],
)
def test_the_hash_changes_with_what_decides_behaviour(tmp_path: Path, change: Callable[[Path], None]) -> None:
    task = write_task(a_draft(), tmp_path)
    change(task.path)
    assert task_hash(task.path) != task.hash
    assert read_task(task.path).hash != task.hash


def test_the_hash_does_not_depend_on_where_the_task_lies(tmp_path: Path) -> None:
    task = write_task(a_draft(), tmp_path / "a")
    moved = task.path.rename(tmp_path / "other-name")
    assert task_hash(moved) == task.hash


def test_a_fixture_named_like_the_settings_is_hashed_as_bytes(tmp_path: Path) -> None:
    task = write_task(a_draft(files={"task.toml": FileSpec(b"not [ toml")}), tmp_path)
    (task.context / "task.toml").write_bytes(b"# not [ toml")
    assert task_hash(task.path) != task.hash


# what is refused


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh"])
def test_a_task_with_a_part_missing_is_refused(tmp_path: Path, part: str) -> None:
    path = harbor_task(tmp_path / "t")
    (path / part).unlink()
    with pytest.raises(TaskError, match=part.split("/")[0]) as caught:
        read_task(path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("= 1", "not TOML"),
        ('agent = "x"', "not a table"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ('[agent]\ntimeout_sec = "9"', "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec"),
        ("[environment]\nmemory_mb = inf", "environment.memory_mb"),
        ("[environment]\nmemory_mb = nan", "environment.memory_mb"),
        ('[environment]\nmemory = "much"', "environment.memory"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        read_task(harbor_task(tmp_path / "t", toml))


@pytest.mark.parametrize("text", ["", "  \n\t\n"])
def test_an_empty_instruction_is_refused(tmp_path: Path, text: str) -> None:
    path = harbor_task(tmp_path / "t")
    (path / "instruction.md").write_text(text)
    with pytest.raises(TaskError, match="empty"):
        read_task(path)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(TaskError, match="no task directory"):
            read_task(path)


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("environment/secret", "/etc/passwd"),
        ("environment/up", "../../other"),
        ("environment/folder", "/etc"),
        ("environment/answer", "../solution"),
        ("environment/hidden_tests", "../tests/test.sh"),
        ("environment/loop", "loop"),
        ("tests/out", "../../../x"),
        ("link", ".."),
    ],
)
def test_links_that_lead_out_are_refused(tmp_path: Path, place: str, target: str) -> None:
    path = harbor_task(tmp_path / "t")
    (path / place).symlink_to(target)
    with pytest.raises(TaskError, match="symbolic link") as caught:
        read_task(path)
    assert caught.value.hint


def test_links_inside_the_build_context_are_kept(tmp_path: Path) -> None:
    path = harbor_task(tmp_path / "t")
    (path / "environment" / "data").write_text("x")
    (path / "environment" / "alias").symlink_to("data")
    assert [file.name for file in context_files(read_task(path).context)] == ["Dockerfile", "alias", "data"]


def test_pipes_are_refused(tmp_path: Path) -> None:
    path = harbor_task(tmp_path / "t")
    os.mkfifo(path / "environment" / "pipe")
    with pytest.raises(TaskError, match="neither a file nor a directory"):
        read_task(path)


def test_a_card_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = harbor_task(tmp_path / "t")
    for text in ("{", "[]"):
        (path / "task.json").write_text(text)
        with pytest.raises(TaskError, match=r"task\.json"):
            read_task(path)


# tasks of others


def test_keys_that_mean_nothing_are_reported(tmp_path: Path) -> None:
    toml = "shiny = 1\n[agent]\ntimeout_sec = 5\nmood = 'good'\n[environment]\ncolour = 1\n[metadata]\nanything = 1\n"
    task = read_task(harbor_task(tmp_path / "t", toml))
    assert set(task.unknown_keys) == {"shiny", "agent.mood", "environment.colour"}
    assert task.settings.agent_timeout == 5.0
    assert task.settings.metadata == {"anything": 1}


def test_a_task_of_others_runs_as_its_author_expects(tmp_path: Path) -> None:
    task = read_task(harbor_task(tmp_path / "t"))
    assert (task.agent_user, task.initial_test, task.final_test, task.solution, task.card) == (
        "root", None, None, None, {},
    )  # fmt: skip
    assert task.test_script == task.path / "tests" / "test.sh"
    named = read_task(harbor_task(tmp_path / "u", '[agent]\nuser = "dev"\n[environment]\nallow_internet = true\n'))
    assert (named.agent_user, named.settings.network) == ("agent", True)


def test_sizes_are_read_in_both_spellings(tmp_path: Path) -> None:
    old = read_task(harbor_task(tmp_path / "a", '[environment]\nmemory = "4G"\nstorage = "512M"\n')).settings
    new = read_task(harbor_task(tmp_path / "b", "[environment]\nmemory_mb = 4096\nstorage_mb = 512\n")).settings
    assert (old.memory_mb, old.storage_mb) == (new.memory_mb, new.storage_mb) == (4096, 512)


def test_tests_that_lie_beside_the_dockerfile_are_found_and_not_sent(tmp_path: Path) -> None:
    path = harbor_task(tmp_path / "t")
    (path / "environment" / "task.json").write_text('{"truth": "secret"}')
    (path / "environment" / "test_initial_state.py").write_text("def test_a(): pass\n")
    (path / "tests" / "test_final_state.py").write_text("def test_b(): pass\n")
    task = read_task(path)
    assert task.initial_test == path / "environment" / "test_initial_state.py"
    assert task.final_test == path / "tests" / "test_final_state.py"
    assert (task.card, task.agent_user) == ({}, "root")
    assert [file.name for file in context_files(task.context)] == ["Dockerfile"]


# finding


def test_tasks_are_found_at_a_path_or_under_it(tmp_path: Path) -> None:
    second, first = harbor_task(tmp_path / "b"), harbor_task(tmp_path / "a")
    harbor_task(tmp_path / ".draft-xyz")  # what a killed process leaves
    (tmp_path / "notes").mkdir()
    assert find_tasks(tmp_path) == [first, second]
    assert find_tasks(first) == [first]
    (first / "task.toml").unlink()
    assert find_tasks(tmp_path) == [first, second]  # broken, so that reading it says what is missing
    for empty in (tmp_path / "notes", tmp_path / "gone"):
        with pytest.raises(TaskError, match="no task under"):
            find_tasks(empty)


def test_the_working_directory_may_be_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = harbor_task(tmp_path / "mine")
    monkeypatch.chdir(path)
    assert read_task(Path()).task_id == "mine"
    monkeypatch.chdir(path / "tests")
    assert read_task(Path("..")).task_id == "mine"
