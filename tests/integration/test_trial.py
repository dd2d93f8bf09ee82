"""Trials in real sandboxes: one path for validation, rollouts and evaluation, one typed outcome each."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tmax.agent.reply import SUBMIT_COMMAND
from tmax.config import AgentConfig, BubblewrapConfig, InfraConfig
from tmax.errors import PolicyError
from tmax.policy.scripted import Careless, Noop, Oracle, Script
from tmax.progress import Silent
from tmax.proof import prove
from tmax.records import Outcome, Purpose, TrialKey
from tmax.store import open_store
from tmax.synth.families import FAMILIES
from tmax.task import FileSpec, Settings, Task, TaskDraft, Truth, read_task, write_task
from tmax.trial import Job, World, run_trial, run_trials

pytestmark = pytest.mark.bwrap

INITIAL = "from pathlib import Path\ndef test_input():\n    assert Path('in.txt').read_text() == 'hello\\n'\n"
FINAL = (
    "from pathlib import Path\n"
    "def test_output():\n    assert Path('out.txt').read_text() == 'HELLO\\n'\n"
    "def test_input_is_kept():\n    assert Path('in.txt').read_text() == 'hello\\n'\n"
)


SETTINGS = Settings(agent_timeout=20, verifier_timeout=20)


@pytest.fixture
def world() -> World:
    agent = AgentConfig(prompts="agent_brief", command_timeout=5, max_calls=6)
    return World(BubblewrapConfig(), "test-trial", agent, InfraConfig(retries=1, backoff=0.01), seed=1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Task]:
    def build(initial: str = INITIAL, final: str = FINAL, steps: tuple[str, ...] = ("tr a-z A-Z < in.txt > out.txt",),
              dockerfile: str = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files/ /app/\n",
              settings: Settings = SETTINGS) -> Task:  # fmt: skip
        draft = TaskDraft(
            instruction="Write in.txt in capitals to out.txt.",
            dockerfile=dockerfile,
            files={"files/in.txt": FileSpec(b"hello\n")},
            initial_test=initial,
            final_test=final,
            steps=steps,
            truth=Truth("in.txt", "out.txt", "in.txt stays", "none"),
            spec={"family": "hand", "level": 1, "domain": "file_operations"},
            settings=settings,
        )
        return write_task(draft, tmp_path / "tasks")

    return build


def key(purpose: Purpose = "rollout", index: int = 0) -> TrialKey:
    return TrialKey(purpose=purpose, task_id="t", index=index)


def test_the_oracle_passes_and_its_trajectory_reads_turn_by_turn(world: World, make: Callable[..., Task]) -> None:
    trial = run_trial(world, make(), Oracle(), key())
    assert trial.outcome is Outcome.PASSED
    assert trial.reward == 1.0
    assert trial.trajectory is not None
    assert [turn.command for turn in trial.trajectory.turns] == ["tr a-z A-Z < in.txt > out.txt", SUBMIT_COMMAND]
    assert trial.trajectory.stop == "submitted"
    assert trial.report is not None
    assert [test.status for test in trial.report.tests] == ["passed", "passed"]


def test_doing_nothing_fails_with_the_failing_test_named(world: World, make: Callable[..., Task]) -> None:
    trial = run_trial(world, make(), Noop(), key())
    assert trial.outcome is Outcome.FAILED
    assert trial.reward == 0.0
    assert trial.report is not None
    assert {test.name.split("::")[-1]: test.status for test in trial.report.tests} == {
        "test_output": "failed",
        "test_input_is_kept": "passed",
    }


def test_partial_reward_counts_the_tests_that_fail_untouched_and_an_invariant_is_a_gate(
    world: World, make: Callable[..., Task]
) -> None:
    final = FINAL + "def test_second():\n    assert Path('two.txt').exists()\n"
    task = make(final=final)
    untouched = run_trial(world, task, Noop(), key("validate_noop")).report
    half = Script(("tr a-z A-Z < in.txt > out.txt",))
    trial = run_trial(world, task, half, key(), reward="partial", noop_report=untouched)
    assert trial.outcome is Outcome.PARTIAL
    assert trial.reward == pytest.approx(0.5 / 1.2)
    broken = Script(("tr a-z A-Z < in.txt > out.txt; rm in.txt",))
    trial = run_trial(world, task, broken, key(), reward="partial", noop_report=untouched)
    assert trial.reward == 0.0


@pytest.mark.parametrize(
    ("final", "outcome"),
    [
        ("import os\ndef test_x():\n    os._exit(3)\n", Outcome.VERIFIER_ERROR),
        ("import nothing_like_this\n", Outcome.VERIFIER_ERROR),
        ("x = 1\n", Outcome.VERIFIER_ERROR),
        ("import time\ndef test_x():\n    time.sleep(60)\n", Outcome.VERIFIER_TIMEOUT),
    ],
)
def test_a_verifier_that_breaks_is_a_failure_and_never_a_reward(
    world: World, make: Callable[..., Task], final: str, outcome: Outcome
) -> None:
    task = make(final=final, settings=Settings(agent_timeout=20, verifier_timeout=2))
    trial = run_trial(world, task, Oracle(), key())
    assert trial.outcome is outcome
    assert trial.reward is None
    assert trial.failure is not None
    assert trial.retries == ()


def test_an_image_that_does_not_build_is_a_build_error_with_its_log(world: World, make: Callable[..., Task]) -> None:
    task = make(dockerfile="FROM ubuntu:24.04\nRUN echo before; no-such-program\n")
    trial = run_trial(world, task, Oracle(), key())
    assert trial.outcome is Outcome.BUILD_ERROR
    assert trial.failure is not None
    assert "no-such-program" in trial.failure.log_tail + trial.failure.message


def test_a_time_out_of_the_agent_is_verified_all_the_same(world: World, make: Callable[..., Task]) -> None:
    task = make(settings=Settings(agent_timeout=1.5, verifier_timeout=20))
    trial = run_trial(world, task, Script(("tr a-z A-Z < in.txt > out.txt", "sleep 30", "echo late")), key())
    assert trial.outcome is Outcome.AGENT_TIMEOUT
    assert trial.reward == 1.0
    assert trial.trajectory is not None
    assert trial.trajectory.stop == "timeout"


def test_a_file_that_holds_the_marker_does_not_submit(world: World, make: Callable[..., Task]) -> None:
    script = Script((f"{SUBMIT_COMMAND} > note.txt; cat note.txt", "tr a-z A-Z < in.txt > out.txt"))
    trial = run_trial(world, make(), script, key())
    assert trial.reward == 1.0
    assert trial.trajectory is not None
    assert trial.trajectory.stop == "script_ended"


def test_a_background_process_of_the_agent_does_not_outlive_it_into_grading(
    world: World, make: Callable[..., Task]
) -> None:
    late = "(sleep 1; tr a-z A-Z < in.txt > out.txt) > /dev/null 2>&1 &"
    wait = (
        "import time\nfrom pathlib import Path\ndef test_x():\n    time.sleep(2)\n    assert Path('out.txt').exists()\n"
    )
    trial = run_trial(world, make(final=wait), Script((late,)), key())
    assert trial.outcome is Outcome.FAILED


def test_many_trials_are_kept_once_and_those_there_are_not_run_again(
    world: World, make: Callable[..., Task], tmp_path: Path
) -> None:
    task = make()
    jobs = [Job(task, Oracle(), key(index=index)) for index in range(6)]
    with open_store(tmp_path / "run.db") as store:
        first = run_trials(world, jobs[:4], store, workers=3, progress=Silent())
        second = run_trials(world, jobs, store, workers=3, progress=Silent())
        assert [trial.key.index for trial in second] == list(range(6))
        assert [trial.timings for trial in second[:4]] == [trial.timings for trial in first]
        assert len(store.trial_keys("rollout")) == 6


def test_a_policy_that_breaks_is_an_agent_error(world: World, make: Callable[..., Task]) -> None:
    from tmax.config import Sampling
    from tmax.trial import Model

    class Broken:
        def sample(self, ids, sampling, stream):  # type: ignore[no-untyped-def]
            raise PolicyError("the engine is gone")

    class Pieces:
        end_id = 0

        def opening(self, system: str, task: str) -> list[int]:
            return [1, 2]

    policy = Model(Broken(), Pieces(), Sampling(), "broken")  # type: ignore[arg-type]
    trial = run_trial(world, make(), policy, key())
    assert trial.outcome is Outcome.AGENT_ERROR
    assert trial.reward is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_careless_demonstrator_fails_where_it_slips_and_passes_elsewhere(
    world: World, tmp_path: Path, name: str
) -> None:
    for seed in range(5):
        task = write_task(FAMILIES[name].draw(random.Random(seed), 1), tmp_path)
        assert run_trial(world, task, Careless(slip_share=1.0), key(index=seed)).outcome is Outcome.FAILED
        assert run_trial(world, task, Careless(slip_share=0.0), key(index=seed)).outcome is Outcome.PASSED


def test_gates_accept_a_sound_task(world: World, make: Callable[..., Task]) -> None:
    evidence = prove(world, make(), known={}, keep=lambda trial: None)
    assert evidence.verdict == "ACCEPT"
    assert [gate.name for gate in evidence.gates] == ["initial_passes", "untouched_fails", "oracle_passes"]


@pytest.mark.parametrize(
    ("change", "gate", "words"),
    [
        ({"initial": "def test_x():\n    assert False\n"}, "initial_passes", "failed"),
        ({"final": "def test_x():\n    pass\n"}, "untouched_fails", "prove nothing"),
        ({"final": "import os\ndef test_x():\n    os._exit(1)\n"}, "untouched_fails", "verifier error"),
        ({"steps": ("true",)}, "oracle_passes", "failed"),
    ],
)
def test_a_gate_that_does_not_accept_says_why(
    world: World, make: Callable[..., Task], change: dict[str, object], gate: str, words: str
) -> None:
    evidence = prove(world, make(**change), known={}, keep=lambda trial: None)
    assert evidence.verdict == "REJECT"
    assert evidence.gates[-1].name == gate
    assert words in evidence.reason


def harbor_task(path: Path, test_sh: str) -> Task:
    (path / "environment").mkdir(parents=True)
    (path / "tests").mkdir()
    (path / "solution").mkdir()
    (path / "instruction.md").write_text("Make done.txt in /app.\n")
    (path / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 30.0\n')
    (path / "environment/Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\n")
    (path / "solution/solve.sh").write_text("#!/bin/bash\nset -e\necho ok > /app/done.txt\n")
    (path / "tests/test.sh").write_text(test_sh)
    return read_task(path)


REWARD = "#!/bin/bash\nmkdir -p /logs/verifier\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def test_a_hand_made_harbor_task_is_accepted_with_its_oracle(world: World, tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "hand", REWARD.format(test="[ -f /app/done.txt ]"))
    assert prove(world, task, known={}, keep=lambda trial: None).verdict == "ACCEPT"


def test_a_harbor_task_whose_verifier_always_passes_is_rejected_for_that(world: World, tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "hand", REWARD.format(test="true"))
    evidence = prove(world, task, known={}, keep=lambda trial: None)
    assert evidence.verdict == "REJECT"
    assert "pass before anybody acts" in evidence.reason


def test_a_harbor_task_whose_verifier_crashes_is_rejected_as_a_verifier_error(world: World, tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "hand", "#!/bin/bash\necho broken >&2\nexit 3\n")
    evidence = prove(world, task, known={}, keep=lambda trial: None)
    assert evidence.verdict == "REJECT"
    assert evidence.gates[-1].outcome is Outcome.VERIFIER_ERROR
    assert "verifier error" in evidence.reason
