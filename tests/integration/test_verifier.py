"""The verifier on real sandboxes: what it reports, what it needs, what it leaves, warm and cold."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tmax.config import EngineConfig
from tmax.errors import VerifierError, VerifierTimeout
from tmax.parallel import map_unordered
from tmax.records import TestReport
from tmax.sandbox import Image, Sandbox, build_image, open_sandbox
from tmax.verifier import binary, bundle, verify, warm


class NotEntered:
    """A sandbox that cannot be entered, so that its tests run cold."""

    leader = None

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


@pytest.fixture(scope="module")
def image(engine: EngineConfig, write_tiny_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """An image with a working directory and an environment."""
    dockerfile = "FROM tmax-base\nWORKDIR /srv/app\nENV GREETING=hello PYTHONPATH=/srv/app LD_BIND_NOW=1 TZ=UTC-5\n"
    return build_image(engine, write_tiny_task(tmp_path_factory.mktemp("task"), dockerfile))


@pytest.fixture
def inner(engine: EngineConfig, image: Image) -> Iterator[Sandbox]:
    """A fresh sandbox."""
    with open_sandbox(engine, image, label="verifier", mounts=[bundle()]) as sandbox:
        yield sandbox


@pytest.fixture(params=["warm", "cold"])
def sandbox(request: pytest.FixtureRequest, inner: Sandbox) -> Sandbox:
    """A fresh sandbox that is entered, and one that is not."""
    if request.param == "cold":
        return cast(Sandbox, NotEntered(inner))
    if inner.leader is None:
        pytest.skip("this engine's sandboxes cannot be entered from here")
    return inner


def hidden(tmp_path: Path, source: str, **support: str) -> Path:
    """A task's tests: the file that runs, and what lies beside it."""
    folder = tmp_path / "tests"
    folder.mkdir(exist_ok=True)
    for name, content in support.items():
        (folder / name.replace("__", ".")).write_text(content)
    (folder / "test_final_state.py").write_text(source)
    return folder / "test_final_state.py"


def statuses(report: TestReport) -> dict[str, str]:
    return {test.name: test.status for test in report.tests}


EVERY_KIND = """
import pytest, subprocess

def test_passes():
    print("printed")

def test_fails():
    value = {"x": [1, 2]}
    assert value == {"x": [1, 3]}, "not what was asked"

@pytest.mark.skip(reason="later")
def test_is_skipped(): pass

@pytest.mark.xfail(reason="known", strict=False)
def test_fails_as_expected(): assert False

@pytest.fixture
def broken(): raise RuntimeError("no set-up")

def test_has_no_setup(broken): pass

@pytest.fixture
def leaves_badly():
    yield
    raise RuntimeError("no tear-down")

def test_has_no_teardown(leaves_badly): pass

class TestGroup:
    @pytest.mark.parametrize("text", ["a", "ü"])
    def test_member(self, text, tmp_path):
        (tmp_path / text).write_text("snö ☃")
        run = subprocess.run(["cat", str(tmp_path / text)], capture_output=True, text=True)
        assert run.stdout == "snö ☃"
        assert text == "a", run.stdout

def test_exits():
    raise SystemExit(0)
"""


def test_every_kind_of_end_is_reported(sandbox: Sandbox, tmp_path: Path) -> None:
    report = verify(sandbox, hidden(tmp_path, EVERY_KIND), timeout=60.0)
    assert statuses(report) == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_fails_as_expected": "skipped",
        "test_has_no_setup": "error",
        "test_has_no_teardown": "error",
        "TestGroup::test_member[a]": "passed",
        "TestGroup::test_member[\\xfc]": "failed",
        "test_exits": "failed",
    }
    assert report.exit_code == 1
    assert not report.judged
    failed = next(test for test in report.tests if test.name == "test_fails")
    assert failed.message.startswith('test_final_state.py:9: in test_fails\n    assert value == {"x": [1, 3]}')
    assert "not what was asked" in failed.message
    assert "{'x': [1, 2]} != {'x': [1, 3]}" in failed.message
    unicode = next(test for test in report.tests if test.name.endswith("xfc]"))
    assert "AssertionError: snö ☃\nE   assert 'ü' == 'a'" in unicode.message
    assert 0 < report.seconds < 60


