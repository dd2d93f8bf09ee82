"""The bottom of every bubblewrap sandbox: the host's own userland, or a directory with a root file system.

The rule: only programs and their data come from the host. Homes, mounts, state and secrets do not; whatever an
ordinary user of the host may not read does not exist inside, for inside-root either.
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
from typing import Any

from tmax.config import cache_dir
from tmax.errors import StartError
from tmax.sandbox import entry
from tmax.sandbox.protocol import AGENT_HOME, AGENT_UID

_VERSION = 3
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "etc", "opt")
_EMPTY = ("boot", "home", "media", "mnt", "proc", "dev", "run", "srv", "sys", "var", "var/cache", "var/lib", "var/log",
          "var/mail", "var/opt", "var/spool")  # fmt: skip
_STATE = ("var/lib/dpkg",)
_OWNED_DEPTH = {"/etc": 12, "/var/lib/dpkg": 1}
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
        if rootfs is None:
            parts, entries = _host_parts()
        else:
            parts, entries = _rootfs_parts(rootfs.absolute())
    except OSError as error:
        raise StartError(f"cannot read the base of sandboxes: {error}", kind="engine", hint="check `rootfs`") from error
    text = json.dumps([_VERSION, warden.mode, os.getuid(), [str(part) for part in parts], entries], sort_keys=True)
    key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    layer = cache_dir() / "bases" / key
    if not layer.is_dir():
        _make_layer(layer, parts, entries, warden)
    has_gnu_env = (rootfs or Path("/")).joinpath("usr/bin/env").resolve().name == "env"
    first = ("env", "--ignore-signal=CHLD", "cat") if has_gnu_env else ("bash", "-c", "trap '' CHLD; exec cat")
    return Base(key, parts, layer, first)


Entry = tuple[str, str, int, int, int, str]
"""Kind, path within the layer, mode, user id, group id, content."""


def _make_layer(layer: Path, parts: tuple[Part, ...], entries: list[Entry], warden: entry.Warden) -> None:
    from tmax.sandbox.images import settle

    with settle(layer, warden) as aside:
        if aside is None:
            return
        rows: list[Any] = []
        owned = (
            []
            if warden.mode in ("root", "plain")
            else [entry for part in parts if part.lower for entry in _owned(part)]
        )
        for kind, path, mode, uid, gid, content in owned + entries:
            owner = (uid, gid) if warden.mode != "one" else (0, 0)
            rows.append([kind, str(aside / path), mode, *owner, content])
        try:
            entry.call(warden, "apply", {"entries": rows})
        except OSError as error:
            raise StartError(
                f"cannot make the base of sandboxes: {error}", kind="disk", hint="check TMAX_CACHE"
            ) from error


def _host_parts() -> tuple[tuple[Part, ...], list[Entry]]:
    parts = [Part("/", None, "root")]
    entries: list[Entry] = [("directory", "root", 0o755, 0, 0, "")]
    for name in _PROGRAMS:
        host = Path("/") / name
        if host.is_symlink():
            entries.append(("link", f"root/{name}", 0, 0, 0, str(host.readlink())))
        elif host.is_dir():
            parts.append(Part(f"/{name}", host, name))
            entries.append(("directory", f"root/{name}", 0o755, 0, 0, ""))
    entries += [("directory", f"root/{name}", 0o755, 0, 0, "") for name in _EMPTY]
    entries += [("directory", f"root/{name}", 0o1777, 0, 0, "") for name in ("tmp", "var/tmp")]
    for name in _STATE:
        if (Path("/") / name).is_dir():
            parts.append(Part(f"/{name}", Path("/") / name, name.replace("/", "-")))
            entries.append(("directory", f"root/{name}", 0o755, 0, 0, ""))
    entries += [("link", "root/var/run", 0, 0, 0, "/run"), ("link", "root/var/lock", 0, 0, 0, "/run/lock")]
    entries += [("directory", "root/run/lock", 0o1777, 0, 0, "")]
    entries += _homes("root")
    entries += _accounts("etc", Path("/etc"))
    entries += _masks()
    return tuple(parts), entries


def _owned(part: Part) -> Iterator[Entry]:
    """An ordinary user is not root over the base's files, so inside-root would not be either: his own copies of
    directories, and of the files of /etc and of the package database, lie over them and can be changed.
    """
    if part.lower is None or part.lower.stat().st_uid == os.getuid():
        return
    for path, mode in _walk(part.lower, _OWNED_DEPTH.get(part.mount, 4)):
        place = f"{part.name}/{path.removeprefix(str(part.lower)).lstrip('/')}"
        permissions = stat.S_IMODE(mode)
        if stat.S_ISDIR(mode) and _is_public(path, mode):
            yield "directory", place, permissions, 0, 0, ""
        elif stat.S_ISREG(mode) and mode & 0o004 and not _is_secret(path) and part.mount in ("/etc", "/var/lib/dpkg"):
            yield "copy", place, permissions, 0, 0, path
    if part.mount == "/usr":
        yield from (
            ("directory", path[1:], stat.S_IMODE(mode), 0, 0, "")
            for path, mode in _walk(part.lower / "local", 12) if stat.S_ISDIR(mode) and _is_public(path, mode)
        )  # fmt: skip


def _rootfs_parts(rootfs: Path) -> tuple[tuple[Part, ...], list[Entry]]:
    if not (rootfs / "bin").is_dir():
        raise FileNotFoundError(2, "no root file system", str(rootfs))
    entries: list[Entry] = [("directory", "root", 0o755, 0, 0, ""), ("directory", "root/etc", 0o755, 0, 0, "")]
    entries += _homes("root")
    entries += _accounts("root/etc", rootfs / "etc")
    return (Part("/", rootfs, "root"),), entries


def _homes(top: str) -> list[Entry]:
    return [
        ("directory", f"{top}/root", 0o700, 0, 0, ""),
        ("directory", f"{top}/home", 0o755, 0, 0, ""),
        ("directory", f"{top}{AGENT_HOME}", 0o755, AGENT_UID, AGENT_UID, ""),
    ]


def _accounts(top: str, etc: Path) -> list[Entry]:
    """The base's system accounts, root and agent; nobody has a password."""
    users = [line for line in _lines(etc / "passwd") if _keeps(line)]
    groups = [line for line in _lines(etc / "group") if _keeps(line)]
    names = [line.split(":")[0] for line in users]
    passwd = ["root:x:0:0:root:/root:/bin/bash", f"agent:x:{AGENT_UID}:{AGENT_UID}::{AGENT_HOME}:/bin/bash", *users]
    group = ["root:x:0:", f"agent:x:{AGENT_UID}:"]
    group += [":".join([*line.split(":")[:3], ""]) for line in groups]
    shadow = [f"{name}:*:19000:0:99999:7:::" for name in ("root", "agent", *names)]
    texts = {
        "passwd": (passwd, 0o644), "group": (group, 0o644), "shadow": (shadow, 0o600), "gshadow": ([], 0o600),
        "hostname": (["sandbox"], 0o644), "hosts": (["127.0.0.1 localhost sandbox", "::1 localhost"], 0o644),
    }  # fmt: skip
    return [
        ("file", f"{top}/{name}", mode, 0, 0, "".join(f"{line}\n" for line in lines))
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


def _masks() -> list[Entry]:
    """What of the host's configuration does not exist inside."""
    entries: list[Entry] = [("directory", "etc", 0o755, 0, 0, ""), ("file", "etc/resolv.conf", 0o644, 0, 0, "")]
    for top, depth in (("etc", 12), ("opt", 4), ("usr/local", 4)):
        for path, mode in _walk(Path("/") / top, depth):
            if path in _REPLACED or (not _is_secret(path) and _is_public(path, mode)):
                continue
            if stat.S_ISDIR(mode):
                entries.append(("directory", path[1:], 0o700, 0, 0, "opaque"))
            else:
                entries.append(("whiteout", path[1:], 0, 0, 0, ""))
    return entries


def _is_secret(path: str) -> bool:
    return path.rpartition("/")[2] in _SECRET_NAMES or _SECRET_PATHS.fullmatch(path) is not None


def _is_public(path: str, mode: int) -> bool:
    name = path.rpartition("/")[2]
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


def _walk(top: Path, depth: int) -> Iterator[tuple[str, int]]:
    """Paths under a directory and their modes, without what lies under one that is masked, by name."""
    try:
        found = sorted(os.scandir(top), key=lambda item: item.name)
    except OSError:
        return
    for item in found:
        try:
            mode = item.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        yield item.path, mode
        if depth > 1 and stat.S_ISDIR(mode) and _is_public(item.path, mode) and not _is_secret(item.path):
            yield from _walk(Path(item.path), depth - 1)
