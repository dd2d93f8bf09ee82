"""Configuration: what is wrong is named, and what was resolved reads back the same."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tmax.config import DppoLoss, GrpoLoss, cache_dir, dump_config, load_config, parse_config, with_seed
from tmax.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "name": "r",
    "sample": {"families": [{"name": "sorting"}]},
    "policy": {"type": "hf", "path": "some/model"},
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, yaml.safe_dump(MINIMAL))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file.*nowhere\.yaml") as caught:
        load_config(tmp_path / "nowhere.yaml")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not YAML"),
        ("a: !!python/object:os.system {}", "not YAML"),
        ("name: 2024-13-45", "not YAML"),
        ("\x01", "not YAML"),
        ("- a\n- b\n", "no mapping"),
        ("", "no mapping"),
        ("just words", "no mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(write(tmp_path, text))
    assert caught.value.hint


def test_a_directory_or_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\xff")
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot read"):
            load_config(path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.num_stepz=5", "unknown key `train.num_stepz`"),
        ("colour=blue", "unknown key `colour`"),
        ("train.num_steps=0", "`train.num_steps`: input should be greater than 0"),
        ("train.num_steps=many", "`train.num_steps`"),
        ("name=../up", "`name`"),
        ("name=-rf", "`name`"),
        ("sandbox.type=vm", "`sandbox`"),
        ("sample.families=[]", "`sample.families`"),
        ("policy.path=null", "`the file`: give `policy.path`, or `sft.model`"),
        ("train.num_steps", "not `key=value`"),
        ("=5", "not `key=value`"),
        ("name.inner=1", "`name` is not a section"),
        ("train.lr=[1", "not YAML"),
        ("train.lr=2024-13-45", "not YAML"),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal(tmp_path), [override])
    assert says in caught.value.message
    assert caught.value.hint


def test_overrides_are_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = ["train.num_steps=3", "train.lr=1e-5", "train.num_steps=4", "train.loss={type: grpo}", "seed=7"]
    config = load_config(minimal(tmp_path), [*overrides, "validate.max_rejected_share=0.5"])
    assert (config.train.num_steps, config.train.lr, config.seed) == (4, 1e-5, 7)
    assert config.train.loss == GrpoLoss()
    assert config.validate_.max_rejected_share == 0.5


def test_what_was_resolved_reads_back_the_same(tmp_path: Path) -> None:
    overrides = [
        "sandbox={type: bubblewrap, rootfs: /srv/rootfs, limits: {pids: 9}}", "train.lr=1e-6", "eval.samples=2",
        "sft={model: {hidden_size: 64}}", "calibrate.band=[0.1, 0.9]", "agent.timeout=12.5",
    ]  # fmt: skip
    config = load_config(minimal(tmp_path), overrides)
    text = dump_config(config)
    again = load_config(write(tmp_path, text))
    assert again == config
    assert dump_config(again) == text
    assert "validate:" in text
    assert "validate_:" not in text


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    config = load_config(minimal(tmp_path))
    assert (config.train.prompts_per_step, config.train.group_size, config.train.lr) == (8, 32, 1e-6)
    assert config.train.loss == DppoLoss(divergence="tv", delta=0.1)
    assert (config.agent.max_calls, config.agent.command_timeout, config.agent.max_context) == (64, 120.0, 65_536)
    assert (config.eval.sampling.temperature, config.eval.sampling.top_p) == (0.7, 0.95)


def test_training_samples_the_whole_distribution(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`train`: `train\.sampling\.top_p` must be 1"):
        load_config(minimal(tmp_path), ["train.sampling.top_p=0.95"])
    config = load_config(minimal(tmp_path), ["eval.sampling.top_p=0.9", "calibrate.sampling.top_p=0.9"])
    assert (config.eval.sampling.top_p, config.train.sampling.top_p) == (0.9, 1.0)


def test_a_tiny_model_must_be_possible() -> None:
    tiny = MINIMAL | {"policy": {"type": "hf"}, "sft": {"model": {"hidden_size": 96, "num_heads": 4}}}
    assert parse_config(tiny, source="x").policy.path is None
    tiny["sft"] = {"model": {"hidden_size": 100, "num_heads": 8}}
    with pytest.raises(ConfigError, match="even multiple"):
        parse_config(tiny, source="x")


@pytest.mark.parametrize("data", [None, 5, [], {1: 2}])
def test_data_that_is_no_config_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match=r"^x: "):
        parse_config(data, source="x")


def test_a_config_cannot_be_changed_and_another_seed_is_another_config(tmp_path: Path) -> None:
    config = load_config(minimal(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert (with_seed(config, 3).seed, config.seed) == (3, 0)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMAX_CACHE", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("TMAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "b" / "tmax"
