"""Rewrites a Dockerfile into one that an old builder understands, for the images that the daemon has.

The rule: what is built is what the Dockerfile says; heredocs and `COPY --chmod` only say it in other words, images
that cannot be had are stood in for, and what the sandbox needs is added at the end.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tmax.errors import BuildError
from tmax.sandbox.context import Context
from tmax.sandbox.dockerfile import lower_heredocs, split_words
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID

_FROM = re.compile(r"(\s*FROM\s+)((?:--\S+\s+)*)(\S+)(\s+AS\s+(\S+))?\s*", re.IGNORECASE)
_ARG = re.compile(r"\s*ARG\s+(\w+)=(\S*)\s*", re.IGNORECASE)
_USER = re.compile(r"\s*USER\s+(\S+)\s*", re.IGNORECASE)
_COPY = re.compile(r"\s*(?:COPY|ADD)\s+((?:--\S+\s+)*)(.*)", re.IGNORECASE | re.DOTALL)
_CHMOD = re.compile(r"--chmod=(\S+)\s+")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


@dataclass(frozen=True)
class BaseImage:
    """An image that a FROM line gets: its name, what tells its content apart, and the user it leaves."""

    name: str
    identity: str
    user: str


@dataclass(frozen=True)
class Lowered:
    """A Dockerfile as it is sent, and the identities of the images that it stands on."""

    text: str
    bases: tuple[str, ...]


def lower(text: str, context: Context, find_base: Callable[[str], BaseImage], *, agent_owns: bool) -> Lowered:
    """Rewrite a Dockerfile; with `agent_owns` the working directory is given to the agent at the end.

    Raises BuildError where the builder could not do what it says.
    """
    lines: list[str] = []
    bases: list[str] = []
    args: dict[str, str] = {}
    # The user of each stage so far, by name; the last one is the stage that is being read.
    users: dict[str, str] = {"scratch": "root"}
    stage: str | None = None
    for number, line in _logical_lines(lower_heredocs(text)):
        if found := _FROM.fullmatch(line):
            name = _substitute(found[3], args)
            user = users.get(name)
            if user is None:
                base = find_base(name)
                bases.append(base.identity)
                name, user = base.name, base.user
            stage = found[5] or f" stage {number}"
            users[stage] = user
            line = f"{found[1]}{found[2]}{name}{found[4] or ''}\n"
        elif stage is None and (found := _ARG.fullmatch(line)):
            args[found[1]] = found[2].strip("'\"")
        elif stage is not None and (found := _USER.fullmatch(line)):
            users[stage] = found[1]
        elif stage is not None and (found := _COPY.fullmatch(line)) and (mode := _CHMOD.search(found[1])):
            start = line.index(mode[0])
            line = line[:start] + line[start + len(mode[0]) :]
            script = _chmod_script(mode[1], found[1], found[2].strip(), context, number)
            line += f"USER root\n{_run(script)}USER {users[stage]}\n"
        lines.append(line)
    if stage is None:
        raise BuildError("the Dockerfile has no FROM", hint="begin it with FROM and an image")
    script = _MAKE_AGENT
    if agent_owns:
        script += f'if [ "$PWD" != / ]; then chown -hR {AGENT_UID}:{AGENT_UID} .; fi\n'
    return Lowered("".join(lines) + f"USER root\n{_run(script)}", tuple(bases))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines by number, each with those that continue it, and a newline at the end."""
    escape = "`" if re.match(r"(#.*\n)*#\s*escape\s*=\s*`", text, re.IGNORECASE) else "\\"
    first, whole = 1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        is_comment = line.lstrip().startswith("#")
        first = first if whole else number
        whole += line + "\n"
        continues = line.rstrip().endswith(escape) and not is_comment
        # Comments and empty lines inside a continued instruction do not end it.
        if continues or (first != number and (is_comment or not line.strip())):
            continue
        yield first, whole
        whole = ""
    if whole:
        yield first, whole


def _substitute(text: str, args: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: args.get(match[1] or match[2]) or match[3] or "", text)


def _chmod_script(mode: str, flags: str, rest: str, context: Context, number: int) -> str:
    """Commands that give what a COPY has just copied its mode; directories keep theirs."""
    words = _words(rest)
    target = '"' + re.sub(r'(["`])', r"\\\1", words[-1]) + '"'
    script = f"set -e\nt={target}\n"
    for source in words[:-1]:
        if "--from=" in flags:
            names, contents = [posixpath.basename(source)], []
        elif "$" in source:
            raise BuildError(
                f"Dockerfile, line {number}: `{source}` has a variable, which --chmod does not go with here",
                hint="write the name out, or RUN chmod",
            )
        else:
            found = context.find(source, number)
            names = [entry.path.name for entry in found if not entry.is_directory]
            contents = [name for entry in found for name, path in entry.inside if path.is_file()]
        for name in names:
            script += f'if [ -d "$t" ]; then chmod {mode} "$t"/{shlex.quote(name)}; else chmod {mode} "$t"; fi\n'
        for name in contents:
            script += f'chmod {mode} "$t"/{shlex.quote(name)}\n'
    return script


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        try:
            return [str(word) for word in json.loads(rest)]
        except json.JSONDecodeError:
            pass
    return split_words(re.sub(r"\\\n", " ", rest))


def _run(script: str) -> str:
    return f"RUN {json.dumps(['/bin/sh', '-c', script])}\n"


_MAKE_AGENT = f"""set -e
place() {{
    placed=
    while IFS=: read -r name password id rest || [ -n "$name" ]; do
        if [ "$name" = agent ]; then continue; fi
        if [ "$id" = {AGENT_UID} ] && [ -z "$placed" ]; then echo "$2"; placed=1; fi
        echo "$name:$password:$id:$rest"
    done <"$1" >"$1.tmax"
    if [ -z "$placed" ]; then echo "$2" >>"$1.tmax"; fi
    cat "$1.tmax" >"$1"
    rm "$1.tmax"
}}
there() {{
    while IFS=: read -r name password id rest; do
        if [ "$name:$id" = agent:{AGENT_UID} ]; then return 0; fi
    done <"$1"
    return 1
}}
touch /etc/passwd /etc/group
there /etc/passwd || place /etc/passwd 'agent:x:{AGENT_UID}:{AGENT_UID}::{AGENT_HOME}:/bin/bash'
there /etc/group || place /etc/group 'agent:x:{AGENT_UID}:'
mkdir -p {AGENT_HOME}
chown -hR {AGENT_UID}:{AGENT_UID} {AGENT_HOME}
"""
"""The line of the agent goes before that of another user of the same id, so that the id shows as `agent`."""
