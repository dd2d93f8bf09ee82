"""Builds a task's image with a Docker daemon.

The rule: an image's tag is the hash of everything that decides its content, so an image that is there is never built
again, and the context holds what `Context` lists, which is never a test or the truth.
"""

import hashlib
import io
import json
import math
import os
import tarfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import docker
import requests
import urllib3
from docker.errors import APIError, ImageNotFound, NotFound

from tmax.config import DockerConfig
from tmax.errors import BuildError, SandboxError, StartError, TaskError
from tmax.sandbox.context import Context
from tmax.sandbox.docker_api import (
    DAEMON_ERRORS,
    connect,
    explain,
    infra_error,
    kind_of,
    kind_of_text,
    socket_of,
    translated,
)
from tmax.sandbox.docker_lower import BaseImage, Lowered, lower
from tmax.sandbox.protocol import Image
from tmax.task import Task

_BUILDS_AT_ONCE = threading.BoundedSemaphore(2)
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()

_DOCKERFILE = ".tmax.Dockerfile"
_LOG_TAIL = 4000
_MEMORY_MB = 4096
"""What one command of a build may use at least."""
_FILE_TIME = 1_735_689_600
"""Time of every file of a context, 2025-01-01: the same bytes give the same image, and zip takes none before 1980."""


def build_docker_image(config: DockerConfig, task: Task) -> Image:
    """Build a task's image, or find it built.

    Raises BuildError where the Dockerfile is to blame, TaskError where it cannot be read, StartError where the daemon
    is to blame.
    """
    try:
        return _build(config, task)
    except StartError:
        raise
    except SandboxError as error:
        raise StartError(error.message, kind=error.kind, hint=error.hint) from error


def _build(config: DockerConfig, task: Task) -> Image:
    client = connect(config)
    try:
        context = Context(task.context)
        owns = task.agent_user == "agent"
        lowered = lower(_read_dockerfile(task), context, lambda name: _find_base(client, config, name), agent_owns=owns)
        tag = f"tmax/{_content_hash(lowered, context)}"
        with _lock_of(tag):
            found = _inspect(client, tag)
            if found is None:
                with _BUILDS_AT_ONCE:
                    _run_build(client, task, tag, _pack(lowered.text, context))
                found = _inspect(client, tag)
        if found is None:
            raise StartError(
                f"the image `{tag}` is gone although its build succeeded", kind="api", hint="build it again"
            )
        return _describe(tag, found)
    except OSError as error:
        raise TaskError(f"cannot read the build context of `{task.path}`: {error}", hint="check the files") from error
    finally:
        client.close()


def _read_dockerfile(task: Task) -> str:
    try:
        return (task.context / "Dockerfile").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"cannot read the Dockerfile of `{task.path}`: {error}", hint="task files are UTF-8 text"
        ) from error


def _find_base(client: docker.APIClient, config: DockerConfig, name: str) -> BaseImage:
    """What a FROM line gets: the image it names, or the stand-in where the daemon does not have that."""
    found = _inspect(client, name)
    if found is None and config.base is not None:
        name = config.base
        found = _inspect(client, name)
        if found is None:
            raise StartError(f"the daemon has no image `{name}`", kind="engine", hint="see `sandbox.base`")
    if found is None:
        return BaseImage(name, name, "root")
    return BaseImage(name, str(found["Id"]), (found.get("Config") or {}).get("User") or "root")


def _content_hash(lowered: Lowered, context: Context) -> str:
    digest = hashlib.sha256(json.dumps([lowered.text, lowered.bases, sorted(context.folders)]).encode())
    for name, file in sorted(context.files.items()):
        body = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
        kind = "link" if file.is_symlink() else f"{file.stat().st_mode & 0o7777:o}"
        digest.update(json.dumps([name, kind, len(body)]).encode())
        digest.update(body)
    return digest.hexdigest()[:32]


