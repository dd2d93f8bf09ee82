"""One self-contained HTML page out of a run's figures, plots and example trajectories.

The rule: everything that comes from a run is escaped, and the page asks the network for nothing.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import tmax
from tmax.config import RunConfig, dump_config
from tmax.records import Outcome, Purpose
from tmax.report.plots import MIN_TASKS, Plot
from tmax.report.story import Example, shorten, visible
from tmax.report.summary import Summary

TEXT_LIMIT = 4000
"""Characters of one reply, command or observation that the page shows; `tmax show` prints all of them."""

PURPOSES: dict[Purpose, str] = {
    "validate_initial": "validation, initial tests",
    "validate_noop": "validation, untouched",
    "validate_oracle": "validation, oracle",
    "rollout": "rollout",
    "calibrate": "calibration",
    "train": "training",
    "eval_before": "evaluation before",
    "eval_after": "evaluation after",
}

POLICIES = {
    "scored_only": ("scored only", "failures are left out; the headline"),
    "leaderboard": ("leaderboard", "verifier time-outs count as 0, other failures are left out"),
    "errors_as_zero": ("errors as zero", "every failure counts as 0"),
}

FATES = {
    "kept": "kept: trained on",
    "all_zero": "no trial passed",
    "all_one": "every trial passed",
    "no_spread": "rewards all equal",
    "too_few_scored": "too few scored trials",
    "surplus": "more than the step needed",
}


def render_page(summary: Summary, config: RunConfig, plots: dict[str, Plot], examples: Sequence[Example]) -> str:
    """The page as one string of HTML."""
    outcomes = [kind.value for kind in Outcome if any(kind.value in row for row in summary.outcomes.values())]
    return _environment().get_template("page.html.j2").render(
        s=summary,
        config=config,
        config_text=dump_config(config),
        plots=plots,
        metrics=[plot for name, plot in plots.items() if name.startswith("metric_")],
        examples=examples,
        outcomes=outcomes,
        purposes=[(purpose, words) for purpose, words in PURPOSES.items() if purpose in summary.outcomes],
        purpose_words=PURPOSES,
        policies=POLICIES,
        fates=FATES,
        min_tasks=MIN_TASKS,
        has_intervals=any(row.before and row.before.tasks >= MIN_TASKS for row in summary.breakdown),
        verdict=_verdict(summary),
        version=tmax.__version__,
    )  # fmt: skip


def percent(share: float) -> str:
    """`0.125` as `12.5 %`, with a space that does not break."""
    return f"{100 * share:.1f}\u00a0%"


def points(difference: float) -> str:
    """`-0.125` as `−12.5`, in percentage points."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def count(number: int) -> str:
    """`12345` with thin spaces between groups of three."""
    return f"{number:,}".replace(",", "\u202f")


def duration(seconds: float) -> str:
    """Seconds as people say them: `0.42 s`, `12 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 0.0005:
        return "0\u00a0s"
    if seconds < 9.5:
        return f"{seconds:.2g}\u00a0s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}\u00a0s"
    if whole < 3600:
        return f"{whole // 60}\u00a0min {whole % 60:02d}\u00a0s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}\u00a0h {minutes % 60:02d}\u00a0min"


def _verdict(summary: Summary) -> str:
    if summary.difference is None or summary.difference_ci is None:
        if summary.pass_rate_before is None:
            return "The policy has not been evaluated yet."
        return "The policy was evaluated before training; the evaluation after it has not run yet."
    if (summary.difference_tasks or 0) < MIN_TASKS:
        return f"Fewer than {MIN_TASKS} tasks were scored on both sides: too few to say whether training helped."
    low, high = summary.difference_ci
    if low > 0:
        return "Training raised the pass rate: the interval of the difference lies above zero."
    if high < 0:
        return "Training lowered the pass rate: the interval of the difference lies below zero."
    return "The interval of the difference includes zero: these tasks do not show that training changed the pass rate."


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "count": count,
        "duration": duration,
        "visible": visible,
        "cut": lambda text: visible(shorten(text, TEXT_LIMIT)),
    }
    return environment
