"""Engines that the integration tests run on, and the tasks that they build."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tmax.config import BubblewrapConfig, DockerConfig, EngineConfig, Limits
from tmax.sandbox import bubblewrap_works
from tmax.task import FileSpec, Settings, Task, TaskDraft, Truth, write_task

LIMITS = Limits(memory_mb=256, pids=64, file_mb=16, disk_mb=128)

MakeTask = Callable[..., Task]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this session's own, at a path that is not clean."""
    folder = tmp_path_factory.mktemp("a cache: of,its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMAX_CACHE", str(folder))
        yield folder


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bwrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def engine(request: pytest.FixtureRequest, cache: Path) -> EngineConfig:
    """Each engine that works here, with small limits."""
    if request.param == "bubblewrap":
        bubblewrap = BubblewrapConfig(limits=LIMITS)
        problem = bubblewrap_works(bubblewrap)
        if problem is not None:
            pytest.skip(f"bubblewrap does not work here: {problem}")
        return bubblewrap
    from tmax.sandbox.docker import docker_works

    docker = DockerConfig(base="tmax-base", limits=LIMITS)
    problem = docker_works(docker)
    if problem is not None:
        pytest.skip(f"Docker does not work here: {problem}")
    return docker


@pytest.fixture
def make_task(write_tiny_task: Callable[..., Task], tmp_path: Path) -> MakeTask:
    """Writes a task with a Dockerfile and files of its build context; keywords are its settings."""
    return functools.partial(write_tiny_task, tmp_path / "tasks")


@pytest.fixture(scope="session")
def write_tiny_task() -> Callable[..., Task]:
    """As `make_task`, under a directory that is given first."""
    return _write_tiny_task


def _write_tiny_task(
    root: Path, dockerfile: str, files: dict[str, bytes | FileSpec] | None = None, **settings: Any
) -> Task:
    """A task of no interest but its image."""
    draft = TaskDraft(
        instruction="Do nothing.",
        dockerfile=dockerfile,
        files={name: body if isinstance(body, FileSpec) else FileSpec(body) for name, body in (files or {}).items()},
        initial_test="def test_nothing():\n    assert True\n",
        final_test="def test_nothing():\n    assert False\n",
        steps=("true",),
        truth=Truth("", "", "", ""),
        spec={"family": "tiny", "level": 1, "domain": "none"},
        settings=Settings(**settings),
    )
    return write_task(draft, root)
