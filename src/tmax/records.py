"""The typed facts that stages hand to one another and the store keeps.

The rule: a trial has a reward or a failure, never both and never neither.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tmax.errors import InfraKind


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    # Without "constants" a NaN is written as null, which no number field reads back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Outcome(StrEnum):
    """What became of a trial; exactly one each."""

    PASSED = "passed"
    FAILED = "failed"
    PARTIAL = "partial"
    AGENT_TIMEOUT = "agent_timeout"
    CONTEXT_EXHAUSTED = "context_exhausted"
    AGENT_ERROR = "agent_error"
    VERIFIER_ERROR = "verifier_error"
    VERIFIER_TIMEOUT = "verifier_timeout"
    BUILD_ERROR = "build_error"
    START_ERROR = "start_error"
    INFRA_ERROR = "infra_error"
    INVALID_TASK = "invalid_task"


SCORED = frozenset({Outcome.PASSED, Outcome.FAILED, Outcome.PARTIAL, Outcome.AGENT_TIMEOUT, Outcome.CONTEXT_EXHAUSTED})
"""Outcomes of trials whose verifier ran to a parsed report; only these carry a reward."""

RETRIED = frozenset({Outcome.START_ERROR, Outcome.INFRA_ERROR})
"""Outcomes that infrastructure caused and that are tried again before they are counted."""


class Failure(Record):
    """Why a trial has no reward."""

    message: str
    hint: str | None = None
    kind: InfraKind | None = None
    """Set for `infra_error` and `start_error` only."""
    log_tail: str = ""


TestStatus = Literal["passed", "failed", "error", "skipped"]


class TestResult(Record):
    """One hidden test: `error` means that set-up or collection broke, so nothing was judged."""

    __test__ = False

    name: str
    status: TestStatus
    seconds: float = 0.0
    message: str = ""


class TestReport(Record):
    """What one run of a test file said. A report exists only if the runner finished and was parsed."""

    __test__ = False

    tests: tuple[TestResult, ...]
    exit_code: int
    """pytest's own: 0 all passed, 1 some failed; anything else is not a verdict."""
    seconds: float = 0.0

    @property
    def judged(self) -> bool:
        """True if the run is a verdict: at least one test ran, none broke before it could judge."""
        ran = [test for test in self.tests if test.status in ("passed", "failed")]
        return self.exit_code in (0, 1) and bool(ran) and all(test.status != "error" for test in self.tests)

    @property
    def all_passed(self) -> bool:
        """True if the run is a verdict and every test passed; one that was skipped has not."""
        return self.judged and self.exit_code == 0 and all(test.status == "passed" for test in self.tests)


class ExecResult(Record):
    """What a command did in a sandbox; `exit_code` is None where it was killed by its time-out."""

    output: str
    """Standard output and error as they came, decoded with replacement, bounded while it was read."""
    exit_code: int | None
    seconds: float
    timed_out: bool = False
    truncated_chars: int = 0
    """Characters that were dropped from the middle of the output."""


StopReason = Literal[
    "submitted", "script_ended", "max_calls", "timeout", "context", "malformed", "max_tokens", "shell_lost"
]


class Turn(Record):
    """One reply of the policy and what the machine answered."""

    reply: str
    command: str | None
    """None where the reply held no usable command."""
    observation: str | None
    """None after the last reply."""
    exit_code: int | None = None
    seconds: float = 0.0


