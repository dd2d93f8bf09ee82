"""Examines the machine: what works for tmax, and how to mend what does not. It changes nothing."""

import importlib.util
import shutil
import sys

from tmax.config import BubblewrapConfig, DockerConfig, cache_dir
from tmax.errors import TmaxError
from tmax.records import Record
from tmax.sandbox import engine_problem

_MIN_FREE_GB = 2.0


class Check(Record):
    """One thing that was looked at."""

    name: str
    works: bool
    detail: str
    mend: str | None = None


def examine() -> list[Check]:
    """Look at everything, worst news included; never raises a TmaxError."""
    return [_python(), _disk(), _bubblewrap(), _docker(), _interpreter(), _torch(), _gpu()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", works=sys.version_info >= (3, 11), detail=version, mend="use Python 3.11 or later")


def _disk() -> Check:
    place = cache_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    mend = "free some space, or set TMAX_CACHE to another disk"
    return Check(name="cache", works=free >= _MIN_FREE_GB, detail=f"{cache_dir()}, {free:.0f} GB free", mend=mend)


def _bubblewrap() -> Check:
    problem = engine_problem(BubblewrapConfig())
    mend = (
        "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, and AppArmor's restriction off)"
    )
    return Check(name="sandbox bubblewrap", works=problem is None, detail=problem or "starts sandboxes", mend=mend)


def _docker() -> Check:
    problem = engine_problem(DockerConfig())
    mend = "install Docker and start its daemon, or go without: bubblewrap needs none"
    return Check(name="sandbox docker", works=problem is None, detail=problem or "the daemon answers", mend=mend)


def _interpreter() -> Check:
    from tmax.verifier import bundle

    try:
        place = bundle()
    except TmaxError as error:
        return Check(name="verifier", works=False, detail=error.message, mend=error.hint)
    return Check(name="verifier", works=True, detail=f"interpreter in {place}")


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check(name="torch", works=False, detail="not installed", mend="pip install torch")
    import torch

    return Check(name="torch", works=True, detail=f"{torch.__version__}, {torch.get_num_threads()} threads")


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check(name="gpu", works=False, detail="torch is not installed", mend="pip install torch")
    import torch

    if not torch.cuda.is_available():
        return Check(name="gpu", works=False, detail="none; policies run on the CPU", mend="only large models need one")
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return Check(name="gpu", works=True, detail=names)
