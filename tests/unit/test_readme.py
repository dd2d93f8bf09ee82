"""What the README claims is so."""

import re
import subprocess
import sys
from pathlib import Path

from tmax.pipeline import STAGES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_both_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in ("quickstart", "test", "check"):
        assert command in targets
    assert "make quickstart" in README
    assert "make test" in README


def test_the_stage_table_is_the_pipeline() -> None:
    table = README.split("## Stages", 1)[1].split("\n\n", 2)[1]
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(STAGES)


def test_every_command_it_shows_exists() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tmax.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in set(re.findall(r"`?tmax ([a-z]+)", README)) - {"synthesises"}:
        assert re.search(rf"\b{command}\b", listed), command


def test_every_place_in_the_tree_exists() -> None:
    tree = README.split("## The tree", 1)[1].split("```")[1]
    for line in tree.splitlines():
        for name in re.findall(
            r"(?:^|(?<=\s))([\w-]+(?:\.py|/))", line.split("  ", 2)[-1] if line.startswith("  ") else line
        ):
            places = [ROOT / name, ROOT / "src/tmax" / name, ROOT / "tests" / name, ROOT / "src/tmax/synth" / name,
                      ROOT / "src/tmax/stages" / name]  # fmt: skip
            assert any(place.exists() for place in places), name


def test_files_it_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
