"""The families' tasks, tried with the real pytest and the real bash in directories that stand in for /app.

All the tries of this module share one pytest process, because starting one costs more than a hundred tries.
"""

import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tmax.synth.families import FAMILIES
from tmax.synth.families.mend.script import Fault, broken
from tmax.synth.families.words import ADJECTIVES, CITIES, LOG_LEVELS, MESSAGES, NOUNS, PEOPLE, SERVICES
from tmax.task import TaskDraft, read_task, write_task

POINTS = [(name, level) for name, family in FAMILIES.items() for level in family.levels]

DOMAINS = {
    "security", "software_engineering", "file_operations", "data_querying", "data_science", "debugging",
    "scientific_computing", "data_processing", "system_administration",
}  # fmt: skip

CONFTEST = """
import json
import pathlib
import pytest

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")

@pytest.fixture(autouse=True)
def _there(request, monkeypatch):
    monkeypatch.chdir(RESULTS.parent / "apps" / request.path.stem)

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with RESULTS.open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome]) + "\\n")
"""

NEAR_MISSES: dict[str, Sequence[tuple[str, str]]] = {
    # Regular expression and what stands there instead, in the oracle's last step.
    "write": [(r' (\w+)" >', r' other" >'), (r'echo "(.*)"', r'printf "%s\\n%s\\n" "\1" "\1"')],
    "append": [(">>", ">"), (r'echo "(.*)" >> (\S+)', r'sed -i "1i \1" \2')],
    "copy": [("^cp", "mv"), ("^cp", "ln -s"), ("^cp", "ln")],
    "rename": [("^mv", "cp"), (r"mv (\S+) (\S+)", r"mv \1 \2 && ln -s \2 \1")],
    "move": [("^mv", "cp"), (r"mv (\S+) (\S+)/", r"rm -r \2 && mv \1 \2")],
    "delete": [("^rm ", ": > "), (r"rm (\S+)", r"mv \1 \1.old"), (r"rm \S+", "rm -r *")],
    "directory": [("^mkdir", "touch")],
    "executable": [(r"\+x", "644"), (r"chmod \+x (\S+)", r"echo true > \1 && chmod +x \1")],
    "concatenate": [(r"cat (\S+) (\S+)", r"cat \2 \1"), (r"cat (\S+) (\S+) >", r"cat \1 >")],
    "count_level": [("-c ", ""), ("-c ", "-vc ")],
    "count_service": [("-c ", ""), ("-c ", "-vc ")],
    "count_other": [("-vc ", "-c ")],
    "count_lines": [("wc -l < ", "wc -l "), ("wc -l", "wc -w")],
    "lines_of_level": [("grep", "grep -v"), ("grep", "grep -c"), (r"grep (\S+ \S+)", r"grep \1 | tac")],
    "first_of_level": [("head", "tail"), ("head -n 1", "cat")],
    "last_of_level": [("tail", "head"), ("tail -n 1", "cat")],
    "column": [("-d, ", ""), (r"-f(\d)", r"-f\1,1,2"), (r"-f\d", "-f5")],
    "tabs": [(r"'\\t'", "' '"), (r"tr (.*) < (\S+) > (\S+)", r"sed -i 's/,/\\t/g' \2 && cp \2 \3")],
    "sort": [("sort", "sort -r"), ("sort", "cat")],
    "unique": [("-u", ""), ("sort -u", "uniq")],
    "upper": [("a-z A-Z", "a-y A-Y"), ("a-z A-Z", "A-Z a-z")],
    "head": [("head", "tail"), (r"-n \d", "-n 7")],
    "values": [("-f2", "-f1"), ("-d= ", "")],
    "reverse": [("tac", "cat"), ("tac", "sort -r")],
    "wrong_input": [(r"s/(.*)/(.*)/'", r"s/\1/other.txt/'"), (r"sed -i 's/(\S+)/(\S+)/' .*", r"cp \2 \1")],
    "wrong_output": [(r"s/(.*)/(.*)/'", r"s/\1/other.txt/'"), (r".*s/(\S+)/(\S+)/' .*", r"bash run.sh; mv \1 \2")],
    "wrong_level": [(r"s/(.*)/(.*)/'", r"s/\1/FATAL/'"), (r"s/(.*)/(.*)/'", r"s/\1/./'")],
    "wrong_variable": [(r"s/(.*)/(.*)/'", r"s/\2/\1x/'")],
    "wrong_command": [(r"s/(.*)/(.*)/'", r"s/\1/cat/'")],
    "wrong_column": [(r"s/(.*)/(.*)/'", r"s/\1/-f5/'")],
    "wrong_number": [(r"s/(.*)/(.*)/'", r"s/\1/-n 1/'")],
}


