"""Stage `train`: group-relative reinforcement learning on the verifier's reward; the loop, top to bottom.

The rule: a step learns from trials that the store holds, so a killed run goes back to its newest checkpoint and
takes the trials it has already paid for again.
"""

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from tmax.config import TrainConfig
from tmax.errors import TrainError
from tmax.policy.hf import HfPolicy, choose_device, load_model
from tmax.policy.saved import newest_checkpoint
from tmax.progress import Progress, Silent
from tmax.records import GroupRow, StepRow, TaskRow, TestReport, Trial, TrialKey
from tmax.run import Run
from tmax.train.advantage import centred, has_spread
from tmax.train.batch import TokenSequence
from tmax.train.checkpoint import restore_trainer, save_model, trainer_state
from tmax.train.optimise import Learner, constant_schedule, make_learner, rl_step
from tmax.trial import Job, Model, run_trials

_MAX_EMPTY_STEPS = 3
"""Steps in a row without a group that carries gradient before training ends."""


@dataclass(frozen=True)
class Group:
    """A task's trials in one step."""

    row: GroupRow
    trials: tuple[Trial, ...]


@dataclass
class Curriculum:
    """Which task is drawn next: the pool in a new seeded order each epoch, and how often each was drawn."""

    pool: Sequence[TaskRow]
    seed: int
    drawn: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[TaskRow]:
        """Tasks without end, from where the draws so far have come to."""
        cursor = self.drawn.total()
        while True:
            epoch, place = divmod(cursor, len(self.pool))
            order = list(self.pool)
            random.Random(f"{self.seed}:train:{epoch}").shuffle(order)
            yield order[place]
            cursor += 1


def train(run: Run, progress: Progress) -> dict[str, float | int | str | None]:
    """Train to `num_steps`, from the newest checkpoint.

    Raises TrainError for a pool without tasks, groups that never pass, or numbers that are not finite.
    """
    config = run.config.train
    first, learner, tokenizer = _learner(run)
    curriculum = Curriculum(_pool(run), run.config.seed)
    curriculum.drawn.update(group.task_id for group in run.store.groups() if group.step < first)
    untouched = {trial.key.task_id: trial.report for trial in run.store.trials("validate_noop")}
    empty_steps = 0
    progress.start("train", total=config.num_steps, done=first)
    with run.open_policy(step=first, sampling=config.sampling) as policy:
        engine = policy.policy
        assert isinstance(engine, HfPolicy)
        engine.update(learner.weights(), first)
        for step in range(first, config.num_steps):
            began = time.monotonic()
            current = Model(engine, policy.template, config.sampling, f"{run.config.name}@{step}", version=step)
            groups = _draw_groups(run, curriculum, current, step, untouched)
            kept = [group for group in groups if group.row.fate == "kept"]
            rolled_out = time.monotonic()
            metrics = _describe(groups)
            empty_steps = 0 if kept else empty_steps + 1
            if kept:
                metrics |= rl_step(
                    learner,
                    [sequence for group in kept for sequence in _sequences(group)],
                    config.loss,
                    lr=constant_schedule(step, peak=config.lr, warmup_steps=config.warmup_steps),
                    temperature=config.sampling.temperature,
                )
                engine.update(learner.weights(), step + 1)
            metrics["seconds_rollout"] = rolled_out - began
            metrics["seconds_update"] = time.monotonic() - rolled_out
            run.store.add_step(StepRow(step=step, version=step + 1, metrics=metrics), [group.row for group in groups])
            last = step + 1 == config.num_steps or empty_steps >= _MAX_EMPTY_STEPS
            if last or (step + 1) % config.checkpoint_every == 0:
                _checkpoint(run, learner, tokenizer, step + 1)
            progress.advance(f"solved {metrics['solve_rate_all']:.0%}, {len(kept)} of {len(groups)} groups kept")
            if empty_steps >= _MAX_EMPTY_STEPS:
                _stop_or_raise(groups, step, progress)
                break
    progress.finish()
    steps = run.store.steps()
    return {"steps": len(steps), "solve_rate_last": steps[-1].metrics["solve_rate_all"] if steps else None}


def _learner(run: Run) -> tuple[int, Learner, object]:
    config = run.config.train
    newest = newest_checkpoint(run.checkpoints_dir)
    step = newest[0] if newest is not None else 0
    model, tokenizer = load_model(str(run.checkpoint(step)), dtype=torch.float32)
    learner = make_learner(
        model,
        device=choose_device(run.config.policy.device),
        pad_id=int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        compute_dtype=getattr(torch, config.compute_dtype),
        gradient_checkpointing=config.gradient_checkpointing,
    )
    if step > 0:
        restore_trainer(run.checkpoint(step), learner)
    return step, learner, tokenizer


def _pool(run: Run) -> list[TaskRow]:
    """Accepted training tasks in the calibrated band; those that were not calibrated count as inside."""
    accepted = run.store.accepted("train")
    calibrated = run.store.calibration()
    pool = [row for row in accepted if row.task_id not in calibrated or calibrated[row.task_id].in_band]
    if not pool:
        raise TrainError(
            f"none of {len(accepted)} accepted tasks has a pass rate inside the band",
            hint="widen `calibrate.band`, or draw easier (or harder) tasks",
        )
    return pool


