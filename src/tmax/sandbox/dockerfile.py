"""Reads Dockerfiles: typed instructions for the engine that runs them itself, and heredocs rewritten for old builders.

The rule: what is not understood is a BuildError that names the line; nothing is skipped in silence.
"""

import json
import re
import shlex
from dataclasses import dataclass

from tmax.sandbox.words import expand, expand_body, fail, split_words

_HEREDOC = re.compile(r"\d*<<(-?)(\"[^\"]+\"|'[^']+'|[^\s<\"'|&;()]+)")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*?)\s*")
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_RECORDED = frozenset(
    {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "VOLUME", "HEALTHCHECK"}
)  # fmt: skip
_KNOWN = frozenset({"FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL", *_RECORDED})


@dataclass(frozen=True)
class Heredoc:
    """A body that follows an instruction. `expand` is false where its delimiter was quoted."""

    name: str
    body: str
    """As it is used: leading tabs are gone where `<<-` asked for it. Ends with a newline unless empty."""
    expand: bool
    raw: str
    """As it stands in the file, with its closing line."""


@dataclass(frozen=True)
class Statement:
    """One instruction before it is understood: lines `first` to `last`, counted from 1."""

    first: int
    last: int
    keyword: str
    rest: str
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True)
class From:
    """The image that the build starts from, and the name of the stage."""

    line: int
    image: str
    name: str | None = None


@dataclass(frozen=True)
class Run:
    """A command: a string for the shell, an argument vector, or a script with its own first line (`#!`)."""

    line: int
    command: str | tuple[str, ...]
    is_script: bool = False


@dataclass(frozen=True)
class Copy:
    """Files of the build context, and heredocs, to a place in the image."""

    line: int
    sources: tuple[str, ...]
    heredocs: tuple[Heredoc, ...]
    target: str
    chown: str | None = None
    chmod: str | None = None
    is_add: bool = False


@dataclass(frozen=True)
class Workdir:
    """The working directory of what follows."""

    line: int
    path: str


@dataclass(frozen=True)
class Env:
    """Environment of what follows and of the image."""

    line: int
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arg:
    """Variables of the build alone; None takes the value given before FROM."""

    line: int
    pairs: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class RunAs:
    """The user of what follows (USER)."""

    line: int
    user: str


@dataclass(frozen=True)
class Shell:
    """The shell of the string form of RUN."""

    line: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """An instruction that changes no file."""

    line: int
    keyword: str
    text: str


Instruction = From | Run | Copy | Workdir | Env | Arg | RunAs | Shell | Recorded