ONE_OUTPUT = ("count_level", "lines_of_level", "top_service", "paid_total", "sort", "ranking", "pivot")
"""Operations that leave the inputs alone and make one file: one or two of each kind of answer."""


@dataclass(frozen=True)
class Attempt:
    """A draft in a directory of its own, what was done to it, and how the given test file judged it."""

    label: str
    draft: TaskDraft
    app: Path
    """What stands in for /app; its test file is `hidden/<name of app>.py`."""


def draw(name: str, level: int, seed: int) -> TaskDraft:
    return FAMILIES[name].draw(random.Random(f"{seed}:{name}:{level}"), level)


@cache
def one_of_each(name: str, level: int) -> dict[str, TaskDraft]:
    """The first draft of every operation among sixty seeds."""
    found: dict[str, TaskDraft] = {}
    for seed in range(60):
        draft = draw(name, level, seed)
        found.setdefault(draft.spec["operation"], draft)
    return found


def each() -> list[TaskDraft]:
    """One draft of every operation of every level."""
    return [draft for name, level in POINTS for draft in one_of_each(name, level).values()]


def run_bash(app: Path, steps: Sequence[str]) -> str:
    """Run the steps in one shell; what they print and the exit codes that are not 0."""
    script = "".join(f'{step}\n(exit $?) || echo "exit $?"\n' for step in steps)
    done = subprocess.run(["bash"], input=script, cwd=app, text=True, capture_output=True, timeout=30)
    return done.stdout + done.stderr


