"""Stage `report`: reads a run's store and configuration, writes `report/` with a page, plots and figures.

The rule: it only reads the run, so it may be called while another process still writes it; each file is written
aside and renamed, the page last.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from tmax.config import load_config
from tmax.errors import StoreError
from tmax.report.page import render_page
from tmax.report.plots import draw_plots
from tmax.report.story import choose_examples
from tmax.report.summary import summarise
from tmax.store import open_store

NUM_EXAMPLES = 8
"""Tasks whose trials the page tells turn by turn."""


def report(run_dir: Path) -> Path:
    """Write `report/index.html`, `report/*.png` and `report/summary.json`; returns the page's path.

    A run that is half done gives a page that says so. Raises StoreError where there is no run or `report/` cannot
    be written, ConfigError where the run's configuration cannot be read.
    """
    with open_store(run_dir / "run.db", write=False) as store:
        config = load_config(run_dir / "config.yaml")
        summary = summarise(store, config)
        plots = draw_plots(summary, store.steps())
        page = render_page(summary, config, plots, choose_examples(store, limit=NUM_EXAMPLES))
    folder = run_dir / "report"
    try:
        folder.mkdir(exist_ok=True)
        drawn = {plot.name: plot.png for plot in plots.values() if plot.png is not None}
        for stale in folder.glob("*.png"):
            if stale.stem not in drawn:
                stale.unlink()
        for name, png in drawn.items():
            _replace(folder / f"{name}.png", png)
        _replace(folder / "summary.json", (summary.model_dump_json(indent=2) + "\n").encode())
        _replace(folder / "index.html", page.encode())
    except OSError as error:
        raise StoreError(f"cannot write `{folder}`: {error}", hint="check the rights and the disk") from error
    return folder / "index.html"


def _replace(path: Path, content: bytes) -> None:
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(aside).unlink()
        raise
