"""Stage `sft`: reads demonstrations, writes the warm-started policy as checkpoint 0.

The rule: the run can be killed between two steps and goes on from the last saved one with the same numbers.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tmax.config import SftConfig
from tmax.errors import TrainError
from tmax.policy.hf import choose_device, load_model
from tmax.policy.saved import model_dir, newest_checkpoint, read_facts
from tmax.policy.template import ChatTemplate
from tmax.policy.tiny import make_model, make_tokenizer
from tmax.progress import Progress
from tmax.records import Trajectory
from tmax.run import Run
from tmax.synth.draft import instruction_digest
from tmax.synth.renaming import renamed
from tmax.train.batch import TokenSequence
from tmax.train.checkpoint import restore_trainer, save_model, trainer_state
from tmax.train.optimise import Learner, linear_schedule, make_learner, sft_step

_SAVES = 5
"""Checkpoints taken on the way, for a resume."""


def sft(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Warm-start the policy on what was demonstrated in the training tasks.

    Raises TrainError where there is nothing to learn from, PolicyError where the base model cannot be loaded.
    """
    config = run.config.sft
    target = run.checkpoints_dir / "0"
    if config is None:
        return {"skipped": "no `sft` section"}
    facts = read_facts(target)
    if facts is not None:
        return {"loss": facts["loss"], "trajectories": facts["trajectories"]}
    trajectories = demonstrations(run)
    model, tokenizer = _base(run, config, trajectories)
    learner = make_learner(
        model,
        device=choose_device(run.config.policy.device),
        pad_id=int(tokenizer.pad_token_id),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        micro_batch_tokens=run.config.train.micro_batch_tokens,
    )
    loss = _fit(run, config, learner, tokenizer, trajectories, progress)
    facts = {"loss": loss, "trajectories": len(trajectories), "seen": _seen(run)}
    save_model(target, learner.model, tokenizer, facts=facts, state=None)
    return {"loss": loss, "trajectories": len(trajectories)}


def demonstrations(run: Run) -> list[Trajectory]:
    """The configured trajectories in the accepted training tasks. Raises TrainError where there is none."""
    source = run.config.sft.source if run.config.sft is not None else "oracle"
    wanted = {row.task_id for row in run.store.accepted("train")}
    trials = run.store.trials("validate_oracle" if source == "oracle" else "rollout", trajectories=True)
    found = [
        trial.trajectory
        for trial in trials
        if trial.key.task_id in wanted
        and trial.reward is not None
        and (source == "rollout" or trial.reward == 1.0)
        and trial.trajectory is not None
    ]
    if not found:
        raise TrainError("no demonstration to learn from", hint="run `tmax validate` first; were tasks accepted?")
    return found


def demonstration_tokens(template: ChatTemplate, trajectory: Trajectory, *, everything: bool) -> TokenSequence:
    """A demonstration as tokens; loss on the replies, or on every token where `everything` is set."""
    ids = template.opening(trajectory.system, trajectory.instruction)
    mask = [int(everything)] * len(ids)
    for number, turn in enumerate(trajectory.turns):
        reply = template.reply(turn.reply)
        ids += reply
        mask += [1] * len(reply)
        if number + 1 < len(trajectory.turns):
            bridge = template.bridge(turn.observation or "")
            ids += bridge
            mask += [int(everything)] * len(bridge)
    return TokenSequence(ids=ids, loss_mask=mask, logprobs=[0.0] * len(ids))


def _seen(run: Run) -> list[str]:
    """Digests of the instructions that the new model has been trained on, its base model's included."""
    seen = {instruction_digest(run.task(row).instruction) for row in run.store.accepted("train")}
    if run.config.policy.path is not None:
        seen |= set((read_facts(model_dir(run.config.policy.path)) or {}).get("seen", []))
    return sorted(seen)


def _base(run: Run, config: SftConfig, trajectories: Sequence[Trajectory]) -> tuple[Any, Any]:
    if config.model is None:
        return load_model(str(model_dir(str(run.config.policy.path))), dtype=torch.float32)
    tokenizer = make_tokenizer(_texts(trajectories), config.model)
    return make_model(config.model, tokenizer, seed=run.config.seed), tokenizer


def _texts(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory in trajectories:
        yield trajectory.system
        yield trajectory.instruction
        for turn in trajectory.turns:
            yield turn.reply
            yield turn.observation or ""


def _fit(
    run: Run,
    config: SftConfig,
    learner: Learner,
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    progress: Progress,
) -> float:
    template = ChatTemplate(tokenizer)
    batch_size = min(config.batch_size, len(trajectories))
    num_steps = max(1, round(config.num_epochs * len(trajectories) / batch_size))
    warmup_steps = round(config.warmup_share * num_steps)
    aside = run.checkpoints_dir / "sft"
    first, loss = 0, 0.0
    saved = newest_checkpoint(aside)
    if saved is not None:
        first, path = saved
        model, _ = load_model(str(path), dtype=torch.float32)
        learner.model.load_state_dict(model.state_dict())
        restore_trainer(path, learner)
    progress.start("sft", total=num_steps, done=first)
    for step, shown in enumerate(_batches(trajectories, batch_size, num_steps, seed=run.config.seed)):
        if step < first:
            continue
        if config.rename:
            rng = random.Random(f"{run.config.seed}:rename:{step}")
            shown = [renamed(trajectory, rng) for trajectory in shown]
        everything = config.loss_on == "all"
        batch = [demonstration_tokens(template, trajectory, everything=everything) for trajectory in shown]
        lr = linear_schedule(step, num_steps=num_steps, peak=config.lr, warmup_steps=warmup_steps)
        loss = sft_step(learner, batch, lr=lr)["loss"]
        progress.advance(f"loss {loss:.3f}")
        if (step + 1) % max(1, num_steps // _SAVES) == 0:
            facts = {"step": step + 1, "loss": loss}
            save_model(aside / str(step + 1), learner.model, tokenizer, facts=facts, state=trainer_state(learner))
    progress.finish()
    return loss


def _batches(
    trajectories: Sequence[Trajectory], batch_size: int, num_steps: int, *, seed: int
) -> Iterator[list[Trajectory]]:
    """Epoch after epoch in an order of its own; the trajectories left over at an epoch's end begin the next batch."""
    waiting: list[Trajectory] = []
    epoch = 0
    for _ in range(num_steps):
        while len(waiting) < batch_size:
            order = list(trajectories)
            random.Random(f"{seed}:sft:{epoch}").shuffle(order)
            waiting += order
            epoch += 1
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]
