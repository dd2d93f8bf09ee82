"""A run's SQLite database: append, read, skip what is done; the only module that speaks SQL.

The rule: one process writes a run at a time (a lock file says so) and every row is committed before anybody is
told of it, so a killed stage starts again where its rows end.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tmax.errors import StoreError
from tmax.records import (
    Calibration,
    Evidence,
    GroupRow,
    Outcome,
    Purpose,
    Spec,
    StageRow,
    StageState,
    StepRow,
    TaskRow,
    Trajectory,
    Trial,
    TrialKey,
)

FORMAT = 1
"""Version of the tables; a run of another version is refused rather than misread."""

_PAGE = 200
"""Trials that are read from the database at once."""

_TABLES = """
CREATE TABLE specs (idx INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE tasks (task_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE evidence (task_id TEXT NOT NULL, task_hash TEXT NOT NULL, verdict TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (task_id, task_hash));
CREATE TABLE trials (purpose TEXT NOT NULL, task_id TEXT NOT NULL, idx INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, policy TEXT NOT NULL, body TEXT NOT NULL, trajectory BLOB, PRIMARY KEY (purpose, task_id, idx));
CREATE TABLE calibration (task_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE groups (step INTEGER NOT NULL, first_idx INTEGER NOT NULL, task_id TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (step, task_id, first_idx));
CREATE TABLE steps (step INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE stages (name TEXT PRIMARY KEY, state TEXT NOT NULL, seconds REAL NOT NULL, body TEXT NOT NULL);
"""


class Store:
    """An open run database. Made by `open_store`; any thread may call it, one writes at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock_fd: int | None) -> None:
        self.path = path
        self._connection = connection
        self._lock_fd = lock_fd
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and let another process write."""
        self._connection.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # specs and tasks

    def add_specs(self, specs: list[Spec]) -> None:
        """Keep the sampled specs, all at once."""
        rows = [(spec.index, spec.model_dump_json()) for spec in specs]
        self._write_many("INSERT OR REPLACE INTO specs VALUES (?, ?)", rows)

    def specs(self) -> list[Spec]:
        """The sampled specs in order."""
        return [Spec.model_validate_json(body) for (body,) in self._read("SELECT body FROM specs ORDER BY idx")]

    def add_task(self, row: TaskRow) -> None:
        """Keep a generated task."""
        values = (row.task_id, row.spec.index, row.spec.split, row.model_dump_json())
        self._write("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?)", values)

    def tasks(self, split: str | None = None) -> list[TaskRow]:
        """The generated tasks in the order of their specs."""
        where = "" if split is None else " WHERE split = ?"
        rows = self._read(f"SELECT body FROM tasks{where} ORDER BY idx", () if split is None else (split,))
        return [TaskRow.model_validate_json(body) for (body,) in rows]

    # evidence

    def add_evidence(self, evidence: Evidence) -> None:
        """Keep what the gates saw; evidence for another hash of the task stays beside it."""
        values = (evidence.task_id, evidence.task_hash, evidence.verdict, evidence.model_dump_json())
        self._write("INSERT OR REPLACE INTO evidence VALUES (?, ?, ?, ?)", values)

    def evidence(self) -> dict[tuple[str, str], Evidence]:
        """Evidence by (task id, task hash)."""
        found = [Evidence.model_validate_json(body) for (body,) in self._read("SELECT body FROM evidence")]
        return {(item.task_id, item.task_hash): item for item in found}

    def accepted(self, split: str) -> list[TaskRow]:
        """Tasks of a split whose evidence, for the hash they have now, says ACCEPT."""
        proven = self.evidence()
        rows = self.tasks(split)
        keys = [(row.task_id, row.task_hash) for row in rows]
        return [row for row, key in zip(rows, keys, strict=True) if key in proven and proven[key].verdict == "ACCEPT"]

    # trials

    def add_trial(self, trial: Trial) -> None:
        """Keep a trial. Raises StoreError if the run has one of the same key already."""
        body = trial.model_copy(update={"trajectory": None}).model_dump_json()
        story = None
        if trial.trajectory is not None:
            story = zlib.compress(trial.trajectory.model_dump_json().encode(), level=6)
        key = trial.key
        values = (key.purpose, key.task_id, key.index, trial.outcome.value, trial.reward, trial.policy, body, story)
        self._write("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def trial_keys(self, purpose: Purpose) -> set[tuple[str, int]]:
        """(task id, index) of the trials there are, so that a stage skips them."""
        rows = self._read("SELECT task_id, idx FROM trials WHERE purpose = ?", (purpose,))
        return {(str(task_id), int(index)) for task_id, index in rows}

    def trials(
        self, purpose: Purpose | None = None, *, task_id: str | None = None, trajectories: bool = False
    ) -> Iterator[Trial]:
        """Trials by purpose, task and index; trajectories are unpacked only where they are asked for."""
        clauses = [(name, value) for name, value in (("purpose", purpose), ("task_id", task_id)) if value is not None]
        where = " AND ".join([*(f"{name} = ?" for name, _ in clauses), "(purpose, task_id, idx) > (?, ?, ?)"])
        columns = "body, trajectory" if trajectories else "body, NULL"
        sql = f"SELECT {columns} FROM trials WHERE {where} ORDER BY purpose, task_id, idx LIMIT {_PAGE}"
        values = tuple(value for _, value in clauses)
        last: tuple[str, str, int] = ("", "", -1)
        # A page at a time: a long run holds more trajectories than fit into memory.
        while page := self._read(sql, (*values, *last)):
            for body, story in page:
                trial = Trial.model_validate_json(body)
                last = (trial.key.purpose, trial.key.task_id, trial.key.index)
                if story is not None:
                    trajectory = Trajectory.model_validate_json(zlib.decompress(story))
                    trial = trial.model_copy(update={"trajectory": trajectory})
                yield trial

    def trial(self, key: TrialKey) -> Trial | None:
        """One trial with its trajectory, or None."""
        for trial in self.trials(key.purpose, task_id=key.task_id, trajectories=True):
            if trial.key.index == key.index:
                return trial
        return None

    def count_trials(self) -> dict[tuple[Purpose, Outcome], int]:
        """How many trials there are by purpose and outcome."""
        rows = self._read("SELECT purpose, outcome, count(*) FROM trials GROUP BY purpose, outcome")
        return {(purpose, Outcome(outcome)): int(count) for purpose, outcome, count in rows}

    # calibration and training

    def add_calibration(self, row: Calibration) -> None:
        """Keep a task's pass rate."""
        self._write("INSERT OR REPLACE INTO calibration VALUES (?, ?)", (row.task_id, row.model_dump_json()))

    def calibration(self) -> dict[str, Calibration]:
        """Pass rates by task."""
        found = [Calibration.model_validate_json(body) for (body,) in self._read("SELECT body FROM calibration")]
        return {row.task_id: row for row in found}

    def add_step(self, step: StepRow, groups: list[GroupRow]) -> None:
        """Keep a training step and the groups it drew, together, in place of an earlier try at the same step."""
        with self._transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (step.step, step.model_dump_json()))
            cursor.execute("DELETE FROM groups WHERE step = ?", (step.step,))
            rows = [(group.step, group.first_index, group.task_id, group.model_dump_json()) for group in groups]
            cursor.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?)", rows)

    def steps(self) -> list[StepRow]:
        """The training steps in order."""
        return [StepRow.model_validate_json(body) for (body,) in self._read("SELECT body FROM steps ORDER BY step")]

    def groups(self) -> list[GroupRow]:
        """The groups that training drew, by step."""
        rows = self._read("SELECT body FROM groups ORDER BY step, first_idx, task_id")
        return [GroupRow.model_validate_json(body) for (body,) in rows]

    # stages

    def set_stage(
        self,
        name: str,
        state: StageState,
        *,
        seconds: float = 0.0,
        detail: dict[str, float | int | str | None] | None = None,
    ) -> None:
        """Say how far a stage is and add `seconds` to its time over all starts."""
        with self._transaction() as cursor:
            old = cursor.execute("SELECT seconds FROM stages WHERE name = ?", (name,)).fetchone()
            total = seconds + (float(old[0]) if old else 0.0)
            cursor.execute(
                "INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?)", (name, state, total, json.dumps(detail or {}))
            )

    def stages(self) -> dict[str, StageRow]:
        """The stages that were started, by name."""
        rows = self._read("SELECT name, state, seconds, body FROM stages ORDER BY rowid")
        return {
            name: StageRow(name=name, state=state, seconds=seconds, detail=json.loads(body))
            for name, state, seconds, body in rows
        }

    # inside

    def _read(self, sql: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._mutex, _store_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    def _write(self, sql: str, values: tuple[object, ...]) -> None:
        with self._transaction() as cursor:
            cursor.execute(sql, values)

    def _write_many(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._transaction() as cursor:
            cursor.executemany(sql, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with self._mutex, _store_errors(self.path), self._connection:
            yield self._connection.cursor()


def open_store(path: Path, *, write: bool = True) -> Store:
    """Open a run's database, making it where `write` is set.

    Raises StoreError if another process writes the run, the file is no run database or of another version, or
    there is none to read.
    """
    if not write and not path.is_file():
        raise StoreError(f"no run at `{path.parent}`", hint="`tmax run CONFIG` makes one under `runs/`")
    lock_fd = _lock(path) if write else None
    connection = None
    try:
        with _store_errors(path):
            mode = "rwc" if write else _read_mode(path)
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=30)
            _prepare(connection, path, write=write)
    except StoreError:
        if connection is not None:
            connection.close()
        if lock_fd is not None:
            os.close(lock_fd)
        raise
    return Store(path, connection, lock_fd)


def _read_mode(path: Path) -> str:
    # Reading needs a `-shm` file beside the database; where none can be made and no log is there, nobody writes.
    alone = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    return "ro&immutable=1" if alone else "ro"


def _prepare(connection: sqlite3.Connection, path: Path, *, write: bool) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if version == 0 and empty and write:
        # WAL with synchronous NORMAL survives the death of the process at any instant, which is what is promised.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {FORMAT};COMMIT;")
    elif version != FORMAT:
        raise StoreError(f"`{path}` is of format {version}, this tmax reads format {FORMAT}", hint="use a new run name")
    connection.execute("PRAGMA synchronous = NORMAL")


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot write `{path.parent}`: {error}", hint="check the path, the rights and the disk"
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise StoreError(
            f"another process is writing the run `{path.parent}`", hint="wait for it, or stop it"
        ) from error
    return lock_fd


@contextlib.contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise StoreError(f"`{path}` has such a row already: {error}", hint="this is a bug in a stage") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise StoreError(
                f"`{path}` is no run database", hint="move the file away, or use a new run name"
            ) from error
        raise StoreError(f"`{path}`: {error}", hint="check the disk; `tmax doctor` says what is free") from error