def test_warm_and_cold_say_the_same(inner: Sandbox, tmp_path: Path) -> None:
    if inner.leader is None:
        pytest.skip("this engine's sandboxes cannot be entered from here")
    test_file = hidden(tmp_path, EVERY_KIND)

    def said(report: TestReport) -> list[tuple[str, str, str]]:
        addresses = re.compile(r"0x[0-9a-f]+")
        return [(test.name, test.status, addresses.sub("0x", test.message)) for test in report.tests]

    in_warm = verify(inner, test_file, timeout=60.0)
    in_cold = verify(cast(Sandbox, NotEntered(inner)), test_file, timeout=60.0)
    assert said(in_warm) == said(in_cold)
    assert in_warm.exit_code == in_cold.exit_code


PROBE = """
import ctypes, json, os, pathlib, resource, stat, sys, time

def test_probe():
    def status(*names):
        lines = open("/proc/thread-self/status").read().splitlines()
        return {line.split(":")[0]: line.split(":")[1].split() for line in lines if line.split(":")[0] in names}
    mounts = [line.split()[0] for line in open("/proc/self/mountinfo")]
    def mount(n):
        lines = open("/proc/self/fdinfo/" + n).read().splitlines() if os.path.exists("/proc/self/fd/" + n) else []
        return [line.split()[1] for line in lines if line.startswith("mnt_id")][0] if lines else mounts[0]
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink("/proc/self/fd/" + name)
        except FileNotFoundError:
            pass
    json.dump({
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "status": status("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Umask", "SigIgn", "SigBlk"),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "environment": dict(os.environ),
        "place": os.getcwd(),
        "namespaces": [os.readlink("/proc/self/ns/" + n) for n in "cgroup ipc mnt net pid user uts".split()],
        "groups": open("/proc/self/cgroup").read().splitlines(),
        "root": os.listdir("/"),
        "executable": sys.executable,
        "arguments": sys.argv,
        "path": [p for p in sys.path],
        "zone": time.timezone,
        "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
        "stdin": os.read(0, 10).decode(),
        "directories": [t for n, t in descriptors.items()
                        if os.path.exists("/proc/self/fd/" + n) and stat.S_ISDIR(os.fstat(int(n)).st_mode)],
        "outside": [t for n, t in descriptors.items() if t.startswith("/") and mount(n) not in mounts],
        "own_tests": sorted(os.listdir(pathlib.Path(__file__).parent)),
        "modes": [oct(stat.S_IMODE(os.stat(p).st_mode)) for p in
                  (pathlib.Path(__file__).parent, pathlib.Path(__file__).parent.parent)],
    }, open("/root/probe.json", "w"))
"""


def probed(sandbox: Sandbox, tmp_path: Path) -> dict[str, Any]:
    report = verify(sandbox, hidden(tmp_path, PROBE), timeout=60.0)
    assert statuses(report) == {"test_probe": "passed"}, report.tests[0].message
    return cast(dict[str, Any], json.loads(sandbox.get("/root/probe.json")))


def test_tests_run_as_an_ordinary_root_of_the_image(sandbox: Sandbox, tmp_path: Path) -> None:
    seen = probed(sandbox, tmp_path)
    assert seen["ids"][:2] == [[0, 0, 0], [0, 0, 0]]
    # chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot: bits 0 1 3 4 5 6 7 10 18.
    assert int(seen["status"]["CapEff"][0], 16) & ~0x404FB == 0
    assert int(seen["status"]["CapBnd"][0], 16) & ~0x404FB == 0
    assert seen["status"]["CapInh"] == seen["status"]["CapAmb"] == ["0000000000000000"]
    assert seen["status"]["Umask"] == ["0022"]
    assert seen["dumpable"] == 0
    assert seen["stdin"] == ""
    assert seen["place"] == "/srv/app"
    assert seen["zone"] == -5 * 3600
    environment = seen["environment"]
    assert environment["GREETING"] == "hello"
    assert environment["HOME"] == "/root"
    assert [name for name in environment if name.startswith(("PYTEST", "PYTHON", "LD_", "TMAX"))] == []
    assert seen["executable"].endswith("/python3")
    assert not seen["executable"].startswith(str(bundle()))
    assert [place for place in seen["path"] if not place.startswith(("/proc/self/fd/", "/run/tmax-"))] == []
    assert seen["modes"] == ["0o700", "0o700"]


