"""The command line: light to start, data on stdout, and one message with a hint for whatever is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tmax(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tmax.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def refused(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "hint: " in done.stderr
    for word in words:
        assert word in done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tmax.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\nassert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'docker', 'transformers', 'vllm', 'datasets', 'matplotlib', 'pydantic', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_usage_mistakes_exit_with_2() -> None:
    assert tmax("no-such-command").returncode == 2
    assert tmax("run").returncode == 2
    assert tmax("rollout", "x", "--samples", "0").returncode == 2


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    refused(tmax("run", str(tmp_path / "no.yaml"), "--runs", str(tmp_path / "runs")), "no.yaml")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("name: [", "YAML"),
        ("- 1\n", "mapping"),
        ("name: x\n", "sample"),
        ("name: a/b\nsample: {families: [{name: place}]}\npolicy: {path: m}\n", "name"),
        ("name: x\nsample: {families: [{name: place}]}\npolicy: {path: m}\nlearning: 1\n", "unknown key `learning`"),
        ("name: x\nsample: {families: [{name: place}]}\npolicy: {path: m}\ntrain: {lr: -1}\n", "train.lr"),
        ("name: x\nsample: {families: [{name: place}]}\n", "policy.path"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    refused(tmax("run", "c.yaml", "--runs", "runs", cwd=tmp_path), word)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_family_or_level_names_those_there_are(tmp_path: Path) -> None:
    refused(tmax("generate", "--families", "nothing", "--out", "bank", cwd=tmp_path), "nothing", "place")
    assert not (tmp_path / "bank").exists()
    (tmp_path / "c.yaml").write_text("name: x\npolicy: {path: m}\nsample: {families: [{name: place, levels: [9]}]}\n")
    refused(tmax("sample", "c.yaml", cwd=tmp_path), "level 9")


def test_the_same_seed_gives_the_same_directories_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        done = tmax("generate", "--count", "12", "--seed", "7", "--out", name, "--json", cwd=tmp_path)
        assert len(json.loads(done.stdout)["tasks"]) == 12
    same = subprocess.run(["diff", "-r", "a", "b"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stdout
    other = tmax("generate", "--count", "12", "--seed", "8", "--out", "c", cwd=tmp_path)
    assert other.returncode == 0
    assert {path.name for path in (tmp_path / "a").iterdir()}.isdisjoint(
        path.name for path in (tmp_path / "c").iterdir()
    )


def test_a_task_without_tests_and_one_that_leaves_its_directory_are_rejected_as_unreadable(tmp_path: Path) -> None:
    tmax("generate", "--count", "3", "--out", "bank", cwd=tmp_path)
    first, second, _ = sorted((tmp_path / "bank").iterdir())
    shutil.rmtree(first / "tests")
    (second / "environment/files/link").symlink_to("/etc/passwd")
    done = tmax("validate", str(first), str(second), "--sandbox", "bubblewrap", "--json", cwd=tmp_path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [item["verdict"] for item in found] == ["REJECT", "REJECT"]
    assert "no tests" in found[0]["reason"]
    assert "symbolic link" in found[1]["reason"]


def test_no_task_no_policy_no_run_no_engine_are_each_one_message(tmp_path: Path) -> None:
    tmax("generate", "--count", "1", "--out", "bank", cwd=tmp_path)
    refused(tmax("validate", "nowhere", cwd=tmp_path), "nowhere")
    refused(tmax("rollout", "bank", "--policy", "nobody", cwd=tmp_path), "nobody", "oracle")
    refused(tmax("report", "runs/none", cwd=tmp_path), "runs/none")
    refused(tmax("show", "runs/none", cwd=tmp_path), "runs/none")
    refused(tmax("validate", "bank", "--sandbox", "podman", cwd=tmp_path), "podman", "bubblewrap")
    gone = tmax("validate", "bank", "--sandbox", "docker", cwd=tmp_path, DOCKER_HOST="unix:///nowhere/docker.sock")
    refused(gone, "docker")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_full_disk_leaves_no_half_written_task(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=160k none {tmp_path} && {sys.executable} -m tmax.cli generate --count 60 "
        f"--out {tmp_path}/bank; code=$?; ls -A {tmp_path}/bank | grep -c draft; exit $code"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 1, done.stderr
    assert "cannot write a task" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip().endswith("0")


def test_config_is_printed_as_it_is_resolved_and_every_key_is_explained() -> None:
    preset = str(ROOT / "configs/quickstart.yaml")
    done = tmax("config", preset, "--set", "train.num_steps=3")
    assert "num_steps: 3" in done.stdout
    schema = json.loads(tmax("config", "--schema").stdout)
    for model in [schema, *schema["$defs"].values()]:
        for key, value in model.get("properties", {}).items():
            if key != "type":
                assert value.get("description"), f"`{key}` is not explained"


def test_every_preset_can_be_read() -> None:
    for preset in sorted((ROOT / "configs").glob("*.yaml")):
        assert tmax("config", str(preset)).returncode == 0, preset
