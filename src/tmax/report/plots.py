"""The plots of a report, each drawn once for a page (SVG that takes the page's colours) and once as a PNG.

The rule: matplotlib is loaded when a plot is drawn, through its Figure objects only, so no global state is touched.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tmax.records import StepRow
from tmax.report.evaluation import Breakdown, Evaluation, Rate
from tmax.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Palette:
    """Colours by role."""

    ink: str
    muted: str
    grid: str
    before: str
    after: str
    paper: str


PAPER = Palette(
    ink="#1c1e21", muted="#63676e", grid="#e3e5e8", before="#8a929e", after="#1c6dd0", paper="#ffffff"
)  # fmt: skip

# Colours that nothing else uses; in an SVG each becomes the page's variable of that role.
_MARKS = Palette(ink="#010101", muted="#020202", grid="#030303", before="#040404", after="#050505", paper="#060606")
_VARIABLES = {getattr(_MARKS, role): f"var(--{role})" for role in ("ink", "muted", "grid", "before", "after", "paper")}

MIN_TASKS = 5
"""Tables and plots show no interval for fewer tasks: too few for a bootstrap to mean much."""

METRICS: dict[str, tuple[str, str]] = {
    "solve_rate_all": ("Solve rate, all drawn groups", "share of scored trials"),
    "reward_mean": ("Mean reward, trained groups", "reward"),
    "loss": ("Loss", "surrogate loss"),
    "entropy": ("Entropy", "nats per token"),
    "grad_norm": ("Gradient norm, before clipping", "L2 norm"),
    "mask_fraction": ("Masked by the trust region", "share of tokens"),
    "ratio_max": ("Largest probability ratio", "ratio"),
    "logprob_gap_mean": ("Sampler–trainer gap, mean", "nats"),
    "logprob_gap_max": ("Sampler–trainer gap, largest", "nats"),
    "tokens": ("Tokens trained", "tokens per step"),
    "turns_mean": ("Turns", "turns per trial"),
    "response_tokens_mean": ("Sampled tokens", "tokens per trial"),
    "groups_drawn": ("Groups drawn", "groups per step"),
    "groups_kept": ("Groups kept", "groups per step"),
    "groups_all_zero": ("Groups with no pass", "groups per step"),
    "groups_all_one": ("Groups with no fail", "groups per step"),
    "errors": ("Trials without a reward", "trials per step"),
    "seconds_rollout": ("Time in rollouts", "seconds per step"),
    "seconds_update": ("Time in updates", "seconds per step"),
}
"""Title and unit of the metrics that are known; others are plotted under their own names."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot; `alt` says in words what it shows."""

    name: str
    alt: str
    svg: str | None = None
    """For the page."""
    png: bytes | None = None
    """For a file of its own."""


def draw_plots(summary: Summary, steps: Sequence[StepRow]) -> dict[str, Plot]:
    """The plots whose data there are, by name.

    Metrics are `metric_<name>`, each for the page, and `metrics`, one PNG of them all.
    """
    plots: list[Plot] = []
    curve = _series(steps, "solve_rate_all")
    if curve:
        plots.append(_plot("learning_curve", "Solve rate by training step", lambda p: _learning_curve(p, curve)))
    if any(side and side.rate for side in (summary.before, summary.after)):
        rows = _interval_rows(summary)
        plots.append(_plot("before_after", "Pass rates before and after training", lambda p: _before_after(p, rows)))
        plots.append(_plot("pass_at_k", "pass@k before and after training", lambda p: _pass_at_k(p, summary)))
    if summary.calibration and summary.calibration.measured:
        bins = summary.calibration.histogram
        plots.append(_plot("calibration", "Training tasks by pass rate", lambda p: _histogram(p, bins)))
    plots += _metric_plots(steps)
    return {plot.name: plot for plot in plots}


