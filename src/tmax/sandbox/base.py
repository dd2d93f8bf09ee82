"""The bottom of every bubblewrap sandbox: the host's own userland, or a directory with a root file system.

The rule: only programs and their data come from the host. Homes, mounts, state and secrets do not; whatever an
ordinary user of the host may not read does not exist inside, for inside-root either. /etc is a copy of what is public
of it, since it may hold mounts and always holds secrets.
"""

import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tmax.config import cache_dir
from tmax.errors import StartError
from tmax.sandbox import entry
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID

_VERSION = 4
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "opt")
_EMPTY = ("boot", "home", "media", "mnt", "proc", "dev", "run", "srv", "sys", "var", "var/cache", "var/lib", "var/log",
          "var/mail", "var/opt", "var/spool")  # fmt: skip
_STATE = ("var/lib/dpkg",)
_SECRET_NAMES = frozenset({
    "shadow", "shadow-", "gshadow", "gshadow-", "passwd-", "group-", "subuid", "subuid-", "subgid", "subgid-",
    "sudoers", "machine-id", "fstab", "krb5.keytab", "opasswd", "netrc", ".netrc", ".pypirc", ".git-credentials",
    ".pgpass", "environment", "authorized_keys",
})  # fmt: skip
_SECRET_PATHS = re.compile(
    r"/etc/(sudoers\.d|ssl/private|ssh/ssh_host_[^/]*|apt/auth\.conf(\.d)?|wireguard|openvpn|letsencrypt|ppp|cron[^/]*"
    r"|kubernetes|docker|containerd|containers|rancher|NetworkManager/system-connections|hostname|hosts|resolv\.conf|group"
    r"|passwd)(/.*)?"
)
_REPLACED = frozenset(
    f"/etc/{name}" for name in ("passwd", "group", "shadow", "gshadow", "hostname", "hosts", "resolv.conf")
)
"""Files that the base's layer has its own of."""
_CLIENT_FILES = frozenset({"pip.conf", "npmrc", ".npmrc", "gitconfig", "sources.list", "nuget.config", "settings.xml"})
_CREDENTIAL = re.compile(rb"//[^/\s]*@|_auth|token|passw|secret|credential", re.IGNORECASE)
_KEY_SUFFIXES = (".key", ".keytab", ".p12", ".pfx", ".jks")


@dataclass(frozen=True)
class Part:
    """One overlay of a sandbox: where it is mounted, its lowest layer, and the name of its folder in upper layers."""

    mount: str
    lower: Path | None
    name: str


@dataclass(frozen=True)
class Base:
    """What image layers are stacked on. `layer` holds a folder per part: accounts, masks, empty homes."""

    key: str
    parts: tuple[Part, ...]
    layer: Path
    first_process: tuple[str, ...]
    """A command that copies its input until that ends, and ignores SIGCHLD, so that orphans leave no zombies."""


@functools.cache
def load_base(rootfs: Path | None, warden: entry.Warden) -> Base:
    """Find the base's parts and make its layer where it is not cached. Raises StartError."""
    try:
        parts, rows = _host() if rootfs is None else _rootfs(rootfs.absolute())
    except OSError as error:
        raise StartError(f"cannot read the base of sandboxes: {error}", kind="engine", hint="check `rootfs`") from error
    text = json.dumps([_VERSION, warden.mode, os.getuid(), [str(part) for part in parts], rows])
    key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    layer = cache_dir() / "bases" / key
    if not layer.is_dir():
        _make_layer(layer, parts, rows, warden)
    has_gnu_env = (rootfs or Path("/")).joinpath("usr/bin/env").resolve().name == "env"
    first = ("env", "--ignore-signal=CHLD", "cat") if has_gnu_env else ("bash", "-c", "trap '' CHLD; exec cat")
    return Base(key, parts, layer, first)


Row = tuple[str, str, int, int, int, str, int]
"""Kind, path within the layer, mode, user id, group id, content or source or target, time of the source's change."""


