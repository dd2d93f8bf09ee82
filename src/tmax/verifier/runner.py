"""Runs one hidden test file with pytest, inside the sandbox, and says what each test did; started by `verify`.

The rule: it imports the standard library, pytest and its own package only, all from the read-only bundle. What an
agent left behind may be tested by it but is never loaded, obeyed or believed by it.
"""

import base64
import contextlib
import ctypes
import importlib
import json
import linecache
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tmax.verifier import frame

MESSAGE_LIMIT = 2_000
"""Characters kept of a test's message: its end, for that is where pytest says what differed."""

_TRUSTED_OWNERS = (0, 65534)
"""Root, and who shows as nobody: root of the host, where the sandbox has no number for it."""

_SCRATCH = "/run/tmax-scratch"
"""Where `tmp_path` lies in a sandbox; the same each time, for pytest wants to know it before it knows the tests."""

Wait = Callable[[Any], tuple[Mapping[str, Any], int]]

_WORSE = ("passed", "skipped", "failed", "error")

_KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10, 18)
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot: what a container's root
needs, without what would let a tested program read this process or mount over its files."""

_PR_SET_DUMPABLE, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 4, 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4


def main() -> None:
    """The cold start: read and delete the specification named on the command line, run it, report to stdout."""
    if sys.argv[1:] == ["--self-test"]:
        _self_test()
        return
    # Sub-processes get the descriptors 0 to 2 only, so the report's way out is nobody else's.
    report = os.dup(1)
    place = Path(sys.argv[1])
    spec = json.loads(place.read_bytes())
    place.unlink()
    run(lambda _: (spec, report))


def run(wait: Wait) -> NoReturn:
    """Make a pytest session ready, `wait` for what it is to run, run it, report, and end the process.

    `wait` is given pytest's configuration and returns a specification and the descriptor that the report is written
    to. Keys: `nonce` (hex), `home` (a directory to make), `files` (path, mode, base64 each), `test` (a path among
    them), `order` (`given` or `reversed`), `env`, `workdir`.
    """
    import pytest

    _load_libraries()
    anchor = _anchor_imports()
    # A crash must not take the last lines with it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir("/")
    plugin = Plugin(wait, anchor)
    begun = time.monotonic()
    exit_code = int(pytest.main(_arguments(), plugins=[plugin]))
    if plugin.spec is None:
        os._exit(70)
    seconds = time.monotonic() - (plugin.begun or begun)
    for place in (plugin.spec["home"], _SCRATCH):
        shutil.rmtree(place, ignore_errors=True)
    sys.stdout.flush()
    for line in _frame(plugin.results(), exit_code, seconds, bytes.fromhex(plugin.spec["nonce"])):
        _write(plugin.report, line)
    # No clean-up of the interpreter: threads that tests left behind must not hold it up.
    os._exit(0)


class Plugin:
    """Steers one pytest session and collects its reports; lives as long as it."""

    def __init__(self, wait: Wait, anchor: int) -> None:
        self._wait = wait
        self._anchor = anchor
        self.spec: Mapping[str, Any] | None = None
        self.report = -1
        self.begun = 0.0
        self._tests = Path()
        self._results: dict[str, dict[str, Any]] = {}

    def pytest_collection(self, session: Any) -> bool:
        """Everything up to here is the same for every run; now learn what to run, and collect that only."""
        spec, self.report = self._wait(session.config)
        self.begun = time.monotonic()
        _keep_to_itself()
        _reopen(self._anchor, sys.prefix, os.O_PATH | os.O_DIRECTORY)
        self.spec = spec
        self._tests = Path(spec["home"], "tests")
        _settle(spec, self._tests)
        _take_root(session.config, self._tests)
        session.perform_collect([str(self._tests / spec["test"])])
        return True

    def results(self) -> list[dict[str, Any]]:
        """One entry for each test and each broken collection, in the order they ran."""
        broken = {"status": "error", "message": "the test did not come to an end"}
        return [entry if entry["status"] else entry | broken for entry in self._results.values()]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Turn the order round if asked to; take the tests' source away from whatever they start."""
        if self.spec and self.spec["order"] == "reversed":
            items.reverse()
        for path in {self._tests / "conftest.py", *(item.path for item in items)}:
            with contextlib.suppress(OSError):
                _hide(path)

    def pytest_collectreport(self, report: Any) -> None:
        """A module or class that cannot be collected is an error of its own."""
        if report.outcome == "failed":
            self._add(report.nodeid, "error", report)
        elif report.outcome == "skipped":
            self._add(report.nodeid, "skipped", report)

    def pytest_internalerror(self, excrepr: Any) -> None:
        """pytest itself, or the task's conftest.py, broke; it says so with its exit code too."""
        message = _end(str(excrepr), self._tests)
        self._results["pytest"] = {"name": "pytest", "status": "error", "seconds": 0.0, "message": message}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Leave a trace of the running test in the output, for when it takes the process with it."""
        print(f"\nrunning {_name(nodeid)}", flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Set-up, call and tear-down each report once; the worst of them is the test's status."""
        status = report.outcome
        if status == "failed" and report.when != "call":
            status = "error"
        elif status == "passed" and report.when != "call":
            status = None
        self._add(report.nodeid, status, report)

    def _add(self, nodeid: str, status: str | None, report: Any) -> None:
        name = _name(nodeid)
        entry = self._results.setdefault(name, {"name": name, "status": None, "seconds": 0.0, "message": ""})
        entry["seconds"] += getattr(report, "duration", 0.0)
        if status and (entry["status"] is None or _WORSE.index(status) > _WORSE.index(entry["status"])):
            entry["status"] = status
            entry["message"] = "" if status == "passed" else _message(report, self._tests)