def _metric_plots(steps: Sequence[StepRow]) -> list[Plot]:
    present = {name for step in steps for name in step.metrics} - {"solve_rate_all"}
    names = [*(name for name in METRICS if name in present), *sorted(present - set(METRICS))]
    names = [name for name in names if _series(steps, name)]
    panels: list[Panel] = [(*METRICS.get(name, (name, "")), _series(steps, name)) for name in names]
    if not panels:
        return []
    plots = []
    for name, panel in zip(names, panels, strict=True):
        svg = _svg(f"metric_{name}", partial(_metrics, panels=[panel]))
        plots.append(Plot(f"metric_{name}", f"{panel[0]} by training step", svg=svg))
    return [*plots, Plot("metrics", "Every metric by training step", png=_png(lambda p: _metrics(p, panels)))]


Series = list[tuple[int, float]]

Panel = tuple[str, str, Series]
"""A metric's title, unit and values."""


def _series(steps: Sequence[StepRow], name: str) -> Series:
    found = [(step.step, step.metrics[name]) for step in steps if name in step.metrics]
    return [(step, value) for step, value in found if math.isfinite(value)]


Draw = Callable[[Palette], "Figure"]


def _plot(name: str, alt: str, draw: Draw) -> Plot:
    return Plot(name, alt, svg=_svg(name, draw), png=_png(draw))


