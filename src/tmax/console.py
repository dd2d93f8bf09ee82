"""Shows progress to people on stderr with rich; stdout stays free for data."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_QUIET_SECONDS = 2.0
"""Work that is over sooner shows no bar."""


class ConsoleProgress:
    """A bar for each piece of work that takes longer than two seconds; plain lines where stderr is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._total = self._done = 0
        self._note = ""
        self._began = self._spoke = 0.0

    def start(self, title: str, *, total: int, done: int = 0) -> None:
        """See `Progress`."""
        self.finish()
        self._title, self._total, self._done, self._note = title, total, done, ""
        self._began = self._spoke = time.monotonic()

    def advance(self, note: str = "") -> None:
        """See `Progress`."""
        self._done += 1
        self._note = note or self._note
        now = time.monotonic()
        if now - self._began < _QUIET_SECONDS:
            return
        if self._console.is_terminal:
            self._show_bar()
        elif now - self._spoke > 15 or (note and self._done == self._total):
            self._spoke = now
            self._console.print(
                f"  {self._title}: {self._done}/{self._total} {self._note}", highlight=False, markup=False
            )

    def finish(self) -> None:
        """See `Progress`."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None

    def say(self, line: str) -> None:
        """See `Progress`."""
        self._console.print(f"  {line}", highlight=False, markup=False)

    def _show_bar(self) -> None:
        if self._bars is None:
            columns = (
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
            self._task = self._bars.add_task(self._title, total=self._total, note="")
        assert self._task is not None
        self._bars.update(self._task, completed=self._done, note=self._note)