class TokenTrace(Record):
    """A trajectory as the policy saw it: four parallel arrays, one entry per token.

    `loss_mask` is 1 where the policy sampled the token; `logprobs` and `versions` have meaning only there
    (0.0 and -1 elsewhere). Ids are appended, never re-tokenised.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    @model_validator(mode="after")
    def _parallel(self) -> Self:
        if not len(self.ids) == len(self.loss_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError("the arrays of a token trace differ in length")
        return self


class Trajectory(Record):
    """What a rollout recorded."""

    system: str
    instruction: str
    turns: tuple[Turn, ...]
    stop: StopReason
    tokens: TokenTrace | None = None
    """None for scripted policies and chat endpoints, which hand out no token ids."""


class Timings(Record):
    """Seconds by part of a trial."""

    build: float = 0.0
    start: float = 0.0
    agent: float = 0.0
    verify: float = 0.0
    close: float = 0.0


Purpose = Literal[
    "validate_initial",
    "validate_noop",
    "validate_oracle",
    "rollout",
    "calibrate",
    "train",
    "eval_before",
    "eval_after",
]
"""Why a trial was run. `validate_initial` is a no-op trial graded by the initial tests."""


class TrialKey(Record):
    """Names a trial within a run: a run holds each key at most once, so a resumed stage repeats nothing."""

    purpose: Purpose
    task_id: str
    index: int
    """The sample's number among the task's trials of this purpose; in training, counted over all steps."""


class Trial(Record):
    """One rollout and its outcome: the row that every figure comes from."""

    key: TrialKey
    task_hash: str
    policy: str
    outcome: Outcome
    reward: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    failure: Failure | None = None
    report: TestReport | None = None
    trajectory: Trajectory | None = None
    timings: Timings = Timings()
    retries: tuple[Failure, ...] = ()
    """Infrastructure failures that were tried again before this outcome."""
    policy_version: int = 0

    @model_validator(mode="after")
    def _reward_or_failure(self) -> Self:
        if (self.reward is None) == (self.failure is None):
            raise ValueError("a trial has a reward or a failure: never both, never neither")
        if (self.outcome in SCORED) != (self.reward is not None):
            raise ValueError(f"outcome `{self.outcome}` and reward {self.reward} contradict each other")
        if self.reward is not None and self.report is None:
            raise ValueError("a reward needs the per-test report it was computed from")
        return self


Verdict = Literal["ACCEPT", "REJECT", "UNKNOWN"]


class Gate(Record):
    """One condition that a task must meet, and what was seen."""

    name: Literal["readable", "initial_passes", "untouched_fails", "oracle_passes"]
    verdict: Verdict
    detail: str
    outcome: Outcome | None = None
    report: TestReport | None = None


class Evidence(Record):
    """Why a task may be trained on, bound to the hash of what was tried. UNKNOWN never counts as ACCEPT."""

    task_id: str
    task_hash: str
    gates: tuple[Gate, ...]
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """REJECT if any gate rejects, else UNKNOWN if any is unknown (or there is none), else ACCEPT."""
        verdicts = {gate.verdict for gate in self.gates}
        if "REJECT" in verdicts:
            return "REJECT"
        return "ACCEPT" if verdicts == {"ACCEPT"} else "UNKNOWN"

    @property
    def reason(self) -> str:
        """The first gate that did not accept, in words; empty for an accepted task."""
        for gate in self.gates:
            if gate.verdict != "ACCEPT":
                return f"{gate.name}: {gate.detail}"
        return ""


class Spec(Record):
    """One sampled point of the axes: what task `index` of a run is to be about."""

    index: int
    family: str
    level: int
    domain: str
    split: Literal["train", "heldout"]


class TaskRow(Record):
    """A generated task as the store knows it; the directory holds the rest."""

    task_id: str
    spec: Spec
    task_hash: str


class Calibration(Record):
    """A task's pass rate under the policy that is about to be trained."""

    task_id: str
    trials: int
    scored: int
    passed: int
    pass_rate: float | None
    """Share of scored trials rewarded 1; None where none was scored."""
    interval: tuple[float, float] | None
    """95 % Wilson interval of `pass_rate`."""
    p_mixed: float | None
    """Probability that a group of the configured size carries gradient at this pass rate."""
    in_band: bool


class StepRow(Record):
    """What one training step did. Names of `metrics` are those that the report plots."""

    step: int
    version: int
    """The policy version that this step produced."""
    metrics: dict[str, float]


class GroupRow(Record):
    """One group that a training step drew: kept for the update or set aside, and why."""

    step: int
    task_id: str
    first_index: int
    size: int
    rewards: tuple[float, ...]
    fate: Literal["kept", "all_zero", "all_one", "no_spread", "too_few_scored", "surplus"]


StageState = Literal["running", "done"]


class StageRow(Record):
    """How far a stage got, and how long it has worked in all, over every start."""

    name: str
    state: StageState
    seconds: float
    detail: dict[str, float | int | str | None]