def test_nothing_of_the_host_is_open_in_the_tests(sandbox: Sandbox, tmp_path: Path) -> None:
    seen = probed(sandbox, tmp_path)
    # The bundle, as it is mounted in the sandbox.
    assert seen["directories"] == [str(bundle())]
    assert set(seen["outside"]) <= {"/dev/null"}


def test_warm_tests_stand_where_cold_ones_do(inner: Sandbox, tmp_path: Path) -> None:
    if inner.leader is None:
        pytest.skip("this engine's sandboxes cannot be entered from here")
    in_warm, in_cold = probed(inner, tmp_path), probed(cast(Sandbox, NotEntered(inner)), tmp_path)
    for name in ("ids", "limits", "environment", "place", "namespaces", "groups", "root", "executable", "arguments",
                 "zone", "dumpable", "stdin", "directories", "own_tests"):  # fmt: skip
        assert in_warm[name] == in_cold[name], name
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Umask", "SigBlk"):
        assert in_warm["status"][name] == in_cold["status"][name], name


def test_nothing_stays_in_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    source = "import subprocess, tempfile\ndef test_a(tmp_path):\n    subprocess.Popen(['sleep', '1000'])\n"
    before = sandbox.exec(["ls", "-A", "/run", "/tmp", "/"], user="root", timeout=10.0).output
    verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    assert sandbox.exec(["ls", "-A", "/run", "/tmp", "/"], user="root", timeout=10.0).output == before
    assert "sleep" not in sandbox.exec(["bash", "-c", "cat /proc/*/comm"], user="root", timeout=10.0).output


def test_order_can_be_reversed(sandbox: Sandbox, tmp_path: Path) -> None:
    source = "ran = []\n" + "".join(
        f"def test_{name}():\n    ran.append('{name}')\n    assert ran[0] == 'a', ran\n" for name in "abc"
    )
    given = verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    assert statuses(given) == {"test_a": "passed", "test_b": "passed", "test_c": "passed"}
    turned = verify(sandbox, hidden(tmp_path, source), timeout=60.0, order="reversed")
    assert [(test.name, test.status) for test in turned.tests] == [
        ("test_c", "failed"), ("test_b", "failed"), ("test_a", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "names", "exit_code"),
    [
        ("import no_such_module\ndef test_a(): pass\n", ["test_final_state.py"], 2),
        ("def test_a(:\n", ["test_final_state.py"], 2),
        ("raise SystemExit(0)\n", ["pytest"], 3),
        ("def helper(): pass\n", [], 5),
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('enough')\n", ["test_a", "test_b"], 2),
    ],
    ids=["missing module", "syntax", "exit at import", "no test", "early end"],
)
def test_what_is_no_verdict_is_returned_as_such(
    source: str, names: list[str], exit_code: int, sandbox: Sandbox, tmp_path: Path
) -> None:
    report = verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    assert [test.name for test in report.tests] == names
    assert report.exit_code == exit_code
    assert not report.judged
    with pytest.raises(VerifierError):
        binary(report)