def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions of a Dockerfile of one stage, in order. Raises BuildError naming the line.

    Variables are not substituted yet, since the environment grows as the build goes on; see `expand` and `split_words`.
    """
    escape, statements = _statements(text)
    found: list[Instruction] = []
    for statement in statements:
        instruction = _understand(statement, escape)
        if isinstance(instruction, From) and any(isinstance(earlier, From) for earlier in found):
            fail(statement.first, "builds of several stages are not supported")
        if not isinstance(instruction, From | Arg) and not any(isinstance(earlier, From) for earlier in found):
            fail(statement.first, f"{statement.keyword} before FROM")
        found.append(instruction)
    if not any(isinstance(instruction, From) for instruction in found):
        fail(1, "there is no FROM")
    return tuple(found)


def lower_heredocs(text: str) -> str:
    """The same Dockerfile for a builder that does not know heredocs; without any it comes back as it is.

    A RUN with heredocs becomes a RUN of one line that evaluates the same script; a COPY of heredocs becomes a RUN,
    as root, that writes the same bytes. Raises BuildError naming the line.
    """
    escape, statements = _statements(text)
    if not any(statement.heredocs for statement in statements):
        return text
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")]
    out: list[str] = []
    position, user = 0, None
    for statement in statements:
        out += lines[position : statement.first - 1]
        position = statement.last
        if statement.keyword == "USER":
            user = statement.rest
        if not statement.heredocs:
            out += lines[statement.first - 1 : statement.last]
        elif statement.keyword == "RUN":
            out.append(_fold(f"RUN {_lowered_run(statement)}", escape) + "\n")
        else:
            line = _fold(f"RUN {_lowered_copy(statement, escape)}", escape) + "\n"
            out += [line] if user is None else ["USER root\n", line, f"USER {user}\n"]
    return "".join(out + lines[position:])


def _statements(text: str) -> tuple[str, list[Statement]]:
    lines = text.removeprefix("\ufeff").split("\n")
    lines = [line.removesuffix("\r") for line in lines]
    escape = _escape_character(lines)
    continued = re.compile(re.escape(escape) + r"[ \t]*$")
    found: list[Statement] = []
    index = 0
    while index < len(lines):
        if not lines[index].strip() or lines[index].lstrip().startswith("#"):
            index += 1
            continue
        first, logical = index, ""
        while index < len(lines):
            line = lines[index]
            index += 1
            # Comments and empty lines inside a continued instruction are not part of it.
            if index - 1 > first and (not line.strip() or line.lstrip().startswith("#")):
                continue
            cut = continued.search(line)
            logical += line[: cut.start()] if cut else line
            if not cut:
                break
        keyword, _, rest = logical.strip().partition(" ") if "\t" not in logical else _cut(logical.strip())
        keyword = keyword.upper()
        heredocs: list[Heredoc] = []
        if keyword in _WITH_HEREDOCS:
            for strips, quoted in _heredoc_marks(rest, escape):
                index, heredoc = _read_heredoc(lines, index, first + 1, strips, quoted)
                heredocs.append(heredoc)
        found.append(Statement(first + 1, index, keyword, rest.strip(), tuple(heredocs)))
    return escape, found


def _cut(logical: str) -> tuple[str, str, str]:
    words = logical.split(None, 1)
    return words[0], " ", words[1] if len(words) > 1 else ""


def _escape_character(lines: list[str]) -> str:
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            if directive[2] not in ("\\", "`"):
                fail(1, f"invalid escape character `{directive[2]}`")
            return directive[2]
    return "\\"


def _heredoc_marks(rest: str, escape: str) -> list[tuple[bool, str]]:
    """(strips tabs, delimiter with its quotes) of the words outside quotes that open a heredoc."""
    marks = []
    for word in split_words(rest, escape):
        match = _HEREDOC.match(word)
        if match and not word.startswith(("'", '"')):
            marks.append((match[1] == "-", match[2]))
    return marks


def _read_heredoc(lines: list[str], index: int, opened: int, strips: bool, quoted: str) -> tuple[int, Heredoc]:
    name = quoted.strip("'\"")
    raw: list[str] = []
    while index < len(lines):
        line = lines[index]
        index += 1
        raw.append(line)
        if (line.lstrip("\t") if strips else line) == name:
            body = [text.lstrip("\t") if strips else text for text in raw[:-1]]
            text = "".join(f"{part}\n" for part in body)
            return index, Heredoc(name, text, quoted == name, "".join(f"{part}\n" for part in raw))
    return fail(opened, f"the heredoc `{name}` has no end")


def _understand(statement: Statement, escape: str) -> Instruction:
    line, keyword, rest = statement.first, statement.keyword, statement.rest
    if keyword not in _KNOWN:
        fail(line, f"unknown or unsupported instruction {keyword}")
    if not rest:
        fail(line, f"{keyword} needs an argument")
    match keyword:
        case "FROM":
            return _from(line, rest)
        case "RUN":
            return _run(statement)
        case "COPY" | "ADD":
            return _copy(statement, escape)
        case "WORKDIR":
            return Workdir(line, rest)
        case "ENV":
            return Env(line, _pairs(line, rest, escape))
        case "ARG":
            pairs = [word.partition("=") for word in split_words(rest, escape)]
            return Arg(line, tuple((name, value if equals else None) for name, equals, value in pairs))
        case "USER":
            return RunAs(line, rest)
        case "SHELL":
            command = _json_list(rest)
            if not command:
                fail(line, "SHELL needs the JSON form")
            return Shell(line, command)
        case _:
            return Recorded(line, keyword, rest)


def _from(line: int, rest: str) -> From:
    words = [word for word in rest.split() if not word.startswith("--platform=")]
    if len(words) == 3 and words[1].upper() == "AS":
        return From(line, words[0], words[2])
    if len(words) != 1 or words[0].startswith("--"):
        fail(line, "FROM needs one image")
    return From(line, words[0])


def _run(statement: Statement) -> Run:
    line, rest, heredocs = statement.first, statement.rest, statement.heredocs
    if rest.startswith("--"):
        fail(line, f"RUN {rest.split()[0]} is not supported")
    if (command := _json_list(rest)) is not None:
        return Run(line, command)
    if len(heredocs) == 1 and _HEREDOC.fullmatch(rest):
        body = heredocs[0].body
        return Run(line, body, is_script=body.startswith("#!"))
    return Run(line, rest if not heredocs else rest + "\n" + "".join(heredoc.raw for heredoc in heredocs))


def _copy(statement: Statement, escape: str) -> Copy:
    line, rest = statement.first, statement.rest
    flags: dict[str, str] = {}
    while match := re.match(r"--([a-z-]+)(?:=(\S*))?\s+", rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    for name in flags:
        if name not in ("chown", "chmod", "link"):
            fail(line, f"{statement.keyword} --{name} is not supported")
    json_form = _json_list(rest)
    words = list(json_form) if json_form is not None else split_words(rest, escape)
    sources = [word for word in words[:-1] if not _HEREDOC.fullmatch(word)]
    if len(words) < 2 or (
        statement.keyword == "ADD" and any(re.match(r"(https?|ftp|git|ssh)://|git@", s) for s in sources)
    ):
        fail(line, f"{statement.keyword} needs sources of the build context and a target")
    if json_form is not None:
        # The JSON form has no quotes to take away, so what would be taken for quotes is escaped.
        words = [re.sub(r"([\\'\"])", r"\\\1", word) for word in words]
        sources = words[:-1]
    return Copy(
        line, tuple(sources), statement.heredocs, words[-1], flags.get("chown"), flags.get("chmod"),
        statement.keyword == "ADD",
    )  # fmt: skip


def _pairs(line: int, rest: str, escape: str) -> tuple[tuple[str, str], ...]:
    words = split_words(rest, escape)
    if "=" not in words[0]:
        name, _, value = rest.partition(" ") if "\t" not in rest else _cut(rest)
        if not value.strip():
            fail(line, f"ENV {name} has no value")
        return ((name, value.strip()),)
    pairs = [word.partition("=") for word in words]
    if not all(name and equals for name, equals, _ in pairs):
        fail(line, "ENV takes name=value pairs")
    return tuple((name, value) for name, _, value in pairs)


def _json_list(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return tuple(value) if value and all(isinstance(part, str) for part in value) else None


def _lowered_run(statement: Statement) -> str:
    instruction = _run(statement)
    assert isinstance(instruction.command, str)
    quoted = _printf(instruction.command)
    if instruction.is_script:
        return (
            f'f="$(mktemp)" && {quoted} > "$f" && chmod 700 "$f" && "$f"; s=$?; rm -f "$f"; exit $s'
        )  # fmt: skip
    return f'eval "$({quoted})"'


def _lowered_copy(statement: Statement, escape: str) -> str:
    copy = _copy(statement, escape)
    if copy.sources:
        fail(copy.line, "files and heredocs in one COPY are not supported")
    many = len(copy.heredocs) > 1
    parts = []
    for heredoc in copy.heredocs:
        into = f'if [ -d "$t" ] || [ -z "${{t##*/}}" ]; then t="${{t%/}}/"{shlex.quote(heredoc.name)}; fi'
        if many:
            into = f't="${{t%/}}/"{shlex.quote(heredoc.name)}'
        pieces = _literals(heredoc.body) if heredoc.expand else [(False, heredoc.body)]
        form = "".join("%s" if is_variable else "%b" for is_variable, _ in pieces)
        words = " ".join(f'"{text}"' if is_variable else f"'{_octal(text)}'" for is_variable, text in pieces)
        part = f't={_shell_word(copy.target)}; {into}; mkdir -p "$(dirname "$t")" && rm -f "$t" && '
        part += f'printf \'{form}\' {words} > "$t" && chmod {copy.chmod or "644"} "$t"'
        if copy.chown:
            part += f' && chown {copy.chown} "$t"'
        parts.append(part)
    return "set -e; " + "; ".join(parts)


def _literals(body: str) -> list[tuple[bool, str]]:
    """Cut a body into (is a variable, text): the shell fills in the variables, and only those."""
    pieces: list[tuple[bool, str]] = []
    at = 0
    pattern = re.compile(r"\\([\\$\n])|\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*(?::?[-+][^}`$\\\"]*)?\})")
    for match in pattern.finditer(body):
        pieces.append((False, body[at : match.start()]))
        pieces.append((False, match[1]) if match[1] else (True, match[0]))
        at = match.end()
    pieces.append((False, body[at:]))
    return [piece for piece in pieces if piece[1]] or [(False, "")]


def _shell_word(word: str) -> str:
    """A target as a word of the shell: variables stay, nothing else is special."""
    return word if word[:1] in "'\"" else '"' + re.sub(r'(["`])', r"\\\1", word) + '"'


def _printf(text: str) -> str:
    return f"printf '%b' '{_octal(text)}'"


def _octal(text: str) -> str:
    """A text for printf's %b between single quotes on one line."""
    text = text.replace("\\", "\\\\").replace("'", "\\0047").replace("\n", "\\n").replace("\r", "\\r")
    return text.replace("\t", "\\t")


def _fold(line: str, escape: str, width: int = 30_000) -> str:
    """Break a line that builders would find too long; no piece begins like a comment or with white space."""
    pieces = []
    while len(line) > width:
        cut = width
        while line[cut] in "# \t\\" or line[cut - 1] in "\\" + escape:
            cut -= 1
        pieces.append(line[:cut])
        line = line[cut:]
    return f"{escape}\n".join([*pieces, line])


__all__ = [
    "Arg",
    "Copy",
    "Env",
    "From",
    "Heredoc",
    "Instruction",
    "Recorded",
    "Run",
    "RunAs",
    "Shell",
    "Statement",
    "Workdir",
    "expand",
    "expand_body",
    "lower_heredocs",
    "parse",
    "split_words",
]
