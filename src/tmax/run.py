"""An open run: its directory, configuration, database and sandbox engine.

The rule: a run keeps the configuration it was begun with; another configuration needs another name.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tmax.config import EngineConfig, RunConfig, Sampling, dump_config, load_config
from tmax.errors import ConfigError, StoreError, TaskError
from tmax.policy.saved import model_dir
from tmax.policy.template import ChatTemplate
from tmax.records import TaskRow
from tmax.sandbox import choose_engine, reap
from tmax.store import Store, open_store
from tmax.task import Task, read_task
from tmax.trial import Model, World


@dataclass(frozen=True)
class Run:
    """What every stage of a run is handed."""

    path: Path
    config: RunConfig
    store: Store

    @cached_property
    def engine_reason(self) -> str:
        """Which sandbox engine was taken, and why."""
        return self._engine[1]

    @cached_property
    def world(self) -> World:
        """Where the run's trials happen. Raises SandboxError where no engine works."""
        config = self.config
        return World(self._engine[0], config.name, config.agent, config.infra, config.seed)

    @cached_property
    def _engine(self) -> tuple[EngineConfig, str]:
        return choose_engine(self.config.sandbox)

    @property
    def tasks_dir(self) -> Path:
        """Holds a directory for each generated task."""
        return self.path / "tasks"

    @property
    def checkpoints_dir(self) -> Path:
        """Holds a directory for each checkpoint, named by its step; 0 is the warm start."""
        return self.path / "checkpoints"

    def task(self, row: TaskRow) -> Task:
        """Read a task of the run. Raises TaskError, also where its files are not those that were generated."""
        task = read_task(self.tasks_dir / row.task_id)
        if task.hash != row.task_hash:
            raise TaskError(
                f"task `{row.task_id}` is not what was generated: its files have changed",
                hint="restore them, or begin a new run",
            )
        return task

    @contextlib.contextmanager
    def open_policy(self, *, step: int, sampling: Sampling) -> Iterator[Model]:
        """Sample from the checkpoint of a step. Raises PolicyError where it cannot be loaded."""
        # Loads torch, which stages without a model need not wait for.
        from tmax.policy.hf import open_hf_policy

        path = self.checkpoint(step)
        with open_hf_policy(self.config.policy, str(path), version=step) as policy:
            yield Model(policy, ChatTemplate(policy.tokenizer), sampling, name=f"{self.config.name}@{step}")

    def checkpoint(self, step: int) -> Path:
        """Where the policy of a step lies; step 0 is the warm start, or the model the config names."""
        path = self.checkpoints_dir / str(step)
        if step == 0 and self.config.sft is None:
            path = model_dir(str(self.config.policy.path))
        return path


@contextlib.contextmanager
def open_run(config: RunConfig, root: Path) -> Iterator[Run]:
    """Begin the run `root/<name>`, or go on with it, and clear away what a killed process of it left.

    Raises ConfigError where the run was begun with another configuration, StoreError where another process is
    writing it.
    """
    path = root.absolute() / config.name
    with open_store(path / "run.db") as store:
        _keep_config(path, config)
        run = Run(path, config, store)
        yield run


@contextlib.contextmanager
def reopen_run(path: Path) -> Iterator[Run]:
    """Go on with the run in `path`. Raises StoreError where there is none."""
    config = read_run_config(path)
    with open_run(config, path.absolute().parent) as run:
        yield run


def read_run_config(path: Path) -> RunConfig:
    """The configuration of the run in `path`. Raises StoreError where there is no run."""
    if not (path / "config.yaml").is_file():
        raise StoreError(f"no run at `{path}`", hint="`tmax run CONFIG` makes one under `runs/`")
    return load_config(path / "config.yaml")


def reap_run(run: Run) -> int:
    """Remove the sandboxes that killed processes of this run left; returns how many there were."""
    return reap(run.world.engine, label=run.config.name)


def _keep_config(path: Path, config: RunConfig) -> None:
    kept = path / "config.yaml"
    text = dump_config(config)
    if kept.is_file():
        if kept.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"the run `{path}` was begun with another configuration",
                hint="give the run another `name`, or remove its directory to begin again",
            )
        return
    try:
        handle, aside = tempfile.mkstemp(prefix=".config-", dir=path)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(aside).chmod(0o644)
        Path(aside).rename(kept)
    except OSError as error:
        raise ConfigError(f"cannot write `{kept}`: {error}", hint="check the rights and the disk") from error
