"""The Docker engine: one container a sandbox, over the Docker Engine API; a Podman socket speaks the same.

The rule: a container is removed by name when its `with` block ends, whatever became of it, and by its labels where its
owner was killed before that.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.types import LogConfig, Mount, Ulimit

from tmax.config import DockerConfig
from tmax.errors import SandboxError, StartError
from tmax.sandbox.docker_api import address, connect, explain, translated
from tmax.sandbox.docker_build import build_docker_image
from tmax.sandbox.docker_sandbox import DockerSandbox
from tmax.sandbox.protocol import Image

__all__ = ["build_docker_image", "docker_works", "open_docker", "reap_docker"]

_PROBE_TIMEOUT = 2
_RUN_LABEL, _OWNER_LABEL = "tmax.run", "tmax.owner"

_CAPABILITIES = ("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP",
                 "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT")  # fmt: skip
"""What root keeps: Docker's default without making devices and raw packets."""

_NO_DISK_LIMIT = ("storage-opt", "storage opt", "quota")
_boundless: set[str] = set()
"""Daemons that cannot bound a container's disk, as most storage drivers cannot; it shows when they are asked to."""

_FIRST_PROCESS = "trap '' CHLD; exec 3<> <(:); exec cat <&3 >/dev/null"
"""Waits for a pipe that nobody writes to. It ignores SIGCHLD, so orphans leave no zombies; it handles no signal, so
none from inside the container ends it; and it has no child, so what kills everything else leaves it alive."""


def docker_works(config: DockerConfig) -> str | None:
    """None if a daemon answers within about three seconds and has `config.base` where that is given; else why not."""
    try:
        client = connect(config, timeout=_PROBE_TIMEOUT)
    except SandboxError as error:
        return error.message
    try:
        with translated("look for the base image"):
            if config.base is not None:
                client.inspect_image(config.base)  # type: ignore[no-untyped-call]
    except SandboxError as error:
        if isinstance(error.__cause__, NotFound):
            return f"the daemon at {address(config)} has no image `{config.base}`"
        return error.message
    finally:
        client.close()
    return None


@contextmanager
def open_docker(
    config: DockerConfig, image: Image, *, label: str, mounts: Sequence[Path] = (), network: bool = False
) -> Iterator["DockerSandbox"]:
    """A container of `image`, removed with all that is in it when the block ends.

    `mounts` are host paths, seen read-only at the same place; `label` names the run. Raises StartError where the
    container does not start, SandboxError where it cannot be removed.
    """
    client = _connect_to_start(config)
    name = f"tmax-{secrets.token_hex(8)}"
    try:
        try:
            sandbox = _start(client, config, image, name=name, label=label, mounts=mounts, network=network)
            with closing(sandbox):
                yield sandbox
        except BaseException:
            # An error on its way out says more than a removal that fails after it; `reap_docker` finds what is left.
            with suppress(SandboxError):
                _remove(client, name)
            raise
        _remove(client, name)
    finally:
        client.close()


def reap_docker(config: DockerConfig, *, label: str) -> int:
    """Remove the containers of run `label` whose owner no longer lives, and say how many they were.

    Containers of living owners and of other runs stay. Raises SandboxError where no daemon answers.
    """
    client = connect(config)
    try:
        with translated("list containers"):
            found = client.containers(all=True, filters={"label": f"{_RUN_LABEL}={label}"})
        dead = [entry["Id"] for entry in found if not _owner_may_live(entry)]
        for container in dead:
            _remove(client, container)
        return len(dead)
    finally:
        client.close()


def _connect_to_start(config: DockerConfig) -> docker.APIClient:
    try:
        return connect(config)
    except SandboxError as error:
        raise StartError(error.message, kind=error.kind, hint=error.hint) from error


def _start(
    client: docker.APIClient,
    config: DockerConfig,
    image: Image,
    *,
    name: str,
    label: str,
    mounts: Sequence[Path],
    network: bool,
) -> DockerSandbox:
    try:
        with translated("start a container"):
            _create(client, config, image, name=name, label=label, mounts=mounts, network=network)
            client.start(name)
            state = client.inspect_container(name)
    except SandboxError as error:
        raise StartError(error.message, kind=error.kind, hint=error.hint) from error
    return DockerSandbox(client, image, name, _leader(state), mounts)


def _create(
    client: docker.APIClient,
    config: DockerConfig,
    image: Image,
    *,
    name: str,
    label: str,
    mounts: Sequence[Path],
    network: bool,
) -> None:
    limits = config.limits
    file_bytes = limits.file_mb * 1024 * 1024
    host_config = client.create_host_config(
        network_mode="bridge" if network else "none",
        cap_drop=["ALL"],
        cap_add=list(_CAPABILITIES),
        security_opt=["no-new-privileges"],
        pids_limit=limits.pids,
        mem_limit=f"{limits.memory_mb}m",
        memswap_limit=f"{limits.memory_mb}m",
        ulimits=[Ulimit(name="fsize", soft=file_bytes, hard=file_bytes), Ulimit(name="core", soft=0, hard=0)],
        mounts=[Mount(str(path), str(path), type="bind", read_only=True) for path in mounts],
        # What a root agent writes to the first process's output would fill the host's disk.
        log_config=LogConfig(type="none"),
    )
    settings: dict[str, Any] = {
        "name": name,
        "entrypoint": ["/bin/bash", "--norc", "--noprofile", "-c", _FIRST_PROCESS],
        "command": [],
        "user": "0:0",
        "hostname": "sandbox",
        "working_dir": "/",
        "labels": {_RUN_LABEL: label, _OWNER_LABEL: "/".join(_owner())},
        "healthcheck": {"test": ["NONE"]},
        "stop_signal": "SIGKILL",
        # The user's proxies may hold credentials.
        "use_config_proxy": False,
    }
    place = address(config)
    if place not in _boundless:
        try:
            bounded = {**host_config, "StorageOpt": {"size": f"{limits.disk_mb}m"}}
            client.create_container(image.reference, host_config=bounded, **settings)
            return
        except APIError as error:
            if not any(sign in explain(error).lower() for sign in _NO_DISK_LIMIT):
                raise
            _boundless.add(place)
    client.create_container(image.reference, host_config=host_config, **settings)


def _remove(client: docker.APIClient, container: str) -> None:
    with translated("remove a container"), suppress(NotFound):
        # With its anonymous volumes.
        client.remove_container(container, force=True, v=True)


def _leader(state: dict[str, Any]) -> int | None:
    """The container's first process, where this process is root on the daemon's machine and so may enter it."""
    pid = int(state["State"]["Pid"] or 0)
    if not pid or os.geteuid() != 0:
        return None
    try:
        # A daemon elsewhere may speak of an id that means another process here.
        here = state["Id"] in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
        Path(f"/proc/{pid}/ns/pid").stat()
    except OSError:
        return None
    return pid if here else None


def _owner() -> tuple[str, str, str, str]:
    """This process as no other can be: boot, process namespace, id, start."""
    return (*_machine(), str(os.getpid()), _start_ticks(os.getpid()))


def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").stat().st_ino)


def _start_ticks(pid: int | str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[19].decode("ascii")
    except OSError:
        return ""


def _owner_may_live(entry: dict[str, Any]) -> bool:
    owner = str(entry["Labels"].get(_OWNER_LABEL, "")).split("/")
    if len(owner) != 4:
        return True
    if tuple(owner[:2]) == _machine():
        return _start_ticks(owner[2]) == owner[3]
    # Of another machine or another boot: who runs there cannot be seen, but nobody uses a container that does not run.
    return str(entry["State"]) in ("running", "paused", "restarting")
