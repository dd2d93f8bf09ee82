"""The report of a synthetic run: figures counted by hand, and a page that shows the same ones to a person."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tmax.config import RunConfig, dump_config, parse_config
from tmax.errors import ConfigError, StoreError
from tmax.records import (
    Calibration,
    Evidence,
    Failure,
    Gate,
    GroupRow,
    Outcome,
    Purpose,
    Spec,
    StepRow,
    TaskRow,
    TestReport,
    TestResult,
    Timings,
    Trajectory,
    Trial,
    TrialKey,
    Turn,
)
from tmax.report.page import count, duration, percent, points, render_page
from tmax.report.plots import METRICS, moving_mean, short_number
from tmax.report.story import choose_examples, describe_trial, shorten, visible
from tmax.report.summary import read_summary, summarise
from tmax.stages.report import report
from tmax.stats import p_mixed_group, wilson_interval
from tmax.store import Store, open_store

NASTY = (
    '<script>alert("x")</script> & <img src=https://evil.example/x.png onerror=go()> {{ 7 * 7 }} \x00\x1b[31mred\x1b[0m'
)

FAMILIES = ("mend", "place", "reshape", "tally")
STEPS, PROMPTS, GROUP, SAMPLES = 20, 3, 4, 4


def a_config() -> RunConfig:
    data = {
        "name": "synthetic",
        "seed": 3,
        "sample": {
            "families": [{"name": name, "levels": [1, 2]} for name in FAMILIES], "num_train": 24, "num_heldout": 32,
        },
        "sft": {"model": {}},
        "train": {"num_steps": STEPS, "prompts_per_step": PROMPTS, "group_size": GROUP},
        "eval": {"samples": SAMPLES},
    }  # fmt: skip
    return parse_config(data, source="synthetic")


def a_story(passed: bool, words: str) -> Trajectory:
    turns = [
        Turn(
            reply="Look first.\n<bash>ls -la /app</bash>",
            command="ls -la /app",
            observation=f"total 2\n{words}\n(exit_code=0)",
            exit_code=0,
            seconds=0.03,
        ),
        Turn(reply="I think the file is", command=None, observation="No usable command.", seconds=0.0),
        Turn(
            reply="sort in.txt > out.txt",
            command="sort in.txt > out.txt",
            observation="(done)",
            exit_code=0 if passed else 2,
            seconds=0.21,
        ),
        Turn(reply="echo COMPLETE_TASK", command="echo COMPLETE_TASK", observation=None, seconds=0.01),
    ]
    stop = "submitted" if passed else "max_calls"
    return Trajectory.model_validate(
        {"system": "You work in a shell.", "instruction": f"Sort it. {words}", "turns": turns, "stop": stop}
    )


def a_trial(
    key: TrialKey,
    outcome: Outcome,
    *,
    passed: bool = False,
    kind: str | None = None,
    retries: int = 0,
    words: str = "plain words",
) -> Trial:
    failure = Failure.model_validate(
        {"message": f"it broke: {words}", "hint": "mend it", "kind": kind, "log_tail": "tail"}
    )
    scored = outcome in (
        Outcome.PASSED,
        Outcome.FAILED,
        Outcome.PARTIAL,
        Outcome.AGENT_TIMEOUT,
        Outcome.CONTEXT_EXHAUSTED,
    )
    status = "passed" if passed else "failed"
    tests = (
        TestResult(name="test_sorted", status=status, seconds=0.01, message="" if passed else f"assert {words}"),
        TestResult(name="test_kept", status="passed", seconds=0.01),
    )
    retry = Failure(message="no route", kind="network")
    return Trial.model_validate(
        {
            "key": key, "task_hash": "h", "policy": "tiny", "outcome": outcome, "policy_version": 5,
            "reward": float(passed) if scored else None, "failure": None if scored else failure,
            "report": TestReport(tests=tests, exit_code=0 if passed else 1, seconds=0.1) if scored else None,
            "trajectory": a_story(passed, words), "timings": Timings(start=0.1, agent=2.5, verify=0.4),
            "retries": (retry,) * retries,
        }
    )  # fmt: skip


def draw(rng: random.Random, key: TrialKey, rate: float, words: str = "plain words") -> Trial:
    """A trial that fails to be scored now and then, else passes at `rate`."""
    luck = rng.random()
    if luck < 0.02:
        return a_trial(key, Outcome.INFRA_ERROR, kind=rng.choice(["disk", "network_pool"]), retries=2, words=words)
    if luck < 0.04:
        return a_trial(key, Outcome.VERIFIER_TIMEOUT, words=words)
    if luck < 0.05:
        return a_trial(key, Outcome.AGENT_ERROR)
    passed = rng.random() < rate
    if luck < 0.10:
        return a_trial(key, rng.choice([Outcome.AGENT_TIMEOUT, Outcome.CONTEXT_EXHAUSTED]), passed=passed)
    return a_trial(key, Outcome.PASSED if passed else Outcome.FAILED, passed=passed, retries=luck > 0.97, words=words)


def add_tasks(store: Store) -> list[TaskRow]:
    """56 specs, 55 tasks, 52 accepted (21 to train on, 31 held out): one rejected, one unknown, one never tried."""
    specs = [
        Spec(
            index=i,
            family=FAMILIES[i % 4],
            level=1 + i // 4 % 2,
            domain="text",
            split="train" if i < 24 else "heldout",
        )
        for i in range(56)
    ]
    store.add_specs(specs)
    rows = [TaskRow(task_id=f"{s.family}-{s.index:04d}", spec=s, task_hash="h") for s in specs[:55]]
    for row in rows:
        store.add_task(row)
        verdict, detail = {5: ("REJECT", f"initial tests failed {NASTY}"), 6: ("UNKNOWN", "no engine")}.get(
            row.spec.index, ("ACCEPT", "")
        )
        if row.spec.index != 7:
            gates = [
                Gate(name="readable", verdict="ACCEPT", detail=""),
                Gate.model_validate({"name": "initial_passes", "verdict": verdict, "detail": detail}),
            ]
            store.add_evidence(Evidence(task_id=row.task_id, task_hash="h", gates=tuple(gates)))
    return [row for row in rows if row.spec.index not in (5, 6, 7)]


def skill(row: TaskRow, step: int) -> float:
    """A pass rate that grows with training and falls with level; one family learns nothing."""
    ease = 0.45 if row.spec.level == 1 else 0.2
    gain = 0.0 if row.spec.family == "reshape" else 0.5 * min(1.0, step / STEPS)
    return 0.0 if row.spec.index % 11 == 0 else min(0.97, ease + gain)


def evaluate(store: Store, rng: random.Random, rows: list[TaskRow], purpose: Purpose, step: int) -> None:
    for row in rows:
        for index in range(SAMPLES):
            key = TrialKey(purpose=purpose, task_id=row.task_id, index=index)
            store.add_trial(draw(rng, key, skill(row, step), NASTY if index == 0 else "plain words"))


def train(store: Store, rng: random.Random, rows: list[TaskRow]) -> None:
    drawn: Counter[str] = Counter()
    for step in range(STEPS):
        groups: list[GroupRow] = []
        for row in rng.sample(rows, 5):
            first = drawn[row.task_id]
            drawn[row.task_id] += GROUP
            trials = [
                draw(rng, TrialKey(purpose="train", task_id=row.task_id, index=first + i), skill(row, step))
                for i in range(GROUP)
            ]
            for trial in trials:
                store.add_trial(trial)
            rewards = tuple(trial.reward for trial in trials if trial.reward is not None)
            kept = sum(group.fate == "kept" for group in groups)
            if len(rewards) < 3:
                fate = "too_few_scored"
            elif min(rewards) == max(rewards):
                fate = "all_one" if max(rewards) else "all_zero"
            else:
                fate = "kept" if kept < PROMPTS else "surplus"
            groups.append(
                GroupRow.model_validate(
                    {
                        "step": step,
                        "task_id": row.task_id,
                        "first_index": first,
                        "size": GROUP,
                        "rewards": rewards,
                        "fate": fate,
                    }
                )
            )
        every = [reward for group in groups for reward in group.rewards]
        metrics = {name: rng.uniform(0.5, 1.5) * (1 + step / 40) for name in METRICS} | {
            "solve_rate_all": sum(every) / len(every), "tokens": 1000.0 + step, "loss": rng.gauss(0, 0.02),
            "groups_drawn": 5.0, "my_own_metric": float(step), "seconds_rollout": rng.uniform(3, 5),
        }  # fmt: skip
        store.add_step(StepRow(step=step, version=step + 1, metrics=metrics), groups)


def fill(store: Store) -> None:
    """A whole run, the same every time."""
    rng = random.Random("synthetic")
    rows = add_tasks(store)
    trainable = [row for row in rows if row.spec.split == "train"]
    heldout = [row for row in rows if row.spec.split == "heldout"]
    for row in rows:
        for purpose in ("validate_initial", "validate_noop", "validate_oracle"):
            key = TrialKey.model_validate({"purpose": purpose, "task_id": row.task_id, "index": 0})
            good = purpose != "validate_noop"
            store.add_trial(a_trial(key, Outcome.PASSED if good else Outcome.FAILED, passed=good))
    for row in trainable:
        trials = [
            draw(rng, TrialKey(purpose="calibrate", task_id=row.task_id, index=i), skill(row, 0))
            for i in range(SAMPLES)
        ]
        for trial in trials:
            store.add_trial(trial)
        scored, passed = sum(t.reward is not None for t in trials), sum(t.reward == 1.0 for t in trials)
        rate = passed / scored if scored else None
        store.add_calibration(
            Calibration(
                task_id=row.task_id, trials=SAMPLES, scored=scored, passed=passed, pass_rate=rate,
                interval=wilson_interval(passed, scored) if scored else None,
                p_mixed=None if rate is None else p_mixed_group(rate, GROUP),
                in_band=rate is not None and 0 < rate < 1,
            )
        )  # fmt: skip
    evaluate(store, rng, heldout, "eval_before", 0)
    train(store, rng, [row for row in trainable if skill(row, 0) > 0])
    evaluate(store, rng, heldout, "eval_after", STEPS)
    spent = {"sample": 0.004, "generate": 1.9, "validate": 61.0, "calibrate": 95.5, "sft": 240.0, "eval_before": 80.0}
    for name, seconds in (spent | {"train": 4210.0, "eval_after": 84.0}).items():
        store.set_stage(name, "done", seconds=seconds)
    store.set_stage("report", "running")


def begin(run_dir: Path) -> Store:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(a_config()))
    return open_store(run_dir / "run.db")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "synthetic"
    with begin(run_dir) as store:
        fill(store)
    assert report(run_dir) == run_dir / "report" / "index.html"
    return run_dir


def fill_small(store: Store) -> None:
    """Two held-out tasks and two trials each on both sides: small enough to count by hand."""
    specs = [Spec(index=i, family="f", level=i + 1, domain="d", split="heldout") for i in range(2)]
    store.add_specs(specs)
    for spec, name in zip(specs, "ab", strict=True):
        store.add_task(TaskRow(task_id=name, spec=spec, task_hash="h"))
    rows: list[tuple[Purpose, str, Outcome, bool, str | None]] = [
        ("eval_before", "a", Outcome.PASSED, True, None),
        ("eval_before", "a", Outcome.FAILED, False, None),
        ("eval_before", "b", Outcome.PARTIAL, False, None),
        ("eval_before", "b", Outcome.VERIFIER_TIMEOUT, False, None),
        ("eval_after", "a", Outcome.PASSED, True, None),
        ("eval_after", "a", Outcome.PASSED, True, None),
        ("eval_after", "b", Outcome.AGENT_TIMEOUT, True, None),
        ("eval_after", "b", Outcome.INFRA_ERROR, False, "disk"),
    ]
    for place, (purpose, task, outcome, passed, kind) in enumerate(rows):
        key = TrialKey(purpose=purpose, task_id=task, index=place % 2)
        trial = a_trial(key, outcome, passed=passed, kind=kind, retries=2 if kind else 0, words=NASTY)
        if outcome is Outcome.PARTIAL:
            trial = trial.model_copy(update={"reward": 0.5})
        store.add_trial(trial)


# figures


def test_figures_that_can_be_counted_by_hand(tmp_path: Path) -> None:
    with begin(tmp_path) as store:
        fill_small(store)
        s = summarise(store, a_config())
    assert (s.trials, s.scored, s.errors_by_kind) == (8, 6, {"infra_error:disk": 1, "verifier_timeout": 1})
    assert (s.retries, s.retries_by_kind, s.passed_at_a_limit) == (2, {"network": 2}, 1)
    assert s.outcomes["eval_before"] == {"failed": 1, "partial": 1, "passed": 1, "verifier_timeout": 1}
    # Before: a 1/2, b 0/1 (a partial reward is no pass). After: a 2/2, b 1/1. Differences +1/2 and +1.
    assert (s.pass_rate_before, s.pass_rate_after, s.difference) == (0.25, 1.0, 0.75)
    assert (s.difference_ci, s.difference_tasks) == ((0.5, 1.0), 2)
    assert s.before is not None
    assert s.after is not None
    counted = {row.policy: (row.counted, row.pooled, row.by_task and row.by_task.value) for row in s.before.policies}
    assert counted == {
        "scored_only": (3, 1 / 3, 0.25),
        "leaderboard": (4, 0.25, 0.25),
        "errors_as_zero": (4, 0.25, 0.25),
    }
    counted = {row.policy: (row.counted, row.pooled, row.by_task and row.by_task.value) for row in s.after.policies}
    assert counted == {"scored_only": (3, 1.0, 1.0), "leaderboard": (3, 1.0, 1.0), "errors_as_zero": (4, 0.75, 0.75)}
    assert s.before.policies[0].pooled_interval == wilson_interval(1, 3)
    # pass@2 needs two scored trials: task a only, 1 - C(1,2)/C(2,2) = 1.
    assert [(row.k, row.value, row.tasks) for row in s.before.pass_at_k] == [(1, 0.25, 2), (2, 1.0, 1)]
    found = [
        (row.level, *(part and part.value for part in (row.before, row.after, row.difference))) for row in s.breakdown
    ]
    assert found == [(None, 0.25, 1.0, 0.75), (1, 0.5, 1.0, 0.5), (2, 0.0, 1.0, 1.0)]


def test_figures_of_a_whole_run_agree_with_a_recount(whole_run: Path) -> None:
    s = read_summary(whole_run)
    with open_store(whole_run / "run.db", write=False) as store:
        trials, groups, calibration = list(store.trials()), store.groups(), store.calibration().values()
        tokens = sum(step.metrics["tokens"] for step in store.steps())
    assert (s.tasks_sampled, s.tasks_generated, s.tasks_valid, s.heldout_tasks) == (56, 55, 52, 31)
    assert (s.trials, s.scored) == (len(trials), sum(trial.reward is not None for trial in trials))
    assert sum(s.errors_by_kind.values()) == s.trials - s.scored > 0
    assert len(s.errors_by_kind) >= 4
    assert sum(sum(row.values()) for row in s.outcomes.values()) == s.trials
    assert s.retries == sum(len(trial.retries) for trial in trials) > 0
    rates = []
    for purpose in ("eval_before", "eval_after"):
        tasks: dict[str, list[bool]] = {}
        for trial in trials:
            if trial.key.purpose == purpose and trial.reward is not None:
                tasks.setdefault(trial.key.task_id, []).append(trial.reward == 1.0)
        rates.append(sum(sum(task) / len(task) for task in tasks.values()) / len(tasks))
    assert [s.pass_rate_before, s.pass_rate_after] == pytest.approx(rates)
    assert s.difference == pytest.approx(rates[1] - rates[0])  # every task is scored on both sides
    assert s.difference_ci is not None
    assert s.difference_ci[0] < rates[1] - rates[0] < s.difference_ci[1]
    assert s.groups_by_fate == dict(Counter(group.fate for group in groups).most_common())
    assert (s.train_steps, s.tokens_trained) == (STEPS, tokens)
    assert s.calibration is not None
    assert sum(number for _, number in s.calibration.histogram) == s.calibration.measured == 21
    assert dict(s.calibration.histogram)["0"] == sum(row.pass_rate == 0 for row in calibration) > 0
    assert s.seconds_by_stage["train"] == 4210.0
    assert set(s.stage_states.values()) == {"done"}  # the report does not call itself unfinished
    assert [(row.name, row.train, row.heldout) for row in s.funnel][:4] == [
        ("sampled", 24, 32), ("generated", 24, 31), ("accepted", 21, 31), ("calibrated", 21, None),
    ]  # fmt: skip
    trained = {group.task_id for group in groups if group.fate == "kept"}
    assert (s.funnel[-1].name, s.funnel[-1].train) == ("trained on", len(trained))
    assert [(row.gate, row.verdict, row.tasks) for row in s.rejections] == [
        ("initial_passes", "REJECT", 1), ("initial_passes", "UNKNOWN", 1),
    ]  # fmt: skip


def test_the_same_run_gives_the_same_figures_and_another_seed_other_intervals(tmp_path: Path) -> None:
    with begin(tmp_path) as store:
        rng = random.Random("x")
        rows = [row for row in add_tasks(store) if row.spec.split == "heldout"]
        evaluate(store, rng, rows, "eval_before", 0)
        first, again = summarise(store, a_config()), summarise(store, a_config())
        other = summarise(store, a_config().model_copy(update={"seed": 4}))
    assert first == again
    assert first.pass_rate_before == other.pass_rate_before
    assert first.before != other.before


def test_a_reject_is_blamed_on_the_gate_that_rejected_and_not_on_an_unknown_one(tmp_path: Path) -> None:
    gates = (
        Gate(name="untouched_fails", verdict="UNKNOWN", detail="no engine"),
        Gate(name="oracle_passes", verdict="REJECT", detail="the oracle fails"),
    )
    with begin(tmp_path) as store:
        store.add_task(
            TaskRow(task_id="t", spec=Spec(index=0, family="f", level=1, domain="d", split="train"), task_hash="h")
        )
        store.add_evidence(Evidence(task_id="t", task_hash="h", gates=gates))
        (row,) = summarise(store, a_config()).rejections
    assert (row.gate, row.verdict, row.tasks, row.example) == ("oracle_passes", "REJECT", 1, "t: the oracle fails")


# half-done runs


def _nothing(store: Store) -> None:
    pass


def _started(store: Store) -> None:
    store.set_stage("generate", "running", seconds=0.1)


def _tasks_only(store: Store) -> None:
    add_tasks(store)


def _only_failures(store: Store) -> None:
    (row, *_) = add_tasks(store)
    store.add_trial(a_trial(TrialKey(purpose="eval_before", task_id=row.task_id, index=0), Outcome.AGENT_ERROR))


def _before_only(store: Store) -> None:
    rows = [row for row in add_tasks(store) if row.spec.split == "heldout"][:3]
    evaluate(store, random.Random("x"), rows, "eval_before", 0)


def _one_strange_step(store: Store) -> None:
    store.add_step(StepRow(step=0, version=1, metrics={"loss": float("nan"), "tokens": float("nan"), "$a_b$": 1.0}), [])


@pytest.mark.parametrize(
    ("fill_part", "figures"),
    [
        (_nothing, (None, None, None, None, 0, None, None)),
        (_started, (None, 0, None, None, 0, None, None)),
        (_tasks_only, (56, 55, 52, 31, 0, None, None)),
        (_only_failures, (56, 55, 52, 31, 1, None, None)),
        (_before_only, (56, 55, 52, 31, 12, None, None)),
        (_one_strange_step, (None, None, None, None, 0, 1, None)),
    ],
)
def test_a_half_done_run_gives_a_page_and_none_for_what_is_missing(
    tmp_path: Path, fill_part: Callable[[Store], None], figures: tuple[int | None, ...]
) -> None:
    with begin(tmp_path) as store:
        fill_part(store)
        page = Page(report(tmp_path))  # while the writer is still there
    s = json.loads((tmp_path / "report" / "summary.json").read_text())
    names = (
        "tasks_sampled",
        "tasks_generated",
        "tasks_valid",
        "heldout_tasks",
        "trials",
        "train_steps",
        "tokens_trained",
    )
    assert tuple(s[name] for name in names) == figures
    assert (s["pass_rate_after"], s["difference"], s["difference_ci"]) == (None, None, None)
    assert "difference" not in page.figures
    assert ("pass_rate_before" in page.figures) == (fill_part is _before_only)
    assert "not evaluated yet" in page.text


# the page


VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Reads a page and refuses tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.figures: dict[str, tuple[str, str]] = {}
        """Value and shown text of every <data> by id."""
        self.blocks: list[str] = []
        """Text of every <pre>."""
        self.text = ""
        self._open: list[tuple[str, str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        named = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in named.items()]
        if tag == "pre":
            self.blocks.append("")
        if tag not in VOID:
            self._open.append((tag, named.get("id", ""), named.get("value", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open[-1][0] == tag
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        for tag, name, value in self._open:
            if tag == "data":
                self.figures[name] = (value, data)
            if tag == "pre":
                self.blocks[-1] += data


@pytest.fixture(scope="module")
def page(whole_run: Path) -> Page:
    return Page(whole_run / "report" / "index.html")


def test_every_number_of_the_headline_is_that_of_the_summary(whole_run: Path, page: Page) -> None:
    s = json.loads((whole_run / "report" / "summary.json").read_text())
    expected = {name: (s[name], percent(s[name])) for name in ("pass_rate_before", "pass_rate_after")}
    expected["difference"] = (s["difference"], points(s["difference"]))
    expected["difference_low"] = (s["difference_ci"][0], points(s["difference_ci"][0]))
    expected["difference_high"] = (s["difference_ci"][1], points(s["difference_ci"][1]))
    for name in ("tasks_generated", "tasks_valid", "trials", "scored", "train_steps", "tokens_trained"):
        expected[name] = (s[name], count(s[name]))
    expected["errors"] = (s["trials"] - s["scored"], count(s["trials"] - s["scored"]))
    assert {name: (float(value), text) for name, (value, text) in page.figures.items()} == expected


def test_the_summary_on_disk_is_what_the_command_prints(whole_run: Path) -> None:
    text = (whole_run / "report" / "summary.json").read_text()
    assert text == read_summary(whole_run).model_dump_json(indent=2) + "\n"
    wanted = "tasks_generated tasks_valid trials scored errors_by_kind heldout_tasks pass_rate_before pass_rate_after"
    assert {*wanted.split(), "difference", "difference_ci", "train_steps", "seconds_by_stage"} <= set(json.loads(text))


def test_the_page_asks_the_network_for_nothing(page: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert "//" not in value, (tag, name, value)
        if name in ("href", "xlink:href", "src", "clip-path"):
            assert value.startswith(("#", "url(#")), (tag, name, value)
    for words in ("@import", "url("):  # the text holds the style sheet too
        assert words not in page.text


def test_what_a_trial_printed_is_shown_as_text(whole_run: Path, page: Page) -> None:
    shown = visible(NASTY)
    assert sum(shown in block for block in page.blocks) >= 8
    assert "{{ 7 * 7 }}" in page.text
    raw = (whole_run / "report" / "index.html").read_text(encoding="utf-8")
    assert "\x00" not in raw
    assert "\x1b" not in raw


def test_every_turn_of_an_example_can_be_read(page: Page) -> None:
    for part in ("Look first.\n<bash>ls -la /app</bash>", "ls -la /app", "sort in.txt > out.txt", "No usable command."):
        assert part in page.blocks
    for words in ("turn 4", "hidden tests", "test_sorted", "evaluation before", "evaluation after", "exit code 2"):
        assert words in page.text


def test_ids_are_unique_and_what_is_referred_to_exists(page: Page) -> None:
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for _, name, value in page.attributes:
        if name == "xlink:href":
            assert value[1:] in ids
        if name == "clip-path":
            assert value.removeprefix("url(#").removesuffix(")") in ids


def test_plots_are_on_the_page_in_its_colours_and_beside_it_as_pictures(whole_run: Path, page: Page) -> None:
    files = {path.name: path.read_bytes() for path in (whole_run / "report").iterdir()}
    pictures = {"before_after.png", "calibration.png", "learning_curve.png", "metrics.png", "pass_at_k.png"}
    assert set(files) == pictures | {"index.html", "summary.json"}
    for name in pictures:
        assert files[name].startswith(b"\x89PNG")
        assert len(files[name]) > 5000
    assert page.tags["svg"] == 4 + len(METRICS)  # the curve stands apart, and one metric is not among the known ones
    for unit in ("nats per token", "tokens per step", "seconds per step", "my_own_metric", "training step"):
        assert unit in page.text
    svg = files["index.html"].decode().split("<svg", 1)[1].split("</svg>")[0]
    assert "var(--after)" in svg
    assert "#0" not in svg.replace("url(#", "").replace('"#', "")


def test_the_page_names_outcomes_rejections_and_stages(page: Page) -> None:
    for words in (
        "verifier timeout", "infra error, disk", "context exhausted", "initial passes", "no engine",
        "it broke: plain words", "1\u00a0h 10\u00a0min", "calibrated in band", "no trial passed", "reshape", "level 2",
        "num_heldout: 32",
    ):  # fmt: skip
        assert words in page.text, words


def test_the_page_says_in_words_what_the_interval_means(tmp_path: Path, page: Page) -> None:
    assert "Training raised the pass rate" in page.text
    with begin(tmp_path) as store:
        fill_small(store)
        assert "too few to say" in Page(report(tmp_path)).text
        s = summarise(store, a_config()).model_copy(update={"difference_tasks": 30})
    for interval, words in (((-0.1, 0.2), "includes zero"), ((-0.2, -0.1), "lowered"), ((0.1, 0.2), "raised")):
        text = render_page(s.model_copy(update={"difference_ci": interval}), a_config(), {}, [])
        assert words in text


# writing


def test_a_report_made_again_is_the_same_to_the_byte_and_clears_stale_plots(tmp_path: Path) -> None:
    with begin(tmp_path) as store:
        fill_small(store)
    report(tmp_path)
    folder = tmp_path / "report"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "metrics.png").write_bytes(b"of an earlier report")
    (folder / "notes.txt").write_text("mine")
    report(tmp_path)
    second = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert second.pop("notes.txt") == b"mine"
    assert second == first
    assert (folder / "index.html").stat().st_mode & 0o777 == 0o644


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for function in (report, read_summary):
        with pytest.raises(StoreError, match="no run at"):
            function(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []
    begin(tmp_path).close()
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="no config file"):
        report(tmp_path)


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    begin(tmp_path).close()
    (tmp_path / "report").write_text("a file in the way")
    with pytest.raises(StoreError, match="cannot write") as caught:
        report(tmp_path)
    assert caught.value.hint


def test_plots_are_loaded_only_when_they_are_drawn() -> None:
    script = "import sys, tmax.stages.report, tmax.report.summary; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


# stories


def test_a_trial_is_told_turn_by_turn_in_plain_text() -> None:
    key = TrialKey(purpose="eval_after", task_id="t", index=3)
    text = describe_trial(a_trial(key, Outcome.FAILED, retries=1, words=NASTY))
    for line in (
        "task     t", "trial    eval_after 3", "policy   tiny, version 5", "outcome  failed, reward 0",
        "retry    network: no route", "turn 1  (0.03 s, exit code 0)", "    <bash>ls -la /app</bash>",
        "  no usable command", "turn 4  (0.01 s, exit code none)", "stopped  max_calls, after 4 turns",
        "  failed   test_sorted  (0.01 s)", "  passed   test_kept  (0.01 s)",
    ):  # fmt: skip
        assert line in text.split("\n"), line
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "␛[31mred" in text


def test_a_failed_trial_is_told_with_its_hint_and_log() -> None:
    key = TrialKey(purpose="train", task_id="t", index=0)
    trial = a_trial(key, Outcome.INFRA_ERROR, kind="disk").model_copy(update={"trajectory": None})
    text = describe_trial(trial)
    for line in ("outcome  infra_error, no reward", "  disk: it broke: plain words", "  hint: mend it", "    tail"):
        assert line in text.split("\n")
    assert "no trajectory was kept" in text


def test_examples_pair_a_pass_from_after_with_a_fail_from_before(tmp_path: Path) -> None:
    with begin(tmp_path) as store:
        fill_small(store)
        examples = choose_examples(store, limit=5)
        keys = [(e.task.task_id, e.passing and e.passing.key, e.failing and e.failing.key) for e in examples]
        assert all(e.passing is not None and e.passing.trajectory is not None for e in examples)
        assert len(choose_examples(store, limit=1)) == 1
    after, before = "eval_after", "eval_before"
    assert [(task, p and (p.purpose, p.index), f and (f.purpose, f.index)) for task, p, f in keys] == [
        ("a", (after, 0), (before, 1)), ("b", (after, 0), (before, 0)),
    ]  # fmt: skip


def test_examples_take_the_families_in_turn(whole_run: Path) -> None:
    with open_store(whole_run / "run.db", write=False) as store:
        examples = choose_examples(store, limit=8)
    assert sorted(e.task.spec.family for e in examples[:4]) == sorted(FAMILIES)
    assert len({e.task.task_id for e in examples}) == 8
    assert all(e.task.spec.split == "heldout" for e in examples[:4])
    for example in examples[:4]:  # every one of these tasks has failed before and passed after
        assert example.passing is not None
        assert example.failing is not None
        assert (example.passing.key.purpose, example.failing.key.purpose) == ("eval_after", "eval_before")


# words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.00001, "0 s"),
        (0.42, "0.42 s"),
        (9.4, "9.4 s"),
        (9.96, "10 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds).replace("\u00a0", " ") == words


def test_numbers_are_said_with_the_right_sign_and_spaces() -> None:
    assert (percent(0.125), percent(1.0)) == ("12.5\u00a0%", "100.0\u00a0%")
    assert [points(value) for value in (0.25, -0.125, 0.0, -0.0001)] == ["+25.0", "−12.5", "0.0", "0.0"]
    assert (count(999), count(1234567)) == ("999", "1\u202f234\u202f567")
    assert [short_number(value) for value in (0.25, -3.0, 12000, 3.5e6, 2e-6)] == [
        "0.25",
        "−3",
        "12 k",
        "3.5 M",
        "2e−06",
    ]


def test_long_texts_keep_both_ends() -> None:
    assert shorten("a" * 100, 100) == "a" * 100
    text = shorten("a" * 500 + "b" * 500, 100)
    assert text == "a" * 50 + "\n… 900 characters left out …\n" + "b" * 50


def test_control_characters_become_visible_and_line_ends_plain() -> None:
    assert visible("a\r\nb\tc\x00\x1b\x7f\u202e\x9b") == "a\nb\tc␀␛␡\ufffd\ufffd"


def test_a_moving_mean_is_centred_and_narrower_at_the_ends() -> None:
    assert moving_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert moving_mean([5.0], 9) == [5.0]
