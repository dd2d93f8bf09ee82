"""A run's configuration: YAML by hand outside, frozen models inside, read once.

A knob is a field with a sentence under it. This is the only module that reads the process environment.
"""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tmax.errors import ConfigError


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, use_attribute_docstrings=True)


class Limits(Section):
    """What one sandbox may use. An engine that cannot hold a limit says so in `tmax doctor`."""

    memory_mb: int = Field(2048, gt=0)
    """Memory of all processes together where the engine has control groups, else of each one."""
    pids: int = Field(256, gt=0)
    """Processes and threads at once."""
    file_mb: int = Field(512, gt=0)
    """Size of the largest file that may be written."""
    disk_mb: int = Field(1024, gt=0)
    """Everything a sandbox writes, together, where the engine can hold it; bubblewrap keeps it in memory."""


class BubblewrapConfig(Section):
    """User namespaces and overlayfs through the `bwrap` program; no daemon, no root."""

    type: Literal["bubblewrap"] = "bubblewrap"
    rootfs: Path | None = None
    """A directory that holds a root file system; the host's own userland where it is not given."""
    limits: Limits = Limits()
    """What one sandbox may use."""
    network: bool = False
    """Whether sandboxes share the host's network; a task may ask for it too."""


class DockerConfig(Section):
    """The Docker Engine API; a Podman socket speaks the same."""

    type: Literal["docker"] = "docker"
    host: str | None = None
    """The daemon's address; DOCKER_HOST or the local socket where it is not given."""
    base: str | None = None
    """Image that stands in for every FROM that cannot be had; FROM lines are kept where it is not given."""
    limits: Limits = Limits()
    """What one sandbox may use."""
    network: bool = False
    """Whether sandboxes may reach the network; a task may ask for it too."""


class AutoSandboxConfig(Section):
    """Takes the first engine that works: Docker where a daemon answers and has the base image, else bubblewrap."""

    type: Literal["auto"] = "auto"
    base: str | None = None
    """As `DockerConfig.base`."""
    limits: Limits = Limits()
    """What one sandbox may use."""
    network: bool = False
    """As in the engine that is taken."""


EngineConfig = BubblewrapConfig | DockerConfig
SandboxConfig = Annotated[AutoSandboxConfig | BubblewrapConfig | DockerConfig, Field(discriminator="type")]


class FamilyDraw(Section):
    """How often a family is drawn, and at which levels."""

    name: str
    """A family's name; `tmax sample --families` lists them."""
    levels: tuple[int, ...] = (1,)
    """Difficulty levels, drawn with equal weight; 1 is the easiest."""
    weight: float = Field(1.0, gt=0)
    """Share of the tasks, relative to the other families' weights."""


class SampleConfig(Section):
    """Which points of the axes become tasks."""

    families: tuple[FamilyDraw, ...] = Field(min_length=1)
    """The families to draw from."""
    num_train: int = Field(64, gt=0)
    """Tasks to train on."""
    num_heldout: int = Field(32, gt=0)
    """Tasks that only evaluation sees."""


class ValidateConfig(Section):
    """How tasks are proven."""

    max_rejected_share: float = Field(0.1, ge=0.0, le=1.0)
    """The run stops where a larger share of the generated tasks is not accepted."""


class Sampling(Section):
    """How tokens are drawn from the policy."""

    temperature: float = Field(1.0, gt=0.0)
    """Logits are divided by it; the trainer divides by the same."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Share of probability mass that is kept; 1 in training, or what is trained is not what was sampled."""
    max_tokens: int = Field(16_384, gt=0)
    """Tokens in one reply."""


class AgentConfig(Section):
    """The loop around a policy."""

    prompts: str = "agent"
    """Folder under `prompts/` that holds the loop's messages."""
    max_calls: int = Field(64, gt=0)
    """Commands in one trial."""
    command_timeout: float = Field(120.0, gt=0)
    """Seconds for one command."""
    timeout: float | None = Field(None, gt=0)
    """Seconds for the whole loop; the task's own where it is not given."""
    observation_chars: int = Field(10_000, ge=100)
    """Longer observations keep half at each end."""
    max_context: int = Field(65_536, gt=0)
    """Tokens of the whole conversation."""
    max_malformed: int = Field(3, gt=0)
    """Replies in a row without a usable command before the loop ends."""


