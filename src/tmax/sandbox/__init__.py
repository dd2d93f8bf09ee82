"""The live machines in which trials run, behind one protocol; engines are chosen here and nowhere else.

The rule: whatever was started is labelled with its run, and is gone when its `with` block or its process ends.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import assert_never

from tmax.config import AutoSandboxConfig, BubblewrapConfig, DockerConfig, EngineConfig, SandboxConfig
from tmax.errors import SandboxError
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID, OUTPUT_LIMIT, Image, Sandbox, Shell, User
from tmax.task import Task


def choose_engine(config: SandboxConfig) -> tuple[EngineConfig, str]:
    """The engine that a configuration means, and why. Raises SandboxError where none works."""
    match config:
        case BubblewrapConfig() | DockerConfig():
            return config, f"`{config.type}` is configured"
        case AutoSandboxConfig():
            return _choose(config)
        case _:
            assert_never(config)


def build_image(config: EngineConfig, task: Task) -> Image:
    """Build a task's image, or find it built. Raises BuildError, TaskError, StartError."""
    match config:
        case BubblewrapConfig():
            from tmax.sandbox.images import build_bubblewrap_image

            return build_bubblewrap_image(config, task)
        case DockerConfig():
            from tmax.sandbox.docker import build_docker_image

            return build_docker_image(config, task)
        case _:
            assert_never(config)


def open_sandbox(
    config: EngineConfig, image: Image, *, label: str, mounts: Sequence[Path] = (), network: bool = False
) -> AbstractContextManager[Sandbox]:
    """Start a sandbox for the length of a `with` block.

    `label` is the run's id; `mounts` are host directories that appear read-only at the same path inside; `network`
    asks for the network in addition to the configuration. Raises StartError.
    """
    match config:
        case BubblewrapConfig():
            from tmax.sandbox.bubblewrap import open_bubblewrap

            wanted = network or config.network
            return open_bubblewrap(config, image, label=label, mounts=mounts, network=wanted)
        case DockerConfig():
            from tmax.sandbox.docker import open_docker

            return open_docker(config, image, label=label, mounts=mounts, network=network or config.network)
        case _:
            assert_never(config)


def reap(config: EngineConfig, *, label: str) -> int:
    """Remove what dead processes of the runs with this label left behind; how many sandboxes that were."""
    match config:
        case BubblewrapConfig():
            from tmax.sandbox.bubblewrap import reap_bubblewrap

            return reap_bubblewrap(label=label)
        case DockerConfig():
            from tmax.sandbox.docker import reap_docker

            return reap_docker(config, label=label)
        case _:
            assert_never(config)


def engine_problem(config: EngineConfig) -> str | None:
    """None where the engine works on this machine, else why not."""
    match config:
        case BubblewrapConfig():
            return bubblewrap_works(config)
        case DockerConfig():
            from tmax.sandbox.docker import docker_works

            return docker_works(config)
        case _:
            assert_never(config)


def bubblewrap_works(config: BubblewrapConfig) -> str | None:
    """None where a sandbox starts, else why not."""
    from tmax.sandbox.bubblewrap import open_bubblewrap

    try:
        with open_bubblewrap(config, Image("bubblewrap", ""), label="probe") as sandbox:
            result = sandbox.exec(["true"], user="agent", timeout=30.0)
    except SandboxError as error:
        return error.message
    return None if result.exit_code == 0 else f"`true` ended with {result.exit_code}: {result.output.strip()}"


def _choose(config: AutoSandboxConfig) -> tuple[EngineConfig, str]:
    shared = {"network": config.network, "limits": config.limits}
    docker = DockerConfig(base=config.base, **shared)
    if config.base is None:
        no_docker: str | None = "no `base` image is configured"
    else:
        from tmax.sandbox.docker import docker_works

        no_docker = docker_works(docker)
    if no_docker is None:
        return docker, f"a Docker daemon answers and has `{config.base}`"
    bubblewrap = BubblewrapConfig(**shared)
    no_bubblewrap = bubblewrap_works(bubblewrap)
    if no_bubblewrap is None:
        return bubblewrap, f"bubblewrap works here; Docker is not used: {no_docker}"
    raise SandboxError(
        f"no sandbox engine works: Docker: {no_docker}; bubblewrap: {no_bubblewrap}", kind="engine",
        hint="start a Docker daemon and give `sandbox.base`, or allow unprivileged user namespaces",
    )  # fmt: skip


__all__ = [
    "AGENT_HOME",
    "AGENT_UID",
    "OUTPUT_LIMIT",
    "Image",
    "Sandbox",
    "Shell",
    "User",
    "bubblewrap_works",
    "build_image",
    "choose_engine",
    "engine_problem",
    "open_sandbox",
    "reap",
]
