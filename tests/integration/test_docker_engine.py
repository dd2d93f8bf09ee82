"""What is Docker's own: builds, clean-up by label, the first process, and both ways to a container's processes."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmax.config import DockerConfig, Limits
from tmax.errors import BuildError, SandboxError, StartError
from tmax.sandbox.docker import build_docker_image, docker_works, open_docker, reap_docker
from tmax.sandbox.docker_api import connect
from tmax.sandbox.docker_sandbox import DockerSandbox
from tmax.sandbox.protocol import Image
from tmax.task import FileSpec, Settings, Task, TaskDraft, Truth, write_task

pytestmark = pytest.mark.docker

BASE = "tmax-base"
CONFIG = DockerConfig(base=BASE, limits=Limits(memory_mb=256, pids=64, file_mb=8))
LABEL = "test-docker-engine"
NOWHERE = DockerConfig(host="unix:///nonexistent/docker.sock")


@pytest.fixture(scope="module", autouse=True)
def _daemon() -> None:
    problem = docker_works(CONFIG)
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(params=["from the host", "from inside"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[DockerSandbox]:
    """A container whose processes are reached either way; the host's needs root."""
    with open_docker(CONFIG, Image("docker", BASE, "/tmp"), label=LABEL) as opened:
        if request.param == "from inside":
            opened = DockerSandbox(opened._client, opened.image, opened._name, None)
        elif opened.leader is None:
            pytest.skip("not root on the daemon's machine")
        yield opened
        opened.close()


def running(sandbox: DockerSandbox) -> set[str]:
    """What runs in the container as `sleep N` or `yes`: the second word or the first."""
    script = r"""
    for file in /proc/[1-9]*/cmdline; do
        mapfile -d '' -t words <"$file"
        [[ ${words[0]-} == sleep || ${words[0]-} == yes ]] && echo "${words[1]-yes}"
    done 2>/dev/null; true
    """
    return set(sandbox.exec(["bash", "-c", script], user="root", timeout=20).output.split())


def make_task(root: Path, dockerfile: str, files: dict[str, FileSpec] | None = None, timeout: float = 120.0) -> Task:
    draft = TaskDraft(
        instruction="Do it.",
        dockerfile=dockerfile,
        files=files or {},
        initial_test="def test_a(): pass\n",
        final_test="def test_b(): assert False\n",
        steps=("true",),
        truth=Truth("a", "b", "c", "d"),
        spec={"family": "docker-engine", "level": 1, "domain": "x"},
        settings=Settings(build_timeout=timeout),
    )
    return write_task(draft, root)


def test_time_out_kills_what_left_the_session_or_dropped_its_environment(sandbox: DockerSandbox) -> None:
    command = "(setsid bash -c 'sleep 1001 & sleep 1002' &) ; sleep 1003 & exec env -i sleep 1004"
    result = sandbox.exec(["bash", "-c", command], user="agent", timeout=1.0)
    assert result.timed_out
    assert result.exit_code is None
    assert running(sandbox) == set()


def test_time_out_spares_what_other_commands_started(sandbox: DockerSandbox) -> None:
    sandbox.exec(["bash", "-c", "setsid sleep 1001 >/dev/null 2>&1 &"], user="agent", timeout=20)
    assert sandbox.exec(["sleep", "1002"], user="agent", timeout=0.5).timed_out
    assert running(sandbox) == {"1001"}


def test_flood_of_output_is_stopped_at_the_time_out(sandbox: DockerSandbox) -> None:
    result = sandbox.exec(["yes"], user="agent", timeout=1.0)
    assert result.timed_out
    assert result.truncated_chars > 0
    assert result.seconds < 15
    assert running(sandbox) == set()


def test_fork_bomb_ends_with_its_time_out(sandbox: DockerSandbox) -> None:
    result = sandbox.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 1001"], user="agent", timeout=1.0)
    assert result.timed_out
    sandbox.kill_processes(user="agent")
    assert sandbox.exec(["bash", "-c", "echo $(echo alive)"], user="agent", timeout=20).output == "alive\n"


def test_kill_processes_takes_one_user_or_all(sandbox: DockerSandbox) -> None:
    for user, seconds in (("agent", "1001"), ("root", "1002")):
        command = f"setsid sleep {seconds} >/dev/null 2>&1 &"
        sandbox.exec(["bash", "-c", command], user=user, timeout=20)  # type: ignore[arg-type]
    sandbox.kill_processes(user="agent")
    assert running(sandbox) == {"1002"}
    sandbox.kill_processes(user=None)
    assert running(sandbox) == set()