def _name(nodeid: str) -> str:
    """A test's name without the file's: there is only one file."""
    return _text(nodeid.split("::", 1)[-1])


def _message(report: Any, tests: Path) -> str:
    skip = isinstance(report.longrepr, tuple)
    return _end(report.longrepr[2] if skip else getattr(report, "longreprtext", ""), tests)


def _end(text: str, tests: Path) -> str:
    """The last lines of a text, without the place of the tests, which is another one each time."""
    text = _text(text.strip()).replace(f"{tests}/", "")
    if len(text) <= MESSAGE_LIMIT:
        return text
    end = text[-(MESSAGE_LIMIT - 4) :]
    broken, _, whole = end.partition("\n")
    return "...\n" + (whole if len(broken) < MESSAGE_LIMIT // 4 else end)


def _text(text: str) -> str:
    """Without the lone surrogates that undecodable file names turn into."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _frame(results: list[dict[str, Any]], exit_code: int, seconds: float, nonce: bytes) -> list[bytes]:
    """The report's lines; where it is too large, with shorter messages and at last with none."""
    for limit in (MESSAGE_LIMIT, 400, 60, 0):
        kept = [entry | {"message": entry["message"][-limit:] if limit else ""} for entry in results]
        payload = json.dumps({"tests": kept, "exit_code": exit_code, "seconds": seconds}).encode()
        with contextlib.suppress(ValueError):
            return frame.encode(payload, nonce)
    raise SystemExit(f"the report on {len(results)} tests does not fit into a frame")


def _arguments() -> list[str]:
    """pytest's command line, the same for every run; it reads no other configuration."""
    import _pytest.runner

    # Else the running test's name stands in the environment of the programs that it starts.
    if hasattr(_pytest.runner, "_update_current_test_var"):
        _pytest.runner._update_current_test_var = lambda item, when: None
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    without = (
        "cacheprovider debugging doctest faulthandler junitxml pastebin setuponly setupplan stepwise "
        "threadexception unraisableexception"
    )
    return [
        "-c", f"{sys.prefix}/pytest.ini", "--rootdir", sys.prefix, "--noconftest", "--import-mode=importlib",
        "--basetemp", _SCRATCH, "--capture=no", "--color=no", "--tb=short", "-qq", "--no-header", "--no-summary",
        *(word for name in without.split() for word in ("-p", f"no:{name}")),
    ]  # fmt: skip


def _take_root(config: Any, tests: Path) -> None:
    """Have pytest look at nothing above the fresh tests, and let the task's own conftest.py speak.

    A command line could say so too, but only of a directory that is there when the session is made ready.
    """
    config._rootpath = tests
    config.pluginmanager._confcutdir = tests
    if config.rootpath != tests or config.pluginmanager._is_in_confcutdir(tests.parent):
        raise RuntimeError("this pytest keeps its root elsewhere")
    if (tests / "conftest.py").exists():
        # Found at the end of `sys.path`, as modules beside the tests are.
        config.pluginmanager.register(importlib.import_module("conftest"), "conftest of the task")


def _settle(spec: Mapping[str, Any], tests: Path) -> None:
    """Lay out the tests, be where the image works with its environment, look for modules in the bundle only."""
    _reopen(0, os.devnull, os.O_RDONLY | os.O_NONBLOCK)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(spec["env"])
    time.tzset()
    tempfile.tempdir = None
    _lay_out(spec["files"], tests)
    try:
        os.chdir(spec["workdir"])
    except OSError:
        os.chdir("/")
    sys.path.append(str(tests))
    sys.argv[:] = ["pytest"]
    sys.executable = str(_image_python() or Path(sys.prefix, "bin", "python"))


def _load_libraries() -> None:
    """Load every library of the bundle now, and have names looked up by what is built into the C library: later both
    would be searched for by path, and a tested program that runs as root can move the directories of a path."""
    for library in sorted(Path(sys.prefix, "so").glob("*.so.*")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(library))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "__nss_configure_lookup"):
        configure = getattr(libc, "__nss_configure_lookup")
        for database in ("passwd", "group", "shadow", "gshadow", "services", "protocols", "networks", "initgroups"):
            configure(database.encode(), b"files")
        configure(b"hosts", b"files dns")