def _make_layer(layer: Path, parts: tuple[Part, ...], rows: list[Row], warden: entry.Warden) -> None:
    from tmax.sandbox.images import settle

    if warden.mode not in ("root", "plain"):
        rows = [row for part in parts for row in _owned(part)] + rows
    with settle(layer, warden) as aside:
        if aside is None:
            return
        entries = [
            [kind, str(aside / path), mode, *((0, 0) if warden.mode == "one" else (uid, gid)), content]
            for kind, path, mode, uid, gid, content, _ in rows
        ]
        try:
            entry.call(warden, "apply", {"entries": entries})
        except OSError as error:
            raise StartError(
                f"cannot make the base of sandboxes: {error}", kind="disk", hint="check TMAX_CACHE"
            ) from error


def _row(kind: str, path: str, mode: int = 0o755, content: str = "", *, owner: int = 0) -> Row:
    return kind, path, mode, owner, owner, content, 0


def _host() -> tuple[tuple[Part, ...], list[Row]]:
    parts = [Part("/", None, "root"), Part("/etc", None, "etc")]
    rows = [_row("directory", "root"), _row("directory", "root/etc")]
    for name in _PROGRAMS:
        host = Path("/") / name
        if host.is_symlink():
            rows.append(_row("link", f"root/{name}", content=str(host.readlink())))
        elif host.is_dir():
            parts.append(Part(f"/{name}", host, name))
            rows.append(_row("directory", f"root/{name}"))
    rows += [_row("directory", f"root/{name}") for name in _EMPTY]
    rows += [_row("directory", f"root/{name}", 0o1777) for name in ("tmp", "var/tmp", "run/lock")]
    rows += [_row("link", "root/var/run", content="/run"), _row("link", "root/var/lock", content="/run/lock")]
    for name in _STATE:
        if (Path("/") / name).is_dir():
            parts.append(Part(f"/{name}", Path("/") / name, name.replace("/", "-")))
            rows.append(_row("directory", f"root/{name}"))
    rows += [*_homes("root"), *_copy_of_etc(), *_accounts("etc", Path("/etc")), *_masks()]
    return tuple(parts), rows


def _rootfs(rootfs: Path) -> tuple[tuple[Part, ...], list[Row]]:
    if not (rootfs / "bin").is_dir():
        raise FileNotFoundError(2, "no root file system", str(rootfs))
    rows = [_row("directory", "root"), _row("directory", "root/etc"), *_homes("root")]
    return (Part("/", rootfs, "root"),), [*rows, *_accounts("root/etc", rootfs / "etc")]


def _copy_of_etc() -> Iterator[Row]:
    yield _row("directory", "etc")
    yield _row("file", "etc/resolv.conf", 0o644)
    for path, status in _walk(Path("/etc"), 12):
        mode, public = status.st_mode, _is_public(path, status.st_mode)
        owner = (status.st_uid, status.st_gid) if max(status.st_uid, status.st_gid) < 65_535 else (0, 0)
        if path in _REPLACED:
            continue
        if stat.S_ISDIR(mode):
            yield "directory", path[1:], stat.S_IMODE(mode) if public else 0o700, *owner, "", 0
        elif public and stat.S_ISLNK(mode):
            yield _row("link", path[1:], content=str(Path(path).readlink()))
        elif public:
            yield "copy", path[1:], stat.S_IMODE(mode), *owner, path, status.st_mtime_ns