def _pack(text: str, context: Context) -> bytes:
    """The build context as a tar archive; owners and times of the host stay out of it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in sorted(context.folders - {"."}):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, _FILE_TIME
            archive.addfile(entry)
        for name, file in sorted(context.files.items()):
            if name != ".dockerignore":
                archive.add(file, name, recursive=False, filter=_anonymous)
        # Already applied; what is left of it takes our Dockerfile out of the reach of `COPY .`.
        own = {_DOCKERFILE: text, ".dockerignore": f"{_DOCKERFILE}\n.dockerignore\n"}
        for name, body in own.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body.encode())
            archive.addfile(entry, io.BytesIO(body.encode()))
    return packed.getvalue()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.mtime = _FILE_TIME
    entry.uname = entry.gname = ""
    return entry


def _run_build(client: docker.APIClient, task: Task, tag: str, context: bytes) -> None:
    """Build and tag. Raises BuildError, or SandboxError where the daemon is to blame."""
    timeout = task.settings.build_timeout
    deadline = time.monotonic() + timeout
    memory = max(_MEMORY_MB, task.settings.memory_mb) * 1024 * 1024
    answers: list[requests.Response] = []
    client.hooks["response"].append(lambda answer, *_, **__: answers.append(answer))
    log = ""
    try:
        steps = client.build(
            fileobj=io.BytesIO(context), custom_context=True, dockerfile=_DOCKERFILE, tag=tag,
            labels={"tmax": task.task_id}, rm=True, forcerm=True, decode=True, timeout=math.ceil(timeout),
            container_limits={"memory": memory, "memswap": memory},
        )  # fmt: skip
        for step in steps:
            log = (log + _text_of(step))[-_LOG_TAIL:]
            if "error" in step:
                raise _failure(str(step["error"]).strip(), log)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            socket_of(answers[-1]).settimeout(left)
    except (TimeoutError, requests.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise BuildError(
            f"the image took longer to build than the {timeout:g} seconds its task allows", log_tail=log,
            hint="raise `environment.build_timeout_sec` in task.toml",
        ) from error  # fmt: skip
    except APIError as error:
        if error.is_client_error() and kind_of(error) == "api":
            raise BuildError(f"the Dockerfile cannot be used: {explain(error)}", hint="mend the Dockerfile") from error
        raise infra_error("build an image", error) from error
    except DAEMON_ERRORS as error:
        raise infra_error("build an image", error) from error
    finally:
        client.hooks["response"].clear()
        # A build whose reader has gone is cancelled.
        for answer in answers:
            answer.close()


def _text_of(step: Mapping[str, Any]) -> str:
    if "stream" in step:
        return str(step["stream"])
    return f"{step['status']}\n" if "status" in step and "progress" not in step else ""


def _failure(message: str, log: str) -> BuildError | SandboxError:
    text = message.lower()
    kind = kind_of_text(text)
    if "failed to create endpoint" in text or "iptables" in text:
        kind = "network"
    elif kind == "network":
        # What cannot be fetched is the Dockerfile's affair.
        kind = None
    if "returned a non-zero code" not in text and kind is not None:
        return SandboxError(
            f"cannot build an image: {message}", kind=kind, hint="mend the daemon's machine and try again"
        )
    hint = "the end of the build's output says why"
    if any(sign in text for sign in ("pull access denied", "manifest", "no such host", "registry", "tls", "lookup")):
        hint = "the image of a FROM line cannot be had: give `sandbox.base`, or load it into the daemon"
    return BuildError(f"the image does not build: {message}", log_tail=log, hint=hint)


def _inspect(client: docker.APIClient, name: str) -> dict[str, Any] | None:
    with translated(f"look for the image `{name}`"):
        try:
            found: dict[str, Any] = client.inspect_image(name)  # type: ignore[no-untyped-call]
            return found
        except (ImageNotFound, NotFound):
            return None


def _describe(tag: str, found: Mapping[str, Any]) -> Image:
    settings = found.get("Config") or {}
    env = dict(pair.partition("=")[::2] for pair in settings.get("Env") or [])
    return Image("docker", tag, settings.get("WorkingDir") or "/", env)


def _lock_of(tag: str) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(tag, threading.Lock())