@pytest.mark.parametrize(
    "last_words",
    ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()", "ctypes.string_at(0)", "os.execv('/bin/true', ['true'])"],
)
def test_a_crash_is_an_error_with_the_last_output(last_words: str, sandbox: Sandbox, tmp_path: Path) -> None:
    source = f"import ctypes, os\ndef test_good(): pass\ndef test_bad():\n    print('last words')\n    {last_words}\n"
    with pytest.raises(VerifierError, match=r"(?s)running test_bad.*last words") as caught:
        verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    assert not isinstance(caught.value, VerifierTimeout)
    # The sandbox can be used again, and is clean.
    assert sandbox.exec(["ls", "-A", "/run"], user="root", timeout=10.0).output.split() in (
        [],
        ["lock"],
        ["lock", "mount"],
    )
    assert verify(sandbox, hidden(tmp_path, "def test_a(): pass\n"), timeout=60.0).all_passed


def test_a_time_out_ends_the_tests_and_all_they_started(sandbox: Sandbox, tmp_path: Path) -> None:
    source = "import subprocess\ndef test_a():\n    subprocess.run(['sleep', '1000'])\n"
    begun = time.monotonic()
    with pytest.raises(VerifierTimeout, match="longer than 2 s"):
        verify(sandbox, hidden(tmp_path, source), timeout=2.0)
    assert time.monotonic() - begun < 12
    assert "sleep" not in sandbox.exec(["bash", "-c", "cat /proc/*/comm"], user="root", timeout=10.0).output


def test_two_hundred_failing_tests_are_reported(sandbox: Sandbox, tmp_path: Path) -> None:
    source = (
        "import os, pytest\n@pytest.mark.parametrize('n', range(200))\n"
        "def test_a(n):\n    print('x' * 10_000)\n    assert n < 100, os.urandom(3000).hex()\n"
    )
    report = verify(sandbox, hidden(tmp_path, source), timeout=90.0)
    assert [test.name for test in report.tests] == [f"test_a[{number}]" for number in range(200)]
    assert [test.status for test in report.tests] == ["passed"] * 100 + ["failed"] * 100
    # 100 messages of 2,000 random characters fit into a frame: no one is cut.
    assert {len(test.message) for test in report.tests[100:]} == {2000}


def test_messages_are_cut_before_a_report_is_lost(sandbox: Sandbox, tmp_path: Path) -> None:
    source = (
        "import os, pytest\n@pytest.mark.parametrize('n', range(600))\n"
        "def test_a(n):\n    assert False, os.urandom(3000).hex()\n"
    )
    report = verify(sandbox, hidden(tmp_path, source), timeout=120.0)
    assert len(report.tests) == 600
    assert {len(test.message) for test in report.tests} == {400}


def test_the_tasks_own_support_is_there(sandbox: Sandbox, tmp_path: Path) -> None:
    source = (
        "import json, subprocess\nfrom pathlib import Path\nfrom helper import WANTED\n"
        "def test_a(answer):\n    assert answer == WANTED\n"
        "def test_b():\n    assert json.loads((Path(__file__).parent / 'expected.json').read_text()) == [1]\n"
        "def test_c():\n    run = subprocess.run([Path(__file__).parent / 'run.sh'], capture_output=True, text=True)\n"
        "    assert run.stdout == 'ran'\n"
    )
    test_file = hidden(
        tmp_path, source, helper__py="WANTED = 42\n", expected__json="[1]", run__sh="#!/bin/sh\nprintf ran\n",
        conftest__py="import pytest\n@pytest.fixture\ndef answer(): return 42\n", test_initial_state__py="x = 1 / 0\n",
    )  # fmt: skip
    (tmp_path / "tests" / "run.sh").chmod(0o755)
    report = verify(sandbox, test_file, timeout=60.0)
    assert statuses(report) == {"test_a": "passed", "test_b": "passed", "test_c": "passed"}, report.tests