def test_shell_outlives_its_commands_time_out_and_the_killing_of_its_user(sandbox: DockerSandbox) -> None:
    shell = sandbox.shell(user="agent")
    assert shell.run("cd /opt; kept=5; sleep 1001 & true", timeout=20).exit_code == 0
    assert shell.run("yes", timeout=1.0).timed_out
    assert shell.run("echo $kept $PWD; env | grep -c TMAX", timeout=20).output == "5 /opt\n0\n"
    assert running(sandbox) == {"1001"}
    sandbox.kill_processes(user="agent")
    assert shell.run("echo $PWD", timeout=20).output == "/opt\n"
    shell.close()
    assert running(sandbox) == set()


def test_root_inside_cannot_end_the_container(sandbox: DockerSandbox) -> None:
    command = "kill -TERM 1; kill -INT 1; kill -KILL 1; kill -HUP 1; kill -KILL -1; sleep 0.2; echo gone"
    sandbox.exec(["bash", "-c", command], user="root", timeout=20)
    assert sandbox.exec(["echo", "alive"], user="agent", timeout=20).output == "alive\n"


def test_orphans_leave_no_zombies(sandbox: DockerSandbox) -> None:
    sandbox.exec(["bash", "-c", "for i in {1..20}; do (sleep 0.01 &); done; sleep 0.3"], user="agent", timeout=20)
    script = "for file in /proc/[1-9]*/stat; do read -r stat <$file; [[ $stat == *') Z '* ]] && echo zombie; done; true"
    assert sandbox.exec(["bash", "-c", script], user="root", timeout=20).output == ""


def test_command_that_ended_is_not_waited_for_by_what_it_left_behind(sandbox: DockerSandbox) -> None:
    result = sandbox.exec(["bash", "-c", "sleep 1001 & echo said; exit 3"], user="agent", timeout=60)
    assert (result.output, result.exit_code) == ("said\n", 3)
    assert result.seconds < 15
    assert running(sandbox) == {"1001"}


@pytest.mark.parametrize(
    ("command", "code"),
    [(["/nowhere/program"], 127), (["nowhere"], 127), (["/etc/hostname"], 126), (["/etc"], 126)],
)
def test_command_that_cannot_be_run_exits_as_in_a_shell(command: list[str], code: int) -> None:
    with open_docker(CONFIG, Image("docker", BASE), label=LABEL) as sandbox:
        result = sandbox.exec(command, user="agent", timeout=20)
    assert result.exit_code == code
    assert result.output


def test_put_makes_parents_as_root_and_leaves_existing_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "tree/inner").mkdir(parents=True)
    (tmp_path / "tree/inner/file").write_bytes(bytes(range(256)))
    with open_docker(CONFIG, Image("docker", BASE, "/tmp"), label=LABEL) as sandbox:
        sandbox.put(tmp_path / "tree", "/opt/new/tree", user="agent", mode=0o640)
        shown = sandbox.exec(
            ["stat", "-c", "%a %U:%u %n", "/opt", "/opt/new", "/opt/new/tree", "/opt/new/tree/inner/file"],
            user="root",
            timeout=20,
        )
        assert sandbox.get("/opt/new/tree/inner/file") == bytes(range(256))
        with pytest.raises(SandboxError, match="directory is in the way"):
            sandbox.put(tmp_path / "tree/inner/file", "/tmp", user="root", mode=0o600)
        assert sandbox.exec(["stat", "-c", "%a", "/tmp"], user="root", timeout=20).output == "1777\n"
    assert shown.output.splitlines() == [
        "755 root:0 /opt",
        "755 root:0 /opt/new",
        "750 UNKNOWN:1000 /opt/new/tree",
        "640 UNKNOWN:1000 /opt/new/tree/inner/file",
    ]


def test_get_takes_regular_files_only() -> None:
    with open_docker(CONFIG, Image("docker", BASE, "/tmp"), label=LABEL) as sandbox:
        sandbox.exec(["bash", "-c", "ln -s /etc/hostname link; mkfifo pipe; mkdir folder"], user="root", timeout=20)
        for path in ("/tmp/link", "/tmp/pipe", "/tmp/folder", "/tmp/absent", "/etc/passwd/below", "/dev/null"):
            with pytest.raises(FileNotFoundError):
                sandbox.get(path)
        assert sandbox.get("/etc/passwd").startswith(b"root:x:0:0:")


def test_container_is_gone_after_its_block_and_after_an_error_in_it() -> None:
    with open_docker(CONFIG, Image("docker", BASE), label=LABEL):
        assert len(containers()) == 1
    assert containers() == []

    def fail() -> None:
        with open_docker(CONFIG, Image("docker", BASE), label=LABEL):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert containers() == []