def _anchor_imports() -> int:
    """Import through a descriptor of the bundle's directory, wherever the path to it may lead later; returns it.

    In a sandbox that was entered it must be pointed at the bundle as it is mounted there.
    """
    descriptor = os.open(sys.prefix, os.O_PATH | os.O_DIRECTORY)

    def anchored(places: list[str]) -> list[str]:
        inside = [place.removeprefix(sys.prefix) for place in places if place.startswith(sys.prefix)]
        return [f"/proc/self/fd/{descriptor}{place}" for place in inside]

    sys.path[:] = anchored(sys.path)
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", None)
        if isinstance(places, list):
            places[:] = anchored(places)
    sys.path_importer_cache.clear()
    return descriptor


def _reopen(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, descriptor, inheritable=descriptor == 0)
    os.close(opened)


def _lay_out(files: list[tuple[str, int, str]], tests: Path) -> None:
    """Write the task's tests where nobody but root can look."""
    for left_over in (Path(_SCRATCH), tests):
        if not left_over.is_dir() or left_over.is_symlink():
            left_over.unlink(missing_ok=True)
        shutil.rmtree(left_over, ignore_errors=True)
    tests.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tests.parent.chmod(0o700)
    tests.mkdir(mode=0o700)
    for name, mode, content in files:
        path = tests / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode, exist_ok=False)
        path.write_bytes(base64.b64decode(content))


def _image_python() -> Path | None:
    """The first `python3` on the image's PATH that only root can have put there."""
    for folder in map(Path, os.environ.get("PATH", "").split(":")):
        path = folder / "python3"
        try:
            real = path.stat()
            places = (folder.stat(), path.resolve().parent.stat(), real)
        except OSError:
            continue
        runs = folder.is_absolute() and stat.S_ISREG(real.st_mode) and os.access(path, os.X_OK)
        if runs and not any(place.st_uid not in _TRUSTED_OWNERS or place.st_mode & 0o022 for place in places):
            return path
    return None


def _hide(path: Path) -> None:
    """Delete a source file but keep its lines, so that pytest can still show them."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    # Without a time stamp `linecache` does not look at the file again.
    linecache.cache[str(path)] = (sum(map(len, lines)), None, lines, str(path))
    path.unlink()


def _keep_to_itself() -> None:
    """Let no tested program, though it runs as root, look into this process or write to its descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    unwanted = [number for number in range(64) if number not in _KEPT_CAPABILITIES]
    present = [number for number in unwanted if libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1]
    refused = [number for number in present if libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)]
    if refused:
        # Without this flag a program started by root has whatever the bounding set still holds.
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capget(header, held), "read the capabilities")
    kept = sum(1 << number for number in _KEPT_CAPABILITIES)
    # Effective and permitted, numbers below 32; nothing is inheritable, and nothing of the higher numbers is kept.
    left = (ctypes.c_uint32 * 6)(held[0] & kept, held[1] & kept, 0, 0, 0, 0)
    _check(libc.capset(header, left), "drop capabilities")
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")


def _check(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), f"the verifier cannot {what}")


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _self_test() -> None:
    """Print every file that a run would load, the shared libraries too."""
    import tmax.verifier.server

    tmax.verifier.server.preload()
    print(*(module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)), sep="\n")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    print(*{line.split(maxsplit=5)[5] for line in maps if ".so" in line}, sep="\n")
