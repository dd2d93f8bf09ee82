"""Where saved models lie and what is noted beside them; loads no torch.

The rule: `checkpoint.json` is written last, so a directory that has it is whole.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

FACTS = "checkpoint.json"


def model_dir(name: str) -> Path:
    """The directory of a model: a path as it is, else a model that comes with the package, such as `tiny`."""
    packaged = Path(str(files("tmax"))) / "models" / name
    return packaged if not Path(name).exists() and (packaged / FACTS).is_file() else Path(name)


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts beside a saved model, or None where there is no whole one."""
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return facts if isinstance(facts, dict) else None


def newest_checkpoint(root: Path) -> tuple[int, Path] | None:
    """The checkpoint of the highest step under `root`, or None."""
    found = [
        (int(entry.name), entry) for entry in root.glob("[0-9]*") if entry.name.isdigit() and (entry / FACTS).is_file()
    ]
    return max(found, default=None)