def containers() -> list[str]:
    client = connect(CONFIG)
    try:
        return [entry["Id"] for entry in client.containers(all=True, filters={"label": f"tmax.run={LABEL}"})]
    finally:
        client.close()


ORPHAN = """
import os, signal, sys
from tmax.config import DockerConfig
from tmax.sandbox.docker import open_docker
from tmax.sandbox.protocol import Image
with open_docker(DockerConfig(), Image("docker", sys.argv[1]), label=sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_reap_removes_the_containers_of_dead_owners_of_that_run_only() -> None:
    with open_docker(CONFIG, Image("docker", BASE), label=LABEL) as alive:
        for label in (LABEL, f"{LABEL}-other"):
            subprocess.run([sys.executable, "-c", ORPHAN, BASE, label], check=False)
        try:
            assert len(containers()) == 2
            assert reap_docker(CONFIG, label=LABEL) == 1
            assert reap_docker(CONFIG, label=LABEL) == 0
            assert alive.exec(["echo", "alive"], user="agent", timeout=20).output == "alive\n"
        finally:
            assert reap_docker(CONFIG, label=f"{LABEL}-other") == 1


def test_container_that_ended_is_an_infrastructure_failure() -> None:
    with open_docker(CONFIG, Image("docker", BASE), label=LABEL) as sandbox:
        shell = sandbox.shell(user="agent")
        sandbox._client.kill(sandbox._name)
        with pytest.raises(SandboxError) as caught:
            sandbox.exec(["true"], user="agent", timeout=20)
        assert caught.value.kind == "process"
        with pytest.raises(SandboxError):
            shell.run("true", timeout=20)


def test_container_that_ends_under_a_command_is_no_result_of_the_command(sandbox: DockerSandbox) -> None:
    client = connect(CONFIG)
    timer = threading.Timer(1.0, lambda: client.kill(sandbox._name))
    timer.start()
    with pytest.raises(SandboxError, match="has ended") as caught:
        sandbox.exec(["sleep", "60"], user="agent", timeout=60)
    timer.join()
    client.close()
    assert caught.value.kind == "process"


def test_command_that_kills_itself_has_an_exit_code(sandbox: DockerSandbox) -> None:
    assert sandbox.exec(["bash", "-c", "kill -9 $$"], user="agent", timeout=20).exit_code == 137


def test_image_that_is_not_there_is_a_start_error() -> None:
    with (
        pytest.raises(StartError) as caught,
        open_docker(CONFIG, Image("docker", "tmax/none:none"), label=LABEL),
    ):
        raise AssertionError
    assert caught.value.kind == "api"
    assert containers() == []


def test_no_daemon_is_said_in_words_and_is_a_start_error(tmp_path: Path) -> None:
    assert docker_works(NOWHERE) == (
        "no Docker daemon answers at unix:///nonexistent/docker.sock: No such file or directory"
    )
    assert "has no image `tmax/none`" in (docker_works(DockerConfig(base="tmax/none")) or "")
    with pytest.raises(StartError) as caught:
        build_docker_image(NOWHERE, make_task(tmp_path, "FROM any\n"))
    assert caught.value.kind == "daemon"
    with pytest.raises(StartError), open_docker(NOWHERE, Image("docker", BASE), label=LABEL):
        raise AssertionError


def test_build_gives_the_agent_its_files_and_keeps_tests_out(tmp_path: Path) -> None:
    dockerfile = """\