def _draw_groups(
    run: Run, curriculum: Curriculum, policy: Model, step: int, untouched: dict[str, TestReport | None]
) -> list[Group]:
    """Roll out groups until enough of them have spread, or `max_draws` times as many were tried."""
    config = run.config.train
    groups: list[Group] = []
    tasks = curriculum.rows()
    num_kept = 0
    while num_kept < config.prompts_per_step and len(groups) < config.max_draws * config.prompts_per_step:
        missing = config.prompts_per_step - num_kept
        rows = list(islice(tasks, min(missing, config.max_draws * config.prompts_per_step - len(groups))))
        starts = []
        for row in rows:
            starts.append(curriculum.drawn[row.task_id] * config.group_size)
            curriculum.drawn[row.task_id] += 1
        jobs = [
            Job(
                run.task(row),
                policy,
                TrialKey(purpose="train", task_id=row.task_id, index=start + sample),
                reward=config.reward,
                noop_report=untouched.get(row.task_id),
            )
            for row, start in zip(rows, starts, strict=True)
            for sample in range(config.group_size)
        ]
        trials = run_trials(
            run.world, jobs, run.store, workers=run.config.workers, progress=Silent(), trajectories=True
        )
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            members = trials[place * config.group_size : (place + 1) * config.group_size]
            groups.append(_group(config, step, row.task_id, start, members))
            num_kept += groups[-1].row.fate == "kept"
    return groups


def _group(config: TrainConfig, step: int, task_id: str, first_index: int, members: Sequence[Trial]) -> Group:
    rewards = tuple(trial.reward for trial in members if trial.reward is not None)
    if len(rewards) < config.min_scored_share * len(members):
        fate = "too_few_scored"
    elif has_spread(rewards):
        fate = "kept"
    elif max(rewards) == 0.0:
        fate = "all_zero"
    else:
        fate = "all_one" if min(rewards) == 1.0 else "no_spread"
    row = GroupRow.model_validate(
        {
            "step": step,
            "task_id": task_id,
            "first_index": first_index,
            "size": len(members),
            "rewards": rewards,
            "fate": fate,
        }
    )
    return Group(row, tuple(members))


def _sequences(group: Group) -> list[TokenSequence]:
    """The group's scored trials as tokens, each with its advantage among them."""
    scored = [trial for trial in group.trials if trial.reward is not None]
    sequences = []
    for trial, advantage in zip(scored, centred(group.row.rewards), strict=True):
        trace = trial.trajectory.tokens if trial.trajectory else None
        if trace is not None:
            sequences.append(TokenSequence(trace.ids, trace.loss_mask, trace.logprobs, advantage))
    return sequences


def _describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of what was rolled out, over all drawn groups unless the name says otherwise."""
    trials = [trial for group in groups for trial in group.trials]
    rewards = [trial.reward for trial in trials if trial.reward is not None]
    kept = [reward for group in groups if group.row.fate == "kept" for reward in group.row.rewards]
    stories = [trial.trajectory for trial in trials if trial.trajectory is not None]
    sampled = [sum(story.tokens.loss_mask) for story in stories if story.tokens is not None]
    fates = Counter(group.row.fate for group in groups)
    return {
        "solve_rate_all": sum(reward == 1.0 for reward in rewards) / len(rewards) if rewards else 0.0,
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "reward_mean_kept": sum(kept) / len(kept) if kept else 0.0,
        "turns_mean": sum(len(story.turns) for story in stories) / len(stories) if stories else 0.0,
        "response_tokens_mean": sum(sampled) / len(sampled) if sampled else 0.0,
        "groups_drawn": float(len(groups)),
        "groups_kept": float(fates["kept"]),
        "groups_all_zero": float(fates["all_zero"]),
        "groups_all_one": float(fates["all_one"]),
        "errors": float(len(trials) - len(rewards)),
    }


def _checkpoint(run: Run, learner: Learner, tokenizer: object, step: int) -> None:
    path = run.checkpoint(step)
    save_model(path, learner.model, tokenizer, facts={"step": step}, state=trainer_state(learner))
    steps = sorted(int(entry.name) for entry in run.checkpoints_dir.iterdir() if entry.name.isdigit())
    for old in [number for number in steps if number > 0][: -run.config.train.keep_checkpoints]:
        shutil.rmtree(run.checkpoint(old))


def _stop_or_raise(groups: Sequence[Group], step: int, progress: Progress) -> None:
    """Training that has run out of mixed groups is over where tasks are solved, and broken where none ever is."""
    fates = Counter(group.row.fate for group in groups)
    if fates["all_one"] >= fates["all_zero"] and fates["all_one"]:
        progress.say(
            f"step {step}: {fates['all_one']} of {len(groups)} groups pass every time; nothing is left to learn"
        )
        return
    raise TrainError(
        f"{_MAX_EMPTY_STEPS} steps in a row had no group with spread: {dict(fates)}",
        hint="draw easier tasks, raise `train.group_size`, or warm-start for longer; a checkpoint was written",
    )
