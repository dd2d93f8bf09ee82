"""What the warden does with files: in a sandbox's mount namespace, where no link leads out of it.

The rule: standard library only; nothing planted in the way is followed or opened as anything but a regular file.
"""
# Paths are bytes relative to open directories, and pathlib would double the start-up time.
# ruff: noqa: PTH102, PTH103, PTH106

import errno
import os
import stat
from dataclasses import dataclass
from typing import Any

from tmax.sandbox import warden_kernel

Fields = dict[str, Any]


@dataclass(frozen=True)
class Opened:
    """A descriptor for whoever asked."""

    fd: int


@dataclass(frozen=True)
class Look:
    """Owner and permissions of what is made; None keeps the source's permissions."""

    uid: int
    gid: int
    mode: int | None
    directory_mode: int | None = None


def get(fields: Fields, fds: list[int]) -> Opened:
    """Open a regular file at `path`. Raises OSError for anything else."""
    fd = os.open(os.fsencode(fields["path"]), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENOENT, "not a regular file", fields["path"])
    return Opened(fd)


def put(fields: Fields, fds: list[int]) -> None:
    """Copy what is open on `fds[0]` to `path`."""
    parent, name = os.path.split(os.fsencode(fields["path"]))
    make_parents(parent)
    where = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy(fds[0], name, where, Look(fields["uid"], fields["gid"], fields["mode"], fields["directory_mode"]))
    finally:
        os.close(where)


def make_state(fields: Fields, fds: list[int]) -> bool:
    """Make a sandbox's own directory and `folders` in it; in memory, with a bound of `size_mb`, where that can hold the
    upper layer of an overlay. True if it is in memory."""
    path: str = fields["path"]
    os.makedirs(path, mode=0o700, exist_ok=True)
    in_memory = False
    if fields["size_mb"]:
        try:
            options = f"size={fields['size_mb']}m,mode=700"
            warden_kernel.mount("tmpfs", path, "tmpfs", flags=warden_kernel.MS_NODEV, options=options)
            in_memory = True
            # Overlays keep notes in such attributes, which older kernels do not hold in memory.
            os.setxattr(path, "user.tmax", b"")
        except OSError:
            if in_memory:
                warden_kernel.unmount(path)
            in_memory = False
    where = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name, mode in fields["folders"]:
        os.mkdir(name, dir_fd=where)
        os.chmod(name, mode, dir_fd=where)
    os.close(where)
    return in_memory


def discard(fields: Fields, fds: list[int]) -> bool:
    """Remove a sandbox's own directory if it is in memory, or empty; whether it is gone."""
    path: str = fields["path"]
    warden_kernel.unmount(path)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def make_parents(path: bytes) -> None:
    """Make a directory and its parents, as root, where they are missing."""
    parts = path.rstrip(b"/").split(b"/")
    for count in range(2, len(parts) + 1):
        try:
            os.mkdir(b"/".join(parts[:count]), 0o755)
        except FileExistsError:
            continue


def copy(source: int, name: bytes, where: int, look: Look) -> None:
    """Copy what `source` is open on to `name` in the directory `where`.

    An existing directory is merged into, anything else is replaced; no link is followed.
    """
    kind = os.fstat(source).st_mode
    if stat.S_ISREG(kind):
        made = make_file(name, where)
        while os.sendfile(made, source, None, 1 << 30):
            pass
        finish(made, look, look.mode, kind)
    elif stat.S_ISDIR(kind):
        made = _make_directory(name, where)
        with os.scandir(source) as entries:
            found = sorted(os.fsencode(entry.name) for entry in entries)
        for child in found:
            _copy_child(source, child, made, look)
        finish(made, look, look.directory_mode, kind)
    else:
        raise OSError(errno.EINVAL, "neither a file nor a directory", os.fsdecode(name))


def make_file(name: bytes, where: int) -> int:
    """A new empty file, open for writing."""
    unlink(name, where)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=where)


def make_link(name: bytes, where: int, target: bytes, look: Look) -> None:
    """A new symbolic link."""
    unlink(name, where)
    os.symlink(target, name, dir_fd=where)
    os.chown(name, look.uid, look.gid, dir_fd=where, follow_symlinks=False)


def finish(made: int, look: Look, mode: int | None, kind: int) -> None:
    """Give what is open its owner and permissions, and close it."""
    os.fchown(made, look.uid, look.gid)
    os.fchmod(made, stat.S_IMODE(kind) if mode is None else mode)
    os.close(made)


def unlink(name: bytes, where: int) -> None:
    """Remove what is not a directory, if there is any. Raises OSError for a directory."""
    try:
        os.unlink(name, dir_fd=where)
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise OSError(errno.EISDIR, "a directory is in the way", os.fsdecode(name)) from error


def _copy_child(source: int, name: bytes, made: int, look: Look) -> None:
    try:
        target = os.readlink(name, dir_fd=source)
    except OSError:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        try:
            copy(fd, name, made, look)
        finally:
            os.close(fd)
        return
    make_link(name, made, target, look)


def _make_directory(name: bytes, where: int) -> int:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=where, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=where)
            os.mkdir(name, 0o755, dir_fd=where)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=where)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=where)