class Tries:
    """Collects attempts and judges them all in one pytest process; lives as long as this module's tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempts: list[Attempt] = []
        self.verdicts: dict[str, dict[str, str]] = {}
        (root / "hidden").mkdir()
        (root / "conftest.py").write_text(CONFTEST)

    def add(self, label: str, draft: TaskDraft, source: str) -> Attempt:
        """Lay the draft out beside a test file."""
        attempt = Attempt(label, draft, self.root / "apps" / f"test_{len(self.attempts):04d}")
        for name, file in draft.files.items():
            target = attempt.app / name.removeprefix("files/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
            target.chmod(file.mode)
        (self.root / "hidden" / f"{attempt.app.name}.py").write_text(source)
        self.attempts.append(attempt)
        return attempt

    def judge(self) -> None:
        """Run all the test files; afterwards `outcomes` answers."""
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "--import-mode=importlib", "--assert=plain",
             "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "hidden"],
            cwd=self.root, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        for line in (self.root / "results.jsonl").read_text().splitlines():
            node, when, outcome = json.loads(line)
            self.verdicts.setdefault(Path(node.split("::")[0]).stem, {})[node.split("::")[-1]] = (
                outcome if when == "call" else "error"
            )

    def outcomes(self, attempt: Attempt) -> dict[str, str]:
        """What each test said: `passed`, `failed`, or `error` where it could not judge."""
        return self.verdicts[attempt.app.name]


def labelled(tries: Tries, label: str) -> list[Attempt]:
    found = [attempt for attempt in tries.attempts if attempt.label == label]
    assert found
    return found


@pytest.fixture(scope="module")
def tries(tmp_path_factory: pytest.TempPathFactory) -> Tries:
    """One draft of every operation of every level, tried in every way that a test below asks about."""
    tries = Tries(tmp_path_factory.mktemp("families"))
    for draft in each():
        tries.add("initial", draft, draft.initial_test)
        tries.add("untouched", draft, draft.final_test)
        attempt = tries.add("oracle", draft, draft.final_test)
        assert run_bash(attempt.app, draft.steps) == "", draft.steps
        if len(draft.steps) > 1:
            for left_out in range(len(draft.steps)):
                attempt = tries.add("one step left out", draft, draft.final_test)
                run_bash(attempt.app, [step for number, step in enumerate(draft.steps) if number != left_out])
        if draft.spec["level"] == 1:
            for pattern, instead in NEAR_MISSES[draft.spec["operation"]]:
                step = re.sub(pattern, instead, draft.steps[-1])
                assert step != draft.steps[-1], (draft.steps, pattern)
                attempt = tries.add("near miss", draft, draft.final_test)
                run_bash(attempt.app, [*draft.steps[:-1], step])
        if draft.spec["family"] == "mend":
            freeze(tries.add("frozen output", draft, draft.final_test))
        if draft.spec["operation"] in ONE_OUTPUT:
            spoil(tries.add("spoilt output", draft, draft.final_test), draft.steps)
            change_input(tries.add("changed input", draft, draft.final_test), draft.steps)
    tries.judge()
    return tries


def freeze(attempt: Attempt) -> None:
    """Replace the script by one that prints what the right one makes of the given data, without reading it."""
    before = {path.name for path in attempt.app.iterdir()}
    run_bash(attempt.app, [*attempt.draft.steps, "bash run.sh"])
    (made,) = {path.name for path in attempt.app.iterdir()} - before
    text = (attempt.app / made).read_text()
    (attempt.app / "run.sh").write_text(f"cat > {made} <<'EOF'\n{text}EOF\n")


def spoil(attempt: Attempt, steps: Sequence[str]) -> None:
    """Do it right, then change the last character of what was made."""
    before = set(attempt.app.rglob("*"))
    run_bash(attempt.app, steps)
    (made,) = set(attempt.app.rglob("*")) - before
    text = made.read_text().rstrip("\n")
    made.write_text(text[:-1] + ("1" if text[-1] != "1" else "2") + "\n")


def change_input(attempt: Attempt, steps: Sequence[str]) -> None:
    """Do it right, then add a line to the first file that was there."""
    before = sorted(path for path in attempt.app.rglob("*") if path.is_file())
    run_bash(attempt.app, steps)
    before[0].write_bytes(before[0].read_bytes() + b"more\n")


def test_families_are_listed_under_their_own_names_in_domains_of_the_sampler() -> None:
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.domain in DOMAINS
        assert family.levels == (1, 2, 3)
        assert family.summary.endswith(".")


@pytest.mark.parametrize(("name", "level"), POINTS)
def test_one_seed_gives_the_same_draft_and_another_seed_another(name: str, level: int) -> None:
    for seed in range(5):
        assert draw(name, level, seed) == draw(name, level, seed)
    assert draw(name, level, 0) != draw(name, level, 1)


def test_drafts_do_not_depend_on_the_order_of_sets() -> None:
    source = (
        "import hashlib, random\nfrom tmax.synth.families import FAMILIES\n"
        "print(hashlib.sha256(repr([FAMILIES[n].draw(random.Random(s), l) for n in FAMILIES for l in (1, 2, 3)"
        " for s in range(15)]).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", source], env={"PYTHONHASHSEED": salt, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(KeyError):
        FAMILIES["place"].draw(random.Random(0), 9)


@pytest.mark.parametrize(("name", "level"), POINTS)
def test_a_written_task_reads_back_as_it_was_drawn(name: str, level: int, tmp_path: Path) -> None:
    draft = draw(name, level, 3)
    task = read_task(write_task(draft, tmp_path).path)
    assert task.instruction == draft.instruction
    assert task.oracle_steps() == draft.steps
    assert task.unknown_keys == ()
    assert task.settings.agent_timeout == 120
    assert task.card["spec"] == draft.spec
    assert task.task_id.startswith(f"{name}-")
    assert write_task(draft, tmp_path / "again").hash == task.hash


def test_a_spec_names_family_level_domain_and_operation() -> None:
    for draft in each():
        spec = draft.spec
        assert set(spec) == {"family", "level", "domain", "operation", "verifier", "fixture", "language"}
        assert spec["domain"] == FAMILIES[spec["family"]].domain


def test_level_one_of_place_has_at_least_eight_operations_and_the_others_at_least_six() -> None:
    counts = {name: len(one_of_each(name, 1)) for name in FAMILIES}
    assert counts["place"] >= 8
    assert min(counts.values()) >= 6


def test_initial_tests_pass_before_anything_is_done(tries: Tries) -> None:
    for attempt in labelled(tries, "initial"):
        assert set(tries.outcomes(attempt).values()) == {"passed"}, attempt.draft.instruction


def test_final_tests_fail_untouched_by_judging_not_by_breaking(tries: Tries) -> None:
    for attempt in labelled(tries, "untouched"):
        outcomes = tries.outcomes(attempt)
        assert len(outcomes) >= 3
        assert "failed" in outcomes.values(), attempt.draft.instruction
        assert "error" not in outcomes.values()
        assert outcomes["test_other_files_are_unchanged"] == "passed"


def test_final_tests_pass_after_the_oracle(tries: Tries) -> None:
    for attempt in labelled(tries, "oracle"):
        assert set(tries.outcomes(attempt).values()) == {"passed"}, (attempt.draft.instruction, attempt.draft.steps)


def test_the_oracle_leaves_nothing_but_what_was_asked_for(tries: Tries) -> None:
    for attempt in labelled(tries, "oracle"):
        draft = attempt.draft
        known = {name.removeprefix("files/") for name in draft.files}
        for path in attempt.app.rglob("*"):
            name = path.relative_to(attempt.app).as_posix()
            asked = f"'{name}'" in draft.final_test or f"'{name}'" in draft.initial_test
            assert name in known or asked or any(other.startswith(f"{name}/") for other in known), (name, draft.steps)


@pytest.mark.parametrize("label", ["near miss", "one step left out", "frozen output", "spoilt output", "changed input"])
def test_wrong_solutions_fail(tries: Tries, label: str) -> None:
    survivors = [
        (attempt.draft.spec["operation"], attempt.draft.instruction, attempt.draft.steps)
        for attempt in labelled(tries, label)
        if set(tries.outcomes(attempt).values()) == {"passed"}
    ]
    assert survivors == []


def test_every_level_one_operation_has_near_misses() -> None:
    assert set(NEAR_MISSES) == {operation for name in FAMILIES for operation in one_of_each(name, 1)}


def test_forgiven_differences_pass(tmp_path: Path) -> None:
    tries = Tries(tmp_path)
    counted = next(draft for draft in each() if draft.spec["operation"] == "count_lines")
    out = counted.steps[0].split(" > ")[1]
    attempt = tries.add("spaces", counted, counted.final_test)
    run_bash(attempt.app, [*counted.steps, f'printf "   %s" "$(cat {out})" > {out}.new && mv {out}.new {out}'])
    written = next(draft for draft in each() if draft.spec["operation"] == "write")
    other = tries.add("no newline", written, written.final_test)
    run_bash(other.app, [written.steps[0].replace("echo", "echo -n")])
    tries.judge()
    for done in (attempt, other):
        assert set(tries.outcomes(done).values()) == {"passed"}


@pytest.mark.parametrize("name", FAMILIES)
def test_level_one_instructions_are_short_and_steps_shorter(name: str) -> None:
    for seed in range(300):
        draft = draw(name, 1, seed)
        assert 10 <= len(draft.instruction.split()) <= 25, draft.instruction
        assert 1 <= len(draft.steps) <= 2
        assert all(len(step) < 80 for step in draft.steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_level_one_steps_use_the_names_of_the_instruction(name: str) -> None:
    for seed in range(100):
        draft = draw(name, 1, seed)
        for word in re.findall(r"[a-z]+(?:-[a-z]+)*\.[a-z]+|[A-Z]{4,}", " ".join(draft.steps)):
            assert word in draft.instruction, (draft.instruction, draft.steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_seeds_give_hundreds_of_level_one_tasks(name: str) -> None:
    assert len({draw(name, 1, seed).instruction for seed in range(300)}) >= 290


@pytest.mark.parametrize("name", FAMILIES)
def test_level_one_operations_keep_one_form_of_command(name: str) -> None:
    forms: dict[str, set[str]] = {}
    for seed in range(200):
        draft = draw(name, 1, seed)
        form = re.sub(r'"[^"]*"', '"…"', draft.steps[0])
        form = re.sub(r"[a-z]+(-[a-z]+)*\.(txt|md|csv|tsv|log|conf|sh)\b", "…", form)
        if name == "mend":
            form = re.sub(r"s/[^/]*/[^/]*/", "s/…/…/", form)
        # What is left: directories, services, levels, numbers; the first word and the signs must agree.
        forms.setdefault(draft.spec["operation"], set()).add(re.sub(r"(?<= )[\w-]+(?=/?( |$))", "…", form))
    assert {operation: len(seen) for operation, seen in forms.items() if len(seen) > 1} in ({}, {"column": 4})


@pytest.mark.parametrize("name", FAMILIES)
def test_level_one_operations_have_five_wordings_or_more(name: str) -> None:
    source = Path(sys.modules[f"tmax.synth.families.{name}.level1"].__file__ or "").read_text()
    wordings = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and "{" in ast.unparse(node.value)
    ]
    assert len(wordings) == len(one_of_each(name, 1))
    assert min(len(set(map(ast.unparse, node.elts))) for node in wordings) >= 5


@pytest.mark.parametrize(("name", "level"), POINTS)
def test_instructions_are_prose_of_at_most_180_words_without_grader_talk(name: str, level: int) -> None:
    banned = (
        "the output should",
        "the file must contain",
        "ensure that",
        "step 1",
        "line 1:",
        "complete the following",
    )
    for seed in range(60):
        text = draw(name, level, seed).instruction
        assert len(text.split()) <= 180
        assert "\n" not in text
        assert not re.match(r"\d+[.)] |[-*] ", text)
        assert not re.search(r"[{}]", text)
        assert not any(phrase in text.lower() for phrase in banned)


@pytest.mark.parametrize(("name", "level"), POINTS)
def test_images_need_nothing_but_the_base_unless_python_is_used(name: str, level: int) -> None:
    for seed in range(30):
        draft = draw(name, level, seed)
        python = any("python3" in step for step in draft.steps)
        assert python == ("python3" in draft.dockerfile)
        assert not python or level == 3
        lines = [line for line in draft.dockerfile.splitlines() if not line.startswith("RUN command -v python3 || (")]
        assert lines == ["FROM ubuntu:24.04", "WORKDIR /app", "COPY files/ /app/"]
        assert draft.files
        assert all(file.startswith("files/") for file in draft.files)


def test_hidden_tests_are_self_contained_and_name_each_test_once() -> None:
    for draft in each():
        for source in (draft.initial_test, draft.final_test):
            tree = ast.parse(source)
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            assert len(names) == len(set(names)), draft.spec
            imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
            imported |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
            assert imported <= set(sys.stdlib_module_names)


def test_truth_has_four_parts_and_does_not_repeat_the_instruction() -> None:
    for draft in each():
        parts = (draft.truth.initial_state, draft.truth.final_state, draft.truth.invariants, draft.truth.guards)
        assert all(part.endswith(".") for part in parts), parts
        assert draft.instruction not in " ".join(parts)


def test_no_word_hides_in_another_word_or_in_a_message() -> None:
    words = [*NOUNS, *ADJECTIVES, *PEOPLE, *CITIES, *SERVICES]
    assert len(words) == len(set(words))
    assert len(NOUNS) >= 200
    assert len(ADJECTIVES) >= 60
    haystacks = [*words, *(part for message in MESSAGES for part in message.split()), *map(str.lower, LOG_LEVELS)]
    hidden = [(word, other) for word, other in itertools.product(words, haystacks) if word in other and word != other]
    assert hidden == []


def test_a_fault_that_cannot_be_put_right_in_one_place_is_refused() -> None:
    assert broken(["sort -rn a", "head -n 3"], [Fault("sort -rn", "sort -n")]) == ["sort -n a", "head -n 3"]
    with pytest.raises(ValueError, match="`-n` occurs 2 times"):
        broken(["sort -rn a", "head -n 3"], [Fault("-rn", "-n")])
    for level, seed in itertools.product((1, 2, 3), range(150)):
        draw("mend", level, seed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_mended_script_is_run_as_the_owner_of_the_directory(tmp_path: Path) -> None:
    tries = Tries(tmp_path)
    draft = draw("mend", 1, 0)
    check = "\n\ndef test_user():\n    assert run_script({}, 'user.txt') == ['1000']\n"
    attempt = tries.add("owner", draft, draft.final_test + check)
    (attempt.app / "run.sh").write_text("id -u > user.txt\n")
    os.chown(attempt.app, 1000, 1000)
    tries.judge()
    assert tries.outcomes(attempt)["test_user"] == "passed"