def test_tests_see_what_the_agent_made_whatever_its_mode(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.shell(user="agent").run("umask 777; mkdir ~/closed; cd; umask 0; echo x > ~/f; chmod 0 ~/f", timeout=20.0)
    source = (
        "import os\ndef test_a():\n    assert open('/home/agent/f').read() == 'x\\n'\n"
        "    assert os.listdir('/home/agent/closed') == []\n"
    )
    report = verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    assert statuses(report) == {"test_a": "passed"}, report.tests[0].message


def test_limits_of_the_sandbox_hold_for_tests(sandbox: Sandbox, tmp_path: Path) -> None:
    source = (
        "import os, subprocess\ndef test_memory():\n    held = [bytearray(os.urandom(1 << 20)) for _ in range(600)]\n"
    )
    try:
        report = verify(sandbox, hidden(tmp_path, source), timeout=60.0)
    except VerifierTimeout:
        raise
    except VerifierError:
        return
    assert statuses(report) == {"test_memory": "failed"}
    assert "MemoryError" in report.tests[0].message


def test_many_threads_verify_at_once(engine: EngineConfig, image: Image, tmp_path: Path) -> None:
    test_file = hidden(
        tmp_path, "import os\ndef test_a():\n    assert open('/root/mine').read() == os.environ['GREETING']\n"
    )

    def trial(number: int) -> bool:
        with open_sandbox(engine, image, label="verifier", mounts=[bundle()]) as sandbox:
            good = number % 2 == 0
            text = "hello" if good else "bye"
            sandbox.exec(["bash", "-c", f"printf {text} > /root/mine"], user="root", timeout=20.0)
            return all(verify(sandbox, test_file, timeout=60.0).all_passed == good for _ in range(3))

    assert all(done for _, done in map_unordered(trial, range(8), workers=8))


def server() -> Any:
    return warm._Server.of(bundle())


def test_a_new_warm_parent_takes_over_from_a_dead_one(inner: Sandbox, tmp_path: Path) -> None:
    if inner.leader is None:
        pytest.skip("this engine's sandboxes cannot be entered from here")
    test_file = hidden(tmp_path, "def test_a(): pass\n")
    first = server()
    for _ in range(2):
        os.kill(server()._process.pid, signal.SIGKILL)
        assert verify(inner, test_file, timeout=60.0).all_passed
    assert server() is not first
    # One that is stopped, then killed while a request waits, is replaced too.
    stopped = server()
    os.kill(stopped._process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.5, lambda: os.kill(stopped._process.pid, signal.SIGKILL))
    killer.start()
    assert verify(inner, test_file, timeout=60.0).all_passed
    assert server() is not stopped


def test_tests_end_when_their_host_ends(inner: Sandbox, tmp_path: Path) -> None:
    if inner.leader is None:
        pytest.skip("this engine's sandboxes cannot be entered from here")
    spec = json.dumps({
        "nonce": "00", "home": "/run/tmax-x", "files": [["test_a.py", 0o600, ""]], "test": "test_a.py",
        "order": "given", "env": {"PATH": "/usr/bin:/bin"}, "workdir": "/",
    })  # fmt: skip
    import base64

    source = base64.b64encode(b"import subprocess\ndef test_a():\n    subprocess.run(['sleep', '987'])\n").decode()
    spec = spec.replace('""', f'"{source}"')
    script = (
        "import sys, threading, os, time\nfrom pathlib import Path\nfrom tmax.verifier import warm\n"
        "threading.Timer(2.0, lambda: os.kill(os.getpid(), 9)).start()\n"
        f"warm.run({inner.leader}, Path({str(bundle())!r}), {spec!r}.encode(), test='x', timeout=60.0)\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(Path(warm.__file__).parents[2]))
    import sys

    ran = subprocess.run([sys.executable, "-c", script], env=environment, timeout=30, check=False)
    assert ran.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    runners = ["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[t]max.verifier' "]
    while (left := inner.exec(runners, user="root", timeout=10.0).output.strip()) != "0":
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_sandbox_without_the_interpreter_is_an_error(engine: EngineConfig, image: Image, tmp_path: Path) -> None:
    with (
        open_sandbox(engine, image, label="verifier") as sandbox,
        pytest.raises(VerifierError, match=r"not in the sandbox|without a report"),
    ):
        verify(sandbox, hidden(tmp_path, "def test_a(): pass\n"), timeout=30.0)
