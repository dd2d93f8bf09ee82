"""The command line: one command a stage; what goes wrong becomes a message, a hint and an exit code.

The rule: stdout is data, stderr is for people, and nothing heavy is loaded before a command needs it.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmax import __version__
from tmax.errors import ConfigError, TaskError, TmaxError

if TYPE_CHECKING:
    from rich.console import Console

    from tmax.config import RunConfig
    from tmax.pipeline import Detail, Stage
    from tmax.records import TrialKey
    from tmax.run import Run
    from tmax.trial import Policy, World

app = typer.Typer(
    help="Synthesise terminal tasks and train language-model agents on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Runs = Annotated[Path, typer.Option("--runs", help="Directory that holds the runs.")]
Source = Annotated[Path, typer.Argument(help="A config file, a preset's name, or a run's directory.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override a key of the config: a.b=value.")]
Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every draw; takes the config's place.")]
Workers = Annotated[int, typer.Option(min=1, help="Trials at once.")]
Engine = Annotated[str, typer.Option("--sandbox", help="auto, bubblewrap or docker.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def run(source: Source, sets: Sets = None, seed: Seed = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Walk the whole pipeline; start it again and it goes on where it was."""
    from tmax.pipeline import STAGES

    _stages(source, sets, seed, runs, STAGES, as_json)


@app.command()
def sample(
    source: Annotated[Path | None, typer.Argument(help="A config file, a preset's name, or a run's directory.")] = None,
    sets: Sets = None,
    seed: Seed = None,
    runs: Runs = Path("runs"),
    families: Annotated[bool, typer.Option("--families", help="List the families instead.")] = False,
    as_json: Json = False,
) -> None:
    """Draw what the tasks are to be about."""
    if families:
        from tmax.synth.families import FAMILIES

        rows = {
            name: {"domain": f.domain, "levels": list(f.levels), "summary": f.summary} for name, f in FAMILIES.items()
        }
        lines = [f"{name:10} {row['domain']:20} levels {row['levels']}  {row['summary']}" for name, row in rows.items()]
        _print(rows if as_json else "\n".join(lines))
    elif source is None:
        raise ConfigError("give a config file", hint="or `--families` to list what can be drawn")
    else:
        _stages(source, sets, seed, runs, ("sample",), as_json)