FROM python:3.13-slim
ENV GREETING="good day"
WORKDIR /srv/app
COPY . .
RUN <<SCRIPT
echo "FROM users" > query.sql
SCRIPT
"""
    files = {
        "data/a.txt": FileSpec(b"a\n"), "run.sh": FileSpec(b"#!/bin/sh\n", 0o755),
        ".dockerignore": FileSpec(b"*.log\n"), "noise.log": FileSpec(b"x"),
    }  # fmt: skip
    image = build_docker_image(CONFIG, make_task(tmp_path, dockerfile, files))
    assert image.workdir == "/srv/app"
    assert image.env["GREETING"] == "good day"
    with open_docker(CONFIG, image, label=LABEL) as sandbox:
        script = "whoami; echo $HOME $GREETING; find . -printf '%P %u %m\\n' | sort; cat query.sql"
        result = sandbox.exec(["bash", "-c", script], user="agent", timeout=20)
    assert result.output.splitlines() == [
        "agent",
        "/home/agent good day",
        " agent 755",
        "Dockerfile agent 644",
        "data agent 755",
        "data/a.txt agent 644",
        "query.sql agent 644",
        "run.sh agent 755",
        "FROM users",
    ]


def test_second_build_of_the_same_content_is_the_first_one(tmp_path: Path) -> None:
    task = make_task(tmp_path, "FROM any\nRUN date +%N > /stamp\n")
    client = connect(CONFIG)
    try:
        first = build_docker_image(CONFIG, task)
        made = client.inspect_image(first.reference)["Id"]  # type: ignore[no-untyped-call]
        assert build_docker_image(CONFIG, task) == first
        assert client.inspect_image(first.reference)["Id"] == made  # type: ignore[no-untyped-call]
        other = build_docker_image(CONFIG, make_task(tmp_path, "FROM any\nRUN date +%s > /stamp\n"))
        assert other.reference != first.reference
    finally:
        client.close()


def test_name_agent_and_id_1000_taken_by_others_still_make_one_agent(tmp_path: Path) -> None:
    dockerfile = "FROM any\nRUN useradd -u 1005 agent && useradd -m -u 1000 ubuntu\nWORKDIR /w\nUSER ubuntu\n"
    image = build_docker_image(CONFIG, make_task(tmp_path, dockerfile))
    with open_docker(CONFIG, image, label=LABEL) as sandbox:
        script = "whoami; id -u agent; id -u ubuntu; head -n 1 /etc/passwd; touch mine && stat -c %U mine"
        result = sandbox.exec(["bash", "-c", script], user="agent", timeout=20)
    assert result.output.splitlines() == ["agent", "1000", "1000", "root:x:0:0:root:/root:/bin/bash", "agent"]


def test_stages_keep_their_names_and_their_images_are_stood_in_for(tmp_path: Path) -> None:
    dockerfile = (
        "ARG TAG=3.13\nFROM golang:${TAG} AS build\nRUN echo built > /out\nFROM alpine\nCOPY --from=build /out /out\n"
    )
    image = build_docker_image(CONFIG, make_task(tmp_path, dockerfile))
    with open_docker(CONFIG, image, label=LABEL) as sandbox:
        assert sandbox.get("/out") == b"built\n"


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM any\nRUN echo why; exit 7\n", "non-zero code: 7"),
        ("FROM any\nCOPY absent /x\n", "absent"),
        ("FROM any\nCOPY task.json /x\n", "task.json"),
        ("FROM any\nRUNS true\n", "RUNS"),
        ("RUN true\n", "no FROM"),
    ],
)
def test_broken_dockerfile_is_a_build_error_that_says_why(tmp_path: Path, dockerfile: str, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        build_docker_image(CONFIG, make_task(tmp_path, dockerfile))
    assert message in caught.value.message
    assert caught.value.hint
    if "why" in dockerfile:
        assert "\nwhy\n" in caught.value.log_tail


def test_build_that_takes_too_long_ends_and_leaves_nothing(tmp_path: Path) -> None:
    task = make_task(tmp_path, "FROM any\nRUN echo begun; sleep 3017\n", timeout=3.0)
    with pytest.raises(BuildError, match="longer to build than the 3 seconds") as caught:
        build_docker_image(CONFIG, task)
    assert "begun" in caught.value.log_tail
    deadline = time.monotonic() + 20
    while "sleep 3017" in (shown := subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout):
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)


def test_limits_hold() -> None:
    with open_docker(CONFIG, Image("docker", BASE, "/tmp"), label=LABEL) as sandbox:
        eater = "x = []\nwhile True: x.append(bytearray(1 << 20))"
        assert sandbox.exec(["python3", "-c", eater], user="agent", timeout=60).exit_code == 137
        writer = ["head", "-c", "20000000", "/dev/zero"]
        result = sandbox.exec(["bash", "-c", f"{' '.join(writer)} > big; stat -c %s big"], user="agent", timeout=60)
        assert result.output.splitlines()[-1] == str(8 * 1024 * 1024)
        many = "for i in {1..100}; do sleep 5 & done 2>/dev/null; jobs -r | wc -l"
        count = sandbox.exec(["bash", "-c", many], user="agent", timeout=60).output.split()
        assert count == [] or int(count[-1]) < 64
        network = sandbox.exec(["bash", "-c", "echo /sys/class/net/*"], user="agent", timeout=20)
        assert network.output == "/sys/class/net/lo\n"


def test_mounts_are_seen_at_the_same_path_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from the host", encoding="utf-8")
    with open_docker(CONFIG, Image("docker", BASE), label=LABEL, mounts=[tmp_path]) as sandbox:
        seen = sandbox.exec(["cat", str(tmp_path / "file")], user="root", timeout=20)
        written = sandbox.exec(["touch", str(tmp_path / "new")], user="root", timeout=20)
    assert seen.output == "from the host"
    assert written.exit_code == 1
    assert not (tmp_path / "new").exists()