class TinyModelConfig(Section):
    """A small transformer made from nothing, for runs without a download."""

    vocab_size: int = Field(1024, ge=300)
    """Entries of the byte-level BPE vocabulary that is trained on the trajectories."""
    hidden_size: int = Field(128, gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(4, gt=0)
    """Transformer blocks."""
    num_heads: int = Field(4, gt=0)
    """Attention heads; must divide `hidden_size`."""
    max_context: int = Field(1024, gt=0)
    """Tokens the model is made for."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError("`hidden_size` must be an even multiple of `num_heads`")
        return self


class HfPolicyConfig(Section):
    """Any causal language model that transformers can load, sampled in this process."""

    type: Literal["hf"] = "hf"
    path: str | None = None
    """A model directory, a hub name, or `tiny`, which comes with tmax; not given where `sft.model` makes one."""
    device: str = "auto"
    """`cpu`, `cuda`, …; `auto` takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the body's weights when sampling; the head is always computed in fp32."""
    max_batch: int = Field(64, gt=0)
    """Requests of concurrent trials that are decoded together."""


class RolloutConfig(Section):
    """Demonstrations for the warm start by somebody less sure than the oracle."""

    slip_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of the trials in which the demonstrator's command goes wrong."""
    samples: int = Field(1, gt=0)
    """Trials of each accepted training task."""


class SftConfig(Section):
    """The warm start from demonstrations."""

    source: Literal["oracle", "rollout", "rollout_passed"] = "oracle"
    """Whose trajectories: the oracle's, all of stage `rollout`, or those of them that passed."""
    rename: bool = False
    """Exchanges the families' starter nouns each time a demonstration is shown, for a small model made from nothing."""

    model: TinyModelConfig | None = None
    """Makes a new tiny model; without it `policy.path` is fine-tuned."""
    num_epochs: float = Field(2.0, gt=0)
    """Passes over the trajectories."""
    batch_size: int = Field(128, gt=0)
    """Trajectories in one optimiser step."""
    lr: float = Field(2e-5, gt=0)
    """Peak learning rate; it falls linearly to 0."""
    warmup_share: float = Field(0.03, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens that carry loss; `all` adds prompts and observations, which helps a model made from nothing."""


class DppoLoss(Section):
    """Divergence PPO: tokens that moved too far in the advantage's direction carry no gradient."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Binary total variation, or binary KL of the sampled token."""
    delta: float = Field(0.1, gt=0)
    """Divergence above which a token may be masked."""


class GrpoLoss(Section):
    """The clipped ratio of PPO with the sampler's log-probabilities as anchor, for comparison."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - `clip_low`."""
    clip_high: float = Field(0.272, gt=0)
    """The ratio is clipped above at 1 + `clip_high`."""


LossConfig = Annotated[DppoLoss | GrpoLoss, Field(discriminator="type")]


class TrainConfig(Section):
    """Group-relative reinforcement learning on the verifier's reward."""

    num_steps: int = Field(500, gt=0)
    """Optimiser steps."""
    prompts_per_step: int = Field(8, gt=0)
    """Groups with spread that make one step."""
    group_size: int = Field(32, gt=1)
    """Trials of a task in one group."""
    max_draws: int = Field(4, gt=0)
    """Groups tried for each group a step needs, before it goes on with fewer."""
    min_scored_share: float = Field(0.75, gt=0, le=1)
    """A group with a smaller share of scored trials is set aside."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    loss: LossConfig = DppoLoss()
    """The objective."""
    reward: Literal["binary", "partial"] = "binary"
    """`binary`: all tests pass. `partial`: share of the tests that fail untouched; 0 if an invariant broke; a bonus."""
    sampling: Sampling = Sampling()
    """How training trials are sampled; `top_p` must be 1."""
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Padded tokens in one forward and backward pass."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the body computes in; weights stay in fp32, or a small learning rate would not move them."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass instead of keeping them."""
    checkpoint_every: int = Field(10, gt=0)
    """Steps between checkpoints; a killed run goes back to the last one and learns again from the trials it kept."""
    keep_checkpoints: int = Field(2, gt=0)
    """Newest checkpoints that are kept beside the warm start."""

    @model_validator(mode="after")
    def _train_what_was_sampled(self) -> Self:
        if self.sampling.top_p != 1.0:
            raise ValueError(
                "`train.sampling.top_p` must be 1: a truncated distribution is not the one that is trained"
            )
        return self


class CalibrateConfig(Section):
    """Pass rates of the policy that is about to be trained."""

    samples: int = Field(8, gt=0)
    """Trials a task."""
    band: tuple[float, float] = (0.05, 0.95)
    """Tasks whose pass rate lies between these, both included, are trained on; the others are set aside."""
    sampling: Sampling = Sampling()
    """How calibration trials are sampled."""
    max_tasks: int | None = Field(None, gt=0)
    """Calibrates the first so many tasks; the others are trained on unmeasured."""

    @model_validator(mode="after")
    def _band_is_a_range(self) -> Self:
        if not 0 <= self.band[0] < self.band[1] <= 1:
            raise ValueError("`calibrate.band` must be two pass rates in [0, 1], the lower one first")
        return self


class EvalConfig(Section):
    """Held-out tasks, before and after training."""

    samples: int = Field(4, gt=0)
    """Trials a task."""
    sampling: Sampling = Sampling(temperature=0.7, top_p=0.95)
    """How evaluation trials are sampled."""


class InfraConfig(Section):
    """What happens when infrastructure fails."""

    retries: int = Field(2, ge=0)
    """Times a trial is tried again after an infrastructure failure."""
    backoff: float = Field(0.5, ge=0)
    """Seconds before the first retry; doubles each time."""


class RunConfig(Section):
    """A whole run; sections are named after stages."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's directory under `runs/`."""
    seed: int = 0
    """Every draw of the run comes from it."""
    workers: int = Field(8, gt=0)
    """Trials at once."""
    sandbox: SandboxConfig = AutoSandboxConfig()
    """Where trials run."""
    infra: InfraConfig = InfraConfig()
    """Retries."""
    agent: AgentConfig = AgentConfig()
    """The loop around the policy."""
    policy: HfPolicyConfig = HfPolicyConfig()
    """The model."""
    sample: SampleConfig
    """Stage `sample`."""
    validate_: ValidateConfig = Field(ValidateConfig(), alias="validate")
    """Stage `validate`."""
    rollout: RolloutConfig | None = None
    """Stage `rollout`; left out where the warm start learns from the oracle."""
    sft: SftConfig | None = None
    """Stage `sft`; left out where the policy needs no warm start."""
    calibrate: CalibrateConfig = CalibrateConfig()
    """Stage `calibrate`."""
    train: TrainConfig = TrainConfig()
    """Stage `train`."""
    eval: EvalConfig = EvalConfig()
    """Stage `eval`."""

    @model_validator(mode="after")
    def _demonstrations_are_made(self) -> Self:
        if self.sft is not None and self.sft.source != "oracle" and self.rollout is None:
            raise ValueError(f"`sft.source: {self.sft.source}` needs a `rollout` section")
        return self

    @model_validator(mode="after")
    def _policy_has_weights(self) -> Self:
        if self.policy.path is None and (self.sft is None or self.sft.model is None):
            raise ValueError("give `policy.path`, or `sft.model` to make a tiny policy from nothing")
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, or the preset of that name, and apply `a.b=value` overrides (values are YAML).

    Raises ConfigError for a missing or malformed file, an unknown key or a value out of range.
    """
    data = _read_yaml(find_config(path))
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data, source=str(path))


def parse_config(data: object, *, source: str) -> RunConfig:
    """Check plain data against `RunConfig`. Raises ConfigError naming the first key that does not fit."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: {_first_problem(error)}", hint="`tmax config --schema` lists every key"
        ) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The same run drawn from another seed."""
    return config.model_copy(update={"seed": seed})


def cache_dir() -> Path:
    """Where built images and the verifier's interpreter are kept: TMAX_CACHE, else the user's cache folder."""
    chosen = os.environ.get("TMAX_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().resolve() / "tmax"


def docker_host() -> str | None:
    """The Docker daemon's address from the environment, or None for the default socket."""
    return os.environ.get("DOCKER_HOST") or None


def find_config(path: Path) -> Path:
    """The file that a path means: itself, or the preset that comes with tmax under that name."""
    if path.exists() or path.name != str(path):
        return path
    packaged = Path(str(files("tmax"))) / "configs"
    presets = packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "configs"
    preset = presets / f"{path.name.removesuffix('.yaml')}.yaml"
    return preset if preset.is_file() else path


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"no config file `{path}`", hint="see `configs/` for presets") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `{path}`: {error}", hint="give the path of a YAML file") from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"`{path}` is not YAML: {error}", hint="see `configs/` for presets") from error
    if not isinstance(data, dict):
        raise ConfigError(f"`{path}` holds no mapping of keys to values", hint="see `configs/` for presets")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override `{override}` is not `key=value`", hint="for example --set train.num_steps=5")
    *parents, leaf = path.split(".")
    section = data
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override `{override}`: `{parent}` is not a section", hint="check the key's path")
        section = inner
    try:
        section[leaf] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override `{override}`: the value is not YAML", hint="quote it") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"unknown key `{where}`"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"`{where}`: {message[:1].lower()}{message[1:]}"
