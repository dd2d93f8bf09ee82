"""One trial: open a sandbox, let a policy act, run the verifier, record one typed outcome; and many of them.

The rule: everything that scores goes through `run_trial`; a failure is recorded as a failure, tried again only
where infrastructure is to blame, and never becomes a reward.
"""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from tmax.agent.conversation import Conversation, ScriptedConversation, TokenConversation
from tmax.agent.loop import Ended, run_agent
from tmax.agent.reply import SUBMIT_COMMAND
from tmax.config import AgentConfig, EngineConfig, InfraConfig, Sampling
from tmax.errors import (
    BuildError,
    PolicyError,
    SandboxError,
    StartError,
    TaskError,
    TmaxError,
    VerifierError,
    VerifierTimeout,
)
from tmax.parallel import map_unordered
from tmax.policy.protocol import TokenPolicy
from tmax.policy.scripted import Careless, Noop, Oracle, Script
from tmax.policy.template import ChatTemplate
from tmax.progress import Progress
from tmax.prompt import render
from tmax.records import RETRIED, Failure, Outcome, TestReport, Timings, Trajectory, Trial, TrialKey
from tmax.sandbox import Sandbox, build_image, open_sandbox
from tmax.store import Store
from tmax.synth.slips import with_slip
from tmax.task import STEP_MARK, Task
from tmax.verifier import binary, bundle, partial, verify, verify_foreign

RewardKind = Literal["binary", "partial"]


@dataclass(frozen=True)
class Model:
    """A token policy with what a conversation needs to drive it."""

    policy: TokenPolicy
    template: ChatTemplate
    sampling: Sampling
    name: str
    version: int = 0


Policy = Noop | Oracle | Careless | Script | Model


@dataclass(frozen=True)
class World:
    """Where the trials of a run happen."""

    engine: EngineConfig
    label: str
    """Every sandbox carries it; clean-up goes by it."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    infra: InfraConfig = field(default_factory=InfraConfig)
    seed: int = 0


@dataclass
class _Attempt:
    """What is known of an attempt so far; kept outside the try so that a failure still has it."""

    seconds: dict[str, float] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    report: TestReport | None = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


def run_trial(
    world: World,
    task: Task,
    policy: Policy,
    key: TrialKey,
    *,
    reward: RewardKind = "binary",
    noop_report: TestReport | None = None,
) -> Trial:
    """Run one trial to a record; never raises a TmaxError.

    A `validate_initial` trial is graded by the initial tests, every other one by the final tests. `noop_report`
    says which tests an untouched sandbox passes; `partial` rewards need it.
    """
    retries: list[Failure] = []
    while True:
        trial = _attempt(world, task, policy, key, reward, noop_report)
        if trial.outcome not in RETRIED or trial.failure is None or len(retries) >= world.infra.retries:
            return trial.model_copy(update={"retries": tuple(retries)})
        retries.append(trial.failure)
        time.sleep(world.infra.backoff * 2 ** (len(retries) - 1))


@dataclass(frozen=True)
class Job:
    """A trial to be run."""

    task: Task
    policy: Policy
    key: TrialKey
    reward: RewardKind = "binary"
    noop_report: TestReport | None = None


def run_trials(
    world: World,
    jobs: Sequence[Job],
    store: Store,
    *,
    workers: int,
    progress: Progress,
    trajectories: bool = False,
) -> list[Trial]:
    """Run the jobs whose trials the store has not got, `workers` at a time, and keep each as it finishes.

    Returns the trials of all jobs in their order, those of earlier starts included; their trajectories are left
    out unless they are asked for. `progress` advances by one for each, done before or now.
    """
    done: dict[TrialKey, Trial] = {}
    todo: list[Job] = []
    for purpose in dict.fromkeys(job.key.purpose for job in jobs):
        mine = [job for job in jobs if job.key.purpose == purpose]
        present = store.trial_keys(purpose)
        todo += [job for job in mine if (job.key.task_id, job.key.index) not in present]
        for task_id in {job.key.task_id for job in mine if (job.key.task_id, job.key.index) in present}:
            kept = store.trials(purpose, task_id=task_id, trajectories=trajectories)
            done |= {trial.key: trial for trial in kept}
    for _ in range(len(jobs) - len(todo)):
        progress.advance()
    for _, trial in map_unordered(
        lambda job: run_trial(world, job.task, job.policy, job.key, reward=job.reward, noop_report=job.noop_report),
        todo,
        workers=workers,
    ):
        store.add_trial(trial)
        done[trial.key] = trial if trajectories else trial.model_copy(update={"trajectory": None})
        progress.advance()
    return [done[job.key] for job in jobs]


def _attempt(
    world: World, task: Task, policy: Policy, key: TrialKey, kind: RewardKind, noop_report: TestReport | None
) -> Trial:
    attempt = _Attempt()
    reward: float | None = None
    failure: Failure | None = None
    try:
        reward = _score(attempt, world, task, policy, key, kind, noop_report)
        outcome = _outcome(reward, attempt)
    except (BuildError, PolicyError, SandboxError, TaskError, VerifierError) as error:
        outcome, failure = _failure(error)
    return Trial(
        key=key,
        task_hash=task.hash,
        policy=policy.name,
        outcome=outcome,
        reward=reward if failure is None else None,
        failure=failure,
        report=attempt.report,
        trajectory=attempt.trajectory,
        timings=Timings(**attempt.seconds),
        policy_version=policy.version if isinstance(policy, Model) else 0,
    )


def _score(
    attempt: _Attempt,
    world: World,
    task: Task,
    policy: Policy,
    key: TrialKey,
    kind: RewardKind,
    noop_report: TestReport | None,
) -> float:
    with attempt.timed("build"):
        image = build_image(world.engine, task)
    with contextlib.ExitStack() as stack:
        with attempt.timed("start"):
            sandbox = stack.enter_context(
                open_sandbox(world.engine, image, label=world.label, mounts=[bundle()], network=task.settings.network)
            )
        if not isinstance(policy, Noop):
            with attempt.timed("agent"):
                _act(attempt, world, task, policy, key, sandbox)
        with attempt.timed("verify"):
            score = _verify(attempt, task, key, sandbox, kind, noop_report)
        closing = time.monotonic()
    attempt.seconds["close"] = time.monotonic() - closing
    return score


def _act(
    attempt: _Attempt,
    world: World,
    task: Task,
    policy: Oracle | Careless | Script | Model,
    key: TrialKey,
    sandbox: Sandbox,
) -> None:
    config = world.agent
    user = task.agent_user
    system = render(
        config.prompts, "system", command_timeout=f"{config.command_timeout:g}", submit_command=SUBMIT_COMMAND
    )
    prompt = render(
        config.prompts,
        "task",
        instruction=task.instruction,
        user=user,
        workdir=sandbox.image.workdir,
        max_calls=config.max_calls,
    )
    conversation = _conversation(world, task, policy, key, sandbox, system, prompt)
    shell = sandbox.shell(user=user)
    ended = Ended((), "shell_lost")
    try:
        ended = run_agent(conversation, shell, config, timeout=config.timeout or task.settings.agent_timeout)
    finally:
        attempt.trajectory = Trajectory(
            system=system, instruction=prompt, turns=ended.turns, stop=ended.stop, tokens=conversation.trace()
        )
        shell.close()


def _conversation(
    world: World,
    task: Task,
    policy: Oracle | Careless | Script | Model,
    key: TrialKey,
    sandbox: Sandbox,
    system: str,
    prompt: str,
) -> Conversation:
    match policy:
        case Oracle():
            return ScriptedConversation([*_oracle_commands(task, sandbox), SUBMIT_COMMAND])
        case Careless():
            rng = random.Random(f"{world.seed}:careless:{key.task_id}:{key.index}")
            commands = list(_oracle_commands(task, sandbox))
            if rng.random() < policy.slip_share:
                commands = with_slip(commands, rng)
            return ScriptedConversation([*commands, SUBMIT_COMMAND])
        case Script():
            return ScriptedConversation(policy.commands)
        case Model():
            stream = random.Random(f"{world.seed}:{key.purpose}:{key.task_id}:{key.index}")
            return TokenConversation(
                policy.policy,
                policy.template,
                system=system,
                task=prompt,
                sampling=policy.sampling,
                max_context=world.agent.max_context,
                stream=stream.random,
            )
        case _:
            assert_never(policy)


def _oracle_commands(task: Task, sandbox: Sandbox) -> tuple[str, ...]:
    """Our solutions are cut into steps that run in the shell; another's script runs as Harbor runs it."""
    if task.solution is None:
        raise TaskError(f"task `{task.task_id}` has no solution", hint="add solution/solve.sh")
    if task.card or STEP_MARK in task.solution.read_text(encoding="utf-8"):
        return task.oracle_steps()
    sandbox.put(task.solution.parent, "/solution", user="root", mode=0o755)
    return ("bash /solution/solve.sh",)


