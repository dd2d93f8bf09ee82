"""The warm parent: has Python and pytest loaded, and for each request forks a child into a sandbox's namespaces.

The rule: it stays outside of all sandboxes and holds nothing worth stealing; a child enters, gives up what an
ordinary root of the sandbox has not, and only then looks at anything that an agent may have made.
"""

import base64
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tmax.verifier import prepared, runner

_NAMESPACES = {
    "user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000, "net": 0x40000000,
    "ipc": 0x08000000, "uts": 0x04000000, "cgroup": 0x02000000,
}  # fmt: skip

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_PRELOADED = (
    "pytest ast asyncio base64 bz2 calendar collections concurrent.futures configparser contextlib copy csv ctypes "
    "dataclasses datetime decimal difflib email.message enum filecmp fnmatch fractions functools getpass glob grp gzip "
    "hashlib heapq hmac html.parser http.client http.server importlib.util inspect io ipaddress itertools json logging "
    "lzma math mimetypes multiprocessing operator os pathlib pickle platform pprint pwd queue random re resource "
    "secrets select shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string struct "
    "subprocess tarfile tempfile textwrap threading time tomllib traceback types typing unicodedata unittest "
    "unittest.mock urllib.parse urllib.request uuid warnings xml.etree.ElementTree xml.dom.minidom zipfile zlib "
    "zoneinfo"
)
"""What hidden tests import as a rule; anything else is loaded when a test asks for it."""


def preload() -> None:
    """Import what a run needs, so that its children need not."""
    for name in _PRELOADED.split():
        # A Python built without some library lacks a module; a test that needs it will say so.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> None:
    """Serve requests from the socket whose descriptor is the first argument, until its other end is closed; the second
    one is that of our own program and is closed.

    A request is JSON (`leader`, `home`, and `test`, the digest of the test file) with four descriptors: control
    socket, report, output, specification.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.close(int(sys.argv[2]))
    preload()
    # Has `inspect` look at every module once; it would in each child that shows a failure.
    inspect.getmodule(main.__code__)
    _control_group_mounts()
    prepared.use()
    runner.run(lambda config: _serve(requests, config))


def _serve(requests: socket.socket, config: Any) -> tuple[dict[str, Any], int]:
    """Returns in the children only: what to run and where to report."""
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 65_536, 4)
        if not message:
            os._exit(0)
        if len(descriptors) == 4:
            request = json.loads(message)
            _prepare(request["test"], descriptors[3], config)
            if os.fork() == 0:
                requests.close()
                gc.enable()
                return _supervise(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _prepare(digest: str, spec: int, config: Any) -> None:
    """Prepare a test file that has not been seen; `digest` says whether it has, so that few requests are read here."""
    if digest in _seen:
        return
    _seen.add(digest)
    request = _read(spec)
    sources = {name: content for name, _, content in request["files"]}
    place = f"{request['home']}/tests/{request['test']}"
    prepared.prepare(place, base64.b64decode(sources[request["test"]]), config)
    gc.freeze()


_seen: set[str] = set()


def _read(spec: int) -> dict[str, Any]:
    os.lseek(spec, 0, os.SEEK_SET)
    with open(spec, "rb", closefd=False) as file:
        return dict(json.load(file))


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _supervise(
    request: dict[str, Any], control: int, report: int, output: int, spec: int
) -> tuple[dict[str, Any], int]:
    """Enter the sandbox, fork the child that runs the tests, and outlive it; kill it when the host lets go.

    Returns in that child only.
    """
    answers = socket.socket(fileno=control)
    try:
        limits = _enter(request["leader"], Path(request["home"]))
    except FileNotFoundError:
        answers.send(b'{"unmounted": true}')
        os._exit(1)
    except OSError as error:
        answers.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    answers.send(b'{"started": true}')
    child = os.fork()
    if child == 0:
        answers.close()
        return _become_root(limits, report, output, spec)
    for descriptor in (report, output, spec):
        os.close(descriptor)
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, answers.fileno()], [], [])
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        answers.send(json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode())
    os._exit(0)


def _enter(leader: int, home: Path) -> dict[int, tuple[int, int]]:
    """Join the namespaces and control groups of `leader`; what it may use is returned, to be taken on last."""
    ours, theirs = Path("/proc/self/ns"), Path(f"/proc/{leader}/ns")
    flags = sum(flag for name, flag in _NAMESPACES.items() if (ours / name).readlink() != (theirs / name).readlink())
    root = os.open(f"/proc/{leader}/root", os.O_PATH | os.O_DIRECTORY)
    limits = {kind: resource.prlimit(leader, kind) for kind in _limit_kinds()}
    there = home.stat()
    process = os.pidfd_open(leader)
    for procs in _control_groups(leader):
        with contextlib.suppress(OSError), open(procs, "w", encoding="ascii") as group:
            group.write("0")
    libc = ctypes.CDLL(None, use_errno=True)
    # All at once, so that every right is judged by what this process was before, not half-way.
    if flags and libc.setns(process, flags):
        raise OSError(ctypes.get_errno(), "cannot enter the sandbox")
    os.fchdir(root)
    os.chroot(".")
    here = home.stat()
    if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
        raise FileNotFoundError(home)
    for descriptor in (root, process):
        os.close(descriptor)
    # Where groups may not be set, none but our own is mapped into the sandbox.
    with contextlib.suppress(PermissionError):
        os.setgroups([0])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    return limits


def _become_root(limits: dict[int, tuple[int, int]], report: int, output: int, spec: int) -> tuple[dict[str, Any], int]:
    """In the child: nothing of the outside stays open, limits hold, death follows the supervisor's."""
    os.setsid()
    request = _read(spec)
    for target in (1, 2):
        os.dup2(output, target)
    for descriptor in (spec, output):
        os.close(descriptor)
    os.set_inheritable(report, False)
    for kind, (soft, hard) in limits.items():
        _limit(kind, soft, hard)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return request, report


def _limit(kind: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        # More than we may have: ours stays the ceiling.
        _, ceiling = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (ceiling if soft == resource.RLIM_INFINITY else min(soft, ceiling), ceiling))


def _limit_kinds() -> list[int]:
    return sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


@functools.cache
def _control_group_mounts() -> list[tuple[str, set[str], str, str]]:
    """Kind, controllers, root and mount point of each hierarchy; read once, before the first child is forked."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = left.split(" ")[3:5]
            mounts.append((kind, set(options.split(" ")[-1].split(",")), root.rstrip("/"), point))
    return mounts


def _control_groups(leader: int) -> Iterator[str]:
    """The files that take a process into the control groups of `leader`, for those that are not ours already."""
    with open(f"/proc/{leader}/cgroup", encoding="utf-8") as theirs, open("/proc/self/cgroup", encoding="utf-8") as own:
        wanted = sorted(set(theirs) - set(own))
    for line in wanted:
        _, names, path = line.rstrip("\n").split(":", 2)
        kind_wanted, controllers_wanted = ("cgroup", set(names.split(","))) if names else ("cgroup2", set())
        for kind, controllers, root, point in _control_group_mounts():
            if kind == kind_wanted and controllers_wanted <= controllers and path.startswith(f"{root}/"):
                yield f"{point}{path.removeprefix(root)}/cgroup.procs"
                break
