"""One error class per boundary; each carries a message for people and a hint that says how to mend it.

They are raised where the outside world meets tmax and caught in two places only: where a trial is
recorded (`tmax.trial`) and in the command line (`tmax.cli`). Bugs are not TmaxErrors and show a traceback.
"""

from typing import Literal

InfraKind = Literal["api", "daemon", "disk", "engine", "memory", "network", "network_pool", "process", "unknown"]


class TmaxError(Exception):
    """What went wrong, in one sentence, and what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(TmaxError):
    """A configuration file, an override or an environment variable cannot be used."""


class TaskError(TmaxError):
    """A task directory is not a task: a part is missing, malformed, or leaves the directory."""


class PromptError(TmaxError):
    """A prompt file is missing or names a variable that was not given."""


class StoreError(TmaxError):
    """A run's database is missing, locked by another process, of another version, or unreadable."""


class SandboxError(TmaxError):
    """The infrastructure under a sandbox failed; the policy and the task are not to blame."""

    def __init__(self, message: str, *, kind: InfraKind = "unknown", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind: InfraKind = kind


class StartError(SandboxError):
    """A sandbox did not start."""


class BuildError(TmaxError):
    """A task's image did not build; `log_tail` holds the end of the build's output."""

    def __init__(self, message: str, *, log_tail: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.log_tail = log_tail


class VerifierError(TmaxError):
    """The hidden tests did not run to a parsed report, so there is no reward."""


class VerifierTimeout(VerifierError):
    """The hidden tests ran longer than the task allows."""


class PolicyError(TmaxError):
    """A policy could not reply: its engine broke or its checkpoint is unusable."""


class ContextExhausted(TmaxError):
    """The conversation no longer fits into the policy's context; the final state is verified all the same."""


class TrainError(TmaxError):
    """Training cannot go on: a non-finite loss, a broken checkpoint, or no group that carries gradient."""