def _verify(
    attempt: _Attempt, task: Task, key: TrialKey, sandbox: Sandbox, kind: RewardKind, noop_report: TestReport | None
) -> float:
    timeout = task.settings.verifier_timeout
    test = task.initial_test if key.purpose == "validate_initial" else task.final_test
    if test is None and key.purpose == "validate_initial":
        raise TaskError(f"task `{task.task_id}` has no initial test", hint="add tests/test_initial_state.py")
    if test is None:
        score, attempt.report = verify_foreign(sandbox, task.path / "tests", timeout=timeout)
        return score
    report = verify(sandbox, test, timeout=timeout)
    attempt.report = report
    if not report.judged:
        broken = next((item.message for item in report.tests if item.status == "error"), "no test ran")
        last = broken.strip().splitlines()[-1] if broken.strip() else "no message"
        raise VerifierError(f"the tests broke before they could judge: {last}", hint="run them by hand in the image")
    return binary(report) if kind == "binary" else partial(report, noop_report)


def _outcome(reward: float, attempt: _Attempt) -> Outcome:
    stop = attempt.trajectory.stop if attempt.trajectory else None
    if stop == "timeout":
        return Outcome.AGENT_TIMEOUT
    if stop == "context":
        return Outcome.CONTEXT_EXHAUSTED
    if reward == 1.0:
        return Outcome.PASSED
    return Outcome.FAILED if reward == 0.0 else Outcome.PARTIAL


def _failure(error: TmaxError) -> tuple[Outcome, Failure]:
    log_tail = error.log_tail if isinstance(error, BuildError) else ""
    kind = error.kind if isinstance(error, SandboxError) else None
    failure = Failure(message=error.message, hint=error.hint, kind=kind, log_tail=log_tail)
    match error:
        case BuildError():
            return Outcome.BUILD_ERROR, failure
        case StartError():
            return Outcome.START_ERROR, failure
        case SandboxError():
            return Outcome.INFRA_ERROR, failure
        case VerifierTimeout():
            return Outcome.VERIFIER_TIMEOUT, failure
        case VerifierError():
            return Outcome.VERIFIER_ERROR, failure
        case TaskError():
            return Outcome.INVALID_TASK, failure
        case _:
            return Outcome.AGENT_ERROR, failure