def _owned(part: Part) -> Iterator[Row]:
    """An ordinary user is not root over the base's files, so inside-root would not be either: his own copies of
    directories, and of the package database, lie over them, and things can be added, replaced and taken away.
    """
    if part.lower is None or part.lower.stat().st_uid == os.getuid():
        return
    walks = [(part.lower, 4), (part.lower / "local", 12)] if part.mount == "/usr" else [(part.lower, 4)]
    for top, depth in walks:
        for path, status in _walk(top, depth):
            place = f"{part.name}/{path.removeprefix(str(part.lower)).lstrip('/')}"
            permissions = stat.S_IMODE(status.st_mode)
            if not _is_public(path, status.st_mode):
                continue
            if stat.S_ISDIR(status.st_mode):
                yield _row("directory", place, permissions)
            elif part.name == "var-lib-dpkg" and place.count("/") == 1 and stat.S_ISREG(status.st_mode):
                yield _row("copy", place, permissions, path)


def _homes(top: str) -> list[Row]:
    return [
        _row("directory", f"{top}/root", 0o700),
        _row("directory", f"{top}/home"),
        _row("directory", f"{top}{AGENT_HOME}", owner=AGENT_UID),
    ]


def _accounts(top: str, etc: Path) -> list[Row]:
    """The base's system accounts, root and agent; nobody has a password."""
    users = [line for line in _lines(etc / "passwd") if _keeps(line)]
    groups = [line for line in _lines(etc / "group") if _keeps(line)]
    names = [line.split(":")[0] for line in users]
    passwd = ["root:x:0:0:root:/root:/bin/bash", f"agent:x:{AGENT_UID}:{AGENT_UID}::{AGENT_HOME}:/bin/bash", *users]
    group = ["root:x:0:", f"agent:x:{AGENT_UID}:", *(":".join([*line.split(":")[:3], ""]) for line in groups)]
    shadow = [f"{name}:*:19000:0:99999:7:::" for name in ("root", "agent", *names)]
    texts = {
        "passwd": (passwd, 0o644), "group": (group, 0o644), "shadow": (shadow, 0o600), "gshadow": ([], 0o600),
        "hostname": (["sandbox"], 0o644), "hosts": (["127.0.0.1 localhost sandbox", "::1 localhost"], 0o644),
    }  # fmt: skip
    return [
        _row("file", f"{top}/{name}", mode, "".join(f"{line}\n" for line in lines))
        for name, (lines, mode) in texts.items()
    ]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.is_file() else []


def _keeps(line: str) -> bool:
    """Keeps system accounts: people of the host are none of the sandbox's business."""
    words = line.split(":")
    return len(words) >= 4 and words[0] not in ("root", "agent") and words[2].isdigit() and (
        0 < int(words[2]) < 1000 or int(words[2]) == 65_534
    )  # fmt: skip


def _masks() -> Iterator[Row]:
    """What of the host's additions to its programs does not exist inside."""
    for top, depth in (("opt", 4), ("usr/local", 4)):
        for path, status in _walk(Path("/") / top, depth):
            if _is_public(path, status.st_mode):
                continue
            if stat.S_ISDIR(status.st_mode):
                yield _row("directory", path[1:], 0o700, "opaque")
            else:
                yield _row("whiteout", path[1:])


def _is_public(path: str, mode: int) -> bool:
    """Whether everybody on the host may know it, and nothing about it looks like a secret."""
    name = path.rpartition("/")[2]
    if name in _SECRET_NAMES or _SECRET_PATHS.fullmatch(path):
        return False
    if stat.S_ISLNK(mode):
        return True
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005
    if not mode & 0o004 or not stat.S_ISREG(mode) or name.endswith(_KEY_SUFFIXES):
        return False
    return not (name in _CLIENT_FILES and _CREDENTIAL.search(_head(path)))


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(65_536)


def _walk(top: Path, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """What is under a directory, by name, without what lies under directories that are not public."""
    try:
        found = sorted(os.scandir(top), key=lambda item: item.name)
    except OSError:
        return
    for item in found:
        try:
            status = item.stat(follow_symlinks=False)
        except OSError:
            continue
        yield item.path, status
        if depth > 1 and stat.S_ISDIR(status.st_mode) and _is_public(item.path, status.st_mode):
            yield from _walk(Path(item.path), depth - 1)
