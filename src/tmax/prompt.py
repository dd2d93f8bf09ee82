"""Renders `prompts/<caller>/<message>.j2`: one message a file, and a variable that is not given is an error."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateNotFound

from tmax.errors import PromptError


def prompts_dir() -> Path:
    """The folder of prompt files: inside the installed package, or the checkout's `prompts/`."""
    packaged = Path(str(files("tmax"))) / "prompts"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "prompts"


def render(caller: str, message: str, **variables: object) -> str:
    """Render one message without a trailing newline. Raises PromptError for a missing file or variable."""
    name = f"{caller}/{message}.j2"
    try:
        return _environment().get_template(name).render(**variables).rstrip("\n")
    except TemplateNotFound as error:
        raise PromptError(f"no prompt file `prompts/{name}`", hint="see the folders under `prompts/`") from error
    except TemplateError as error:
        raise PromptError(f"prompt `{name}`: {error}", hint="give every variable the file names") from error


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(prompts_dir()), undefined=StrictUndefined, keep_trailing_newline=True)