def _svg(name: str, draw: Draw) -> str:
    vector = io.BytesIO()
    with _style(name):
        draw(_MARKS).savefig(vector, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(vector.getvalue().decode("utf-8"))


def _png(draw: Draw) -> bytes:
    raster = io.BytesIO()
    with _style(""):
        draw(PAPER).savefig(raster, format="png", dpi=160, facecolor=PAPER.paper, metadata={"Software": None})
    return raster.getvalue()


def _style(salt: str) -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context(
        {
            "font.size": 8.5,
            "text.parse_math": False,
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "legend.frameon": False,
            "legend.handletextpad": 0.4,
        }
    )


def _for_page(svg: str) -> str:
    """Only what the page needs: no preamble, no addresses, no style that leaks, colours by variable."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'<svg([^>]*?)\swidth="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?)\sheight="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'\sid="[\w.]+_\d+"', "", svg)  # groups are numbered from 1 in every plot
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page has its own
    for mark, variable in _VARIABLES.items():
        svg = svg.replace(mark, variable)
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def _figure(palette: Palette, width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    _calm(axes, palette)
    return figure, axes


def _calm(axes: "Axes", palette: Palette) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_color(palette.muted)
    axes.spines["left"].set_visible(False)
    axes.tick_params(colors=palette.muted, labelcolor=palette.ink)
    axes.xaxis.label.set_color(palette.muted)
    axes.yaxis.label.set_color(palette.muted)
    axes.grid(axis="y", color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)


def _whole_steps(axes: "Axes", most: int = 6) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))


def _percent(axis: "Axis") -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values (made odd), fewer at the ends."""
    half = window // 2
    means = []
    for index in range(len(values)):
        near = values[max(0, index - half) : index + half + 1]
        means.append(sum(near) / len(near))
    return means


def _learning_curve(palette: Palette, series: Series) -> "Figure":
    figure, axes = _figure(palette, 4.7, 2.4)
    steps, values = [step for step, _ in series], [value for _, value in series]
    window = max(3, len(values) // 8) | 1
    axes.plot(steps, values, "o", color=palette.before, markersize=3, markeredgewidth=0, label="one step")
    axes.plot(steps, moving_mean(values, window), color=palette.after, linewidth=1.8, label=f"mean of {window} steps")
    axes.set_xlabel("training step")
    axes.set_ylabel("trials solved, all drawn groups")
    axes.set_ylim(-0.02, 1.02)
    _percent(axes.yaxis)
    _whole_steps(axes)
    axes.legend(labelcolor=palette.ink, loc="best")
    return figure


def _metrics(palette: Palette, panels: Sequence[Panel]) -> "Figure":
    """Small multiples with fixed margins, which is many times faster than to fit each to its labels."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width, height = 2.8 * columns, 1.8 * rows
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.72 / width, right=1 - 0.1 / width, bottom=0.42 / height, top=1 - 0.26 / height, wspace=0.42, hspace=0.62
    )
    for place, (title, unit, series) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        _calm(axes, palette)
        _metric(axes, palette, title, unit, series)
    return figure


def _metric(axes: "Axes", palette: Palette, title: str, unit: str, series: Series) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps, values = [step for step, _ in series], [value for _, value in series]
    marker = "o" if len(series) < 40 else ""
    axes.plot(steps, values, color=palette.after, linewidth=1.2, marker=marker, markersize=2.2)
    axes.set_title(title, loc="left", fontsize=8.5, color=palette.ink)
    axes.set_ylabel(unit)
    axes.yaxis.set_label_coords(-0.27, 0.5)
    axes.set_xlabel("training step")
    _whole_steps(axes, 5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=all(value == round(value, 0) for value in values)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """At most seven characters or so: `12 k`, `3.5 M`, `0.25`, `2e-06`."""
    for size, sign in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if sign == ' k' else size):.4g}{sign}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


IntervalRow = tuple[str, bool, Rate | None, Rate | None]
"""Label, whether it is a row of its own rank (not a level), before, after."""


def _interval_rows(summary: Summary) -> list[IntervalRow]:
    rows: list[IntervalRow] = [("all tasks", True, _rate_of(summary.before), _rate_of(summary.after))]
    rows += [(_row_label(row), row.level is None, row.before, row.after) for row in summary.breakdown]
    return rows


def _rate_of(evaluation: Evaluation | None) -> Rate | None:
    return evaluation.rate if evaluation else None


def _row_label(row: Breakdown) -> str:
    return row.family if row.level is None else f"level {row.level}"


def _before_after(palette: Palette, rows: list[IntervalRow]) -> "Figure":
    figure, axes = _figure(palette, 4.7, 0.85 + 0.31 * len(rows))
    for place, (_, whole, before, after) in enumerate(rows):
        for rate, colour, shift, name in (
            (before, palette.before, -0.14, "before"),
            (after, palette.after, 0.14, "after"),
        ):
            if rate is None:
                continue
            label = name if place == 0 else None
            size = 1.0 if whole else 0.7
            if rate.tasks >= MIN_TASKS:
                axes.plot(rate.interval, [place + shift] * 2, color=colour, linewidth=1.8 * size)
            axes.plot(
                [rate.value], [place + shift], "o", color=colour, markersize=5 * size, markeredgewidth=0, label=label
            )
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    for tick, (_, whole, *_) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(palette.ink if whole else palette.muted)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=palette.grid, linewidth=0.7)
    axes.axhline(0.5, color=palette.grid, linewidth=0.7)
    _percent(axes.xaxis)
    axes.set_xlabel("held-out trials passed, mean over tasks, 95 % interval")
    figure.legend(labelcolor=palette.ink, loc="outside upper right", ncols=2)
    return figure


def _pass_at_k(palette: Palette, summary: Summary) -> "Figure":
    figure, axes = _figure(palette, 3.4, 2.2)
    for evaluation, colour, name in (
        (summary.before, palette.before, "before"),
        (summary.after, palette.after, "after"),
    ):
        if evaluation and evaluation.pass_at_k:
            ks = [row.k for row in evaluation.pass_at_k]
            values = [row.value for row in evaluation.pass_at_k]
            axes.plot(ks, values, color=colour, linewidth=1.6, marker="o", markersize=4, label=name)
    axes.set_xlabel("k, trials allowed")
    axes.set_ylabel("tasks solved at least once")
    axes.set_ylim(-0.02, 1.02)
    _percent(axes.yaxis)
    _whole_steps(axes)
    axes.legend(labelcolor=palette.ink, loc="best")
    return figure


def _histogram(palette: Palette, bins: Sequence[tuple[str, int]]) -> "Figure":
    figure, axes = _figure(palette, 3.4, 2.2)
    outer = (0, len(bins) - 1)
    colours = [palette.before if place in outer else palette.after for place in range(len(bins))]
    bars = axes.bar(range(len(bins)), [count for _, count in bins], width=0.78, color=colours)
    axes.bar_label(bars, color=palette.ink, padding=2, fontsize=8)
    axes.set_xticks(range(len(bins)), [f"{label}" for label, _ in bins], fontsize=7.5)
    axes.set_xlabel("pass rate before training")
    axes.set_ylabel("training tasks")
    axes.margins(y=0.15)
    axes.locator_params(axis="y", nbins=4, integer=True)
    return figure