@app.command()
def generate(
    source: Annotated[Path | None, typer.Argument(help="A config file, a preset's name, or a run's directory.")] = None,
    sets: Sets = None,
    seed: Seed = None,
    runs: Runs = Path("runs"),
    families: Annotated[str, typer.Option(help="With --out: families by name, by commas, or `all`.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="With --out: how many tasks.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Write tasks to this directory, with no run.")] = None,
    as_json: Json = False,
) -> None:
    """Make task directories, for a run or into a directory of your own."""
    if out is None:
        if source is None:
            raise ConfigError("give a config file", hint="or `--out DIR` to write tasks with no run")
        _stages(source, sets, seed, runs, ("sample", "generate"), as_json)
        return
    from tmax.config import FamilyDraw, SampleConfig
    from tmax.synth.draft import draw_task
    from tmax.synth.families import FAMILIES
    from tmax.synth.sampler import sample_specs

    names = list(FAMILIES) if families == "all" else families.split(",")
    draws = tuple(FamilyDraw(name=name, levels=FAMILIES[name].levels if name in FAMILIES else (1,)) for name in names)
    specs = sample_specs(SampleConfig(families=draws, num_train=count, num_heldout=1), seed=seed or 0)[:count]
    taken: set[str] = set()
    made = [draw_task(spec, out, seed=seed or 0, taken=taken) for spec in specs]
    _print({"tasks": [str(task.path) for task in made]} if as_json else "\n".join(str(task.path) for task in made))


@app.command()
def validate(
    paths: Annotated[list[Path], typer.Argument(help="Task directories or directories of them; or a config or a run.")],
    sets: Sets = None,
    seed: Seed = None,
    runs: Runs = Path("runs"),
    engine: Engine = "auto",
    workers: Workers = 4,
    as_json: Json = False,
) -> None:
    """Prove tasks: initial tests pass, final tests fail untouched, the oracle passes."""
    if len(paths) == 1 and _is_run_or_config(paths[0]):
        _stages(paths[0], sets, seed, runs, ("sample", "generate", "validate"), as_json)
        return
    from tmax.stages.validate import validate_paths
    from tmax.task import find_tasks

    tasks = [task for path in paths for task in find_tasks(path)]
    evidence = validate_paths(tasks, _world(engine, seed or 0), _progress(), workers=workers)
    if as_json:
        _print([{**item.model_dump(mode="json"), "verdict": item.verdict, "reason": item.reason} for item in evidence])
    else:
        _print("\n".join(f"{item.verdict:8} {item.task_id}  {item.reason}".rstrip() for item in evidence))
    accepted = sum(item.verdict == "ACCEPT" for item in evidence)
    _console().print(f"{accepted} of {len(evidence)} accepted", highlight=False)
    if accepted < len(evidence):
        raise typer.Exit(1)


@app.command()
def rollout(
    paths: Annotated[list[Path], typer.Argument(help="Task directories or directories of them.")],
    policy: Annotated[str, typer.Option(help="noop, oracle, or a model's directory.")] = "oracle",
    samples: Annotated[int, typer.Option(min=1, help="Trials a task.")] = 1,
    temperature: Annotated[float, typer.Option(help="For a model.")] = 1.0,
    prompts: Annotated[str, typer.Option(help="Folder under prompts/ with the agent's messages.")] = "agent",
    engine: Engine = "auto",
    workers: Workers = 4,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Keep the trials in this directory's run.db.")] = None,
    as_json: Json = False,
) -> None:
    """Run a policy on tasks and say what became of each trial."""
    import contextlib

    from tmax.config import AgentConfig
    from tmax.report.story import describe_trial
    from tmax.stages.rollout import rollout as roll_out
    from tmax.store import open_store
    from tmax.task import find_tasks, read_task

    tasks = [read_task(task) for path in paths for task in find_tasks(path)]
    world = _world(engine, seed or 0, AgentConfig(prompts=prompts))
    with contextlib.ExitStack() as stack:
        chosen = _policy(policy, temperature, stack)
        store = stack.enter_context(open_store(out / "run.db")) if out is not None else None
        trials = roll_out(tasks, chosen, world, _progress(), samples=samples, workers=workers, store=store)
        failures = 0
        for trial in trials:
            failures += trial.failure is not None
            if as_json:
                typer.echo(trial.model_dump_json())
            else:
                reward = "-" if trial.reward is None else f"{trial.reward:g}"
                typer.echo(f"{trial.outcome.value:16} {reward:5} {trial.key.task_id} #{trial.key.index}")
                if trial.failure is not None:
                    _console().print(describe_trial(trial), highlight=False, markup=False)
    if failures:
        raise typer.Exit(1)


@app.command()
def sft(source: Source, sets: Sets = None, seed: Seed = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Warm-start the policy on demonstrations."""
    from tmax.pipeline import STAGES

    _stages(source, sets, seed, runs, STAGES[: STAGES.index("sft") + 1], as_json)


@app.command()
def calibrate(
    source: Source, sets: Sets = None, seed: Seed = None, runs: Runs = Path("runs"), as_json: Json = False
) -> None:
    """Measure each training task's pass rate under the warm-started policy."""
    from tmax.pipeline import STAGES

    _stages(source, sets, seed, runs, STAGES[: STAGES.index("calibrate") + 1], as_json)


@app.command()
def train(
    source: Source, sets: Sets = None, seed: Seed = None, runs: Runs = Path("runs"), as_json: Json = False
) -> None:
    """Reinforcement learning, with the stages before it where they are not done."""
    from tmax.pipeline import STAGES

    _stages(source, sets, seed, runs, STAGES[: STAGES.index("train") + 1], as_json)


@app.command(name="eval")
def evaluate(
    source: Source, sets: Sets = None, seed: Seed = None, runs: Runs = Path("runs"), as_json: Json = False
) -> None:
    """Score the trained policy on the held-out tasks, with the stages before where they are not done."""
    from tmax.pipeline import STAGES

    _stages(source, sets, seed, runs, STAGES[: STAGES.index("eval_after") + 1], as_json)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")], as_json: Json = False
) -> None:
    """Write the run's report and say where it is; --json prints the summary."""
    from tmax.stages.report import report as write_report

    page = write_report(path)
    if as_json:
        typer.echo((page.parent / "summary.json").read_text(encoding="utf-8").rstrip("\n"))
    else:
        typer.echo(str(page))


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A task directory, or a run's directory.")],
    trial: Annotated[str | None, typer.Option(help="With a run: PURPOSE/TASK_ID/INDEX.")] = None,
    as_json: Json = False,
) -> None:
    """Show one task, or one trial of a run turn by turn."""
    if (path / "run.db").is_file():
        _show_trial(path, trial, as_json)
        return
    from dataclasses import asdict

    from tmax.task import read_task

    task = read_task(path)
    facts = {"id": task.task_id, "hash": task.hash, "instruction": task.instruction, "settings": asdict(task.settings)}
    facts["oracle"] = list(task.oracle_steps())
    facts["spec"] = task.card.get("spec", {})
    facts["unknown_keys"] = list(task.unknown_keys)
    text = f"{task.task_id}  {task.hash[:12]}\n\n{task.instruction}\n\noracle:\n" + "\n".join(
        f"  {step}" for step in task.oracle_steps()
    )
    _print(facts if as_json else text)


@app.command()
def config(
    path: Annotated[Path | None, typer.Argument(help="A config file.")] = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Every key with its meaning, as a JSON schema.")] = False,
) -> None:
    """Print a config as it is resolved."""
    from tmax.config import RunConfig, dump_config, load_config

    if schema:
        _print(RunConfig.model_json_schema())
    elif path is None:
        raise ConfigError("give a config file", hint="or `--schema` for every key")
    else:
        typer.echo(dump_config(load_config(path, sets or ())), nl=False)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine, and how to mend what does not."""
    from tmax.doctor import examine

    checks = examine()
    if as_json:
        _print([check.model_dump() for check in checks])
    else:
        for check in checks:
            typer.echo(f"{'ok' if check.works else 'no':3} {check.name:22} {check.detail}")
            if check.mend and not check.works:
                typer.echo(f"{'':26} {check.mend}")
    if not any(check.works for check in checks if check.name.startswith("sandbox")):
        raise typer.Exit(1)


def main() -> None:
    """The entry point: a TmaxError is told in one line with its hint, exit code 1; a bug shows its traceback."""
    try:
        app(standalone_mode=True)
    except TmaxError as error:
        console = _console()
        console.print(f"error: {error.message}", style="red", highlight=False, markup=False)
        if error.hint:
            console.print(f"hint: {error.hint}", highlight=False, markup=False)
        sys.exit(1)


def _stages(
    source: Path, sets: list[str] | None, seed: int | None, runs: Path, stages: "tuple[Stage, ...]", as_json: bool
) -> None:
    from tmax.pipeline import run_stage
    from tmax.run import open_run, read_run_config, reap_run

    console = _console()
    if (source / "run.db").is_file():
        if sets or seed is not None:
            raise ConfigError("a run keeps its config", hint="give --set and --seed with a config file")
        settings, runs = read_run_config(source), source.absolute().parent
    else:
        settings = _config(source, sets, seed)
    details: dict[str, Detail] = {}
    with open_run(settings, runs) as opened:
        console.print(f"run {opened.path}", highlight=False, markup=False)
        if any(stage not in ("sample", "generate", "sft", "report") for stage in stages):
            console.print(f"  sandbox: {opened.engine_reason}", highlight=False, markup=False)
            left = reap_run(opened)
            if left:
                console.print(f"  cleared away {left} sandboxes of a killed process", highlight=False)
        for stage in stages:
            details[stage] = run_stage(opened, stage, _progress())
            console.print(f"{stage:12} {_worded(details[stage])}", highlight=False, markup=False)
        _close(opened, stages, details, as_json)


def _close(opened: "Run", stages: "tuple[Stage, ...]", details: "dict[str, Detail]", as_json: bool) -> None:
    if as_json and stages[-1] == "report":
        typer.echo((opened.path / "report" / "summary.json").read_text(encoding="utf-8").rstrip("\n"))
    elif as_json:
        _print(details)


def _config(path: Path, sets: list[str] | None, seed: int | None) -> "RunConfig":
    from tmax.config import load_config, with_seed

    settings = load_config(path, sets or ())
    return settings if seed is None else with_seed(settings, seed)


def _is_run_or_config(path: Path) -> bool:
    from tmax.config import find_config

    return (path / "run.db").is_file() or find_config(path).suffix in (".yaml", ".yml")


def _world(engine: str, seed: int, agent: Any = None) -> "World":
    from tmax.config import AgentConfig, AutoSandboxConfig, BubblewrapConfig, DockerConfig
    from tmax.sandbox import choose_engine, reap
    from tmax.trial import World

    kinds = {"auto": AutoSandboxConfig, "bubblewrap": BubblewrapConfig, "docker": DockerConfig}
    if engine not in kinds:
        raise ConfigError(f"no sandbox engine `{engine}`", hint=f"engines are: {', '.join(kinds)}")
    chosen, reason = choose_engine(kinds[engine]())
    _console().print(f"sandbox: {reason}", highlight=False, markup=False)
    reap(chosen, label="adhoc")
    return World(chosen, "adhoc", agent or AgentConfig(), seed=seed)


def _policy(name: str, temperature: float, stack: Any) -> "Policy":
    from tmax.config import HfPolicyConfig, Sampling
    from tmax.policy.saved import model_dir
    from tmax.policy.scripted import Noop, Oracle

    if name == "noop":
        return Noop()
    if name == "oracle":
        return Oracle()
    path = model_dir(name)
    if not path.is_dir():
        raise TaskError(f"no policy `{name}`", hint="give noop, oracle, tiny, or the directory of a model")
    from tmax.policy.hf import open_hf_policy
    from tmax.policy.template import ChatTemplate
    from tmax.trial import Model

    policy = stack.enter_context(open_hf_policy(HfPolicyConfig(path=name), str(path)))
    return Model(policy, ChatTemplate(policy.tokenizer), Sampling(temperature=temperature), name=name)


def _show_trial(path: Path, trial: str | None, as_json: bool) -> None:
    from tmax.report.story import describe_trial
    from tmax.store import open_store

    with open_store(path / "run.db", write=False) as store:
        if trial is None:
            keys = [{**item.key.model_dump(), "outcome": item.outcome.value} for item in store.trials()]
            _print(
                keys
                if as_json
                else "\n".join(f"{k['purpose']}/{k['task_id']}/{k['index']}  {k['outcome']}" for k in keys)
            )
            return
        found = store.trial(_trial_key(trial))
        if found is None:
            raise ConfigError(f"the run has no trial `{trial}`", hint="without --trial they are listed")
        _print(found.model_dump(mode="json") if as_json else describe_trial(found))


def _trial_key(text: str) -> "TrialKey":
    from pydantic import ValidationError

    from tmax.records import TrialKey

    purpose, _, rest = text.partition("/")
    task_id, _, index = rest.rpartition("/")
    try:
        return TrialKey.model_validate({"purpose": purpose, "task_id": task_id, "index": index})
    except ValidationError as error:
        raise ConfigError(
            f"`{text}` names no trial", hint="PURPOSE/TASK_ID/INDEX; without --trial they are listed"
        ) from error


def _worded(detail: "Detail") -> str:
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in detail.items()
    )


def _print(data: object) -> None:
    typer.echo(data if isinstance(data, str) else json.dumps(data, indent=2, ensure_ascii=False))


def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def _progress() -> Any:
    from tmax.console import ConsoleProgress

    return ConsoleProgress(_console())


if __name__ == "__main__":
    main()
