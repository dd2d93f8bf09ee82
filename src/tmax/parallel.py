"""Runs one function over many items in threads; the only module that starts any.

The rule: results come back as they finish, in the caller's thread, so the store has one writer.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")


def map_unordered(
    function: Callable[[Item], Done], items: Iterable[Item], *, workers: int
) -> Iterator[tuple[Item, Done]]:
    """Apply `function` to the items, `workers` at a time, and yield (item, value) as they finish.

    Items are drawn lazily, one ahead of the free workers. An exception ends the iteration once the calls that
    are already running have returned; nothing new is started.
    """
    source = iter(items)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="tmax") as pool:
        running: dict[Future[Done], Item] = {}
        try:
            for item in source:
                running[pool.submit(function, item)] = item
                if len(running) >= workers:
                    yield from _finished(running)
            while running:
                yield from _finished(running)
        finally:
            for future in running:
                future.cancel()


def _finished(running: dict[Future[Done], Item]) -> list[tuple[Item, Done]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    return [(running.pop(future), future.result()) for future in done]


class Worker(Protocol):
    """A background loop; see `start_worker`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the loop to end."""
        ...


def start_worker(loop: Callable[[], None], *, name: str) -> Worker:
    """Start a daemon thread that runs `loop` once; it must end by itself when its owner closes."""
    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    return thread


__all__ = ["Worker", "map_unordered", "queue", "start_worker"]
