"""A checkpoint holds model, tokenizer, optimiser, step and the state of every random stream.

The rule: a checkpoint is whole or absent; it is written aside and renamed last.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tmax.errors import TrainError
from tmax.policy.saved import FACTS
from tmax.train.optimise import Learner

_STATE = "trainer.pt"


def save_model(path: Path, model: Any, tokenizer: Any, *, facts: dict[str, Any], state: dict[str, Any] | None) -> None:
    """Write a directory that transformers loads, with `facts` beside it and, for a resume, the trainer's state.

    Raises TrainError where the disk refuses; nothing is then left at `path`.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            if state is not None:
                torch.save(state, aside / _STATE)
            (aside / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            _sync(aside)
            if path.exists():
                shutil.rmtree(path)
            aside.chmod(0o755)
            aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise TrainError(
            f"cannot write the checkpoint `{path}`: {error}", hint="check the disk and the rights"
        ) from error


def trainer_state(learner: Learner) -> dict[str, Any]:
    """Optimiser and random state of a learner."""
    return {"optimiser": learner.optimiser.state_dict(), "rng": torch.get_rng_state()}


def restore_trainer(path: Path, learner: Learner) -> None:
    """Give a learner the optimiser and random state that `save_model` kept. Raises TrainError where there is none."""
    try:
        state = torch.load(path / _STATE, map_location=learner.device, weights_only=True)
        learner.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"].cpu())
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise TrainError(
            f"`{path}` is no checkpoint to resume from: {error}", hint="remove it to use an older one"
        ) from error


def _sync(directory: Path) -> None:
    for entry in directory.iterdir():
        with entry.open("rb") as handle:
            os.fsync(handle.fileno())
