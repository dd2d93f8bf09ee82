"""How the warden writes the layers of images and of the base without running a program.

The rule: standard library only; an image's paths are resolved inside the image, with its own overlays for a root.
"""
# Paths are bytes relative to open directories, and pathlib would double the start-up time.
# ruff: noqa: PTH101, PTH103, PTH112, PTH116, PTH120, PTH211

import errno
import os
import stat
from typing import Any

from tmax.sandbox import warden_kernel
from tmax.sandbox.warden_files import Look, copy, finish, make_file, make_link, make_parents

Fields = dict[str, Any]


def apply(fields: Fields, fds: list[int]) -> None:
    """Make entries (kind, path, mode, uid, gid, content or source or target) at paths of the host."""
    os.umask(0o022)
    for kind, path, mode, uid, gid, content in fields["entries"]:
        name = os.fsencode(path)
        os.makedirs(name if kind == "directory" else os.path.dirname(name), exist_ok=True)
        if kind == "link":
            os.symlink(content, name)
            continue
        if kind == "whiteout":
            # How an overlay notes that a lower layer's file is not there.
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0))
            continue
        if kind == "file":
            _write(name, content)
        elif kind == "copy":
            with open(content, "rb") as source, open(name, "wb") as target:
                while data := source.read(1 << 20):
                    target.write(data)
        elif content == "opaque":
            os.setxattr(name, "user.overlay.opaque", b"y")
        os.chown(name, uid, gid)
        os.chmod(name, mode)


def write(fields: Fields, fds: list[int]) -> None:
    """Mount `overlays` in a mount namespace of its own, make them the root and take `steps` there.

    Sources are relative to the directory `context`. An OSError about the overlays has the filename `overlay`.
    """
    context = os.open(os.fsencode(fields["context"]), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    warden_kernel.unshare(warden_kernel.CLONE_NEWNS)
    try:
        for overlay in fields["overlays"]:
            _mount(overlay, fields["scratch"] + overlay["mount"])
    except OSError as error:
        raise OSError(error.errno, error.strerror, "overlay") from error
    os.chroot(os.fsencode(fields["scratch"]))
    os.chdir("/")
    os.umask(0o022)
    for step in fields["steps"]:
        if step["kind"] == "directory":
            _directory(step)
        elif step["kind"] == "file":
            _file(step, context)
        else:
            _own(step)


def _mount(overlay: Fields, where: str) -> None:
    os.makedirs(os.fsencode(where), exist_ok=True)
    lower = ":".join(_escaped(path) for path in reversed(overlay["lowers"]))
    upper, work = _escaped(overlay["upper"]), _escaped(overlay["work"])
    options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
    warden_kernel.mount("overlay", where, "overlay", options=options)


def _escaped(path: str) -> str:
    return "".join(f"\\{char}" if char in "\\:," else char for char in path)


def _directory(step: Fields) -> None:
    path = os.fsencode(step["path"])
    if os.path.isdir(path):
        return
    os.makedirs(path, exist_ok=True)
    os.chown(path, *_owner(step["owner"]))
    os.chmod(path, step["mode"])


def _file(step: Fields, context: int) -> None:
    path = os.fsencode(step["path"])
    if step["name"] is not None and (path.endswith(b"/") or os.path.isdir(path)):
        path = path.rstrip(b"/") + b"/" + os.fsencode(step["name"])
    parent, name = os.path.split(path)
    make_parents(parent)
    where = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    look = Look(*_owner(step["owner"]), step["mode"])
    if step["link"] is not None:
        make_link(name, where, os.fsencode(step["link"]), look)
    elif step["source"] is None:
        made = make_file(name, where)
        _write(os.dup(made), step["content"])
        finish(made, look, step["mode"], 0o644)
    else:
        source = os.open(os.fsencode(step["source"]), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=context)
        copy(source, name, where, look)
        os.close(source)
    os.close(where)


def _write(file: bytes | int, content: str) -> None:
    with open(file, "wb") as target:
        target.write(content.encode("utf-8", "surrogateescape"))


def _own(step: Fields) -> None:
    """Give a directory to a user, with all that is in it unless `shallow`."""
    uid, gid = _owner(step["owner"])
    top = os.fsencode(step["path"])
    os.chown(top, uid, gid)
    if step["shallow"] or not stat.S_ISDIR(os.stat(top).st_mode):
        return
    for _, folders, files, where in os.fwalk(top):
        for name in folders + files:
            os.chown(name, uid, gid, dir_fd=where, follow_symlinks=False)


def _owner(owner: str) -> tuple[int, int]:
    """`user[:group]`, names or numbers, as the accounts of this root have them."""
    user, _, group = owner.partition(":")
    uid, gid = _account("/etc/passwd", user)
    return uid, _account("/etc/group", group)[0] if group else gid


def _account(file: str, name: str) -> tuple[int, int]:
    is_user = file.endswith("passwd")
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as lines:
            rows = [line.rstrip("\n").split(":") for line in lines]
    except FileNotFoundError:
        rows = []
    for row in rows:
        if len(row) > 3 and name in (row[0], row[2]):
            return int(row[2]), int(row[3]) if is_user else 0
    if not name.isdigit():
        raise OSError(errno.ENOENT, "unknown user or group", name)
    return int(name), int(name) if is_user else 0
