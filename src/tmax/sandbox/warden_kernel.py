"""System calls that Python has no function for, as the warden needs them.

The rule: standard library only, since the warden loads nothing else.
"""

import array
import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 0x4, 0x1000, 0x4000, 0x80000

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_MNT_DETACH, _AT_FDCWD, _SYS_MOUNT_SETATTR, _MOUNT_ATTR_RDONLY = 2, -100, 442, 1
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64

KEPT_CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces. Raises OSError, as all functions here do."""
    _check(_LIBC.unshare(namespaces))


def setns(fd: int, namespaces: int) -> None:
    """Move this process into namespaces of a process (pidfd) or into one that is open."""
    _check(_LIBC.setns(fd, namespaces))


def mount(source: str, target: str, kind: str, *, flags: int = 0, options: str = "") -> None:
    """Mount a file system, or change what is mounted."""
    texts = [os.fsencode(text) for text in (source, target, kind, options)]
    _check(_LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def unmount(target: str) -> bool:
    """Take away what is mounted at a path, as soon as it is not used; False where nothing is."""
    return int(_LIBC.umount2(os.fsencode(target), _MNT_DETACH)) == 0


def make_read_only(target: str) -> bool:
    """Make the mount at a path read-only; False where the kernel is too old."""
    attributes = array.array("Q", [_MOUNT_ATTR_RDONLY, 0, 0, 0])
    address = ctypes.c_void_p(attributes.buffer_info()[0])
    path = os.fsencode(target)
    return int(_LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, 0, address, ctypes.c_size_t(32))) == 0


def hide() -> None:
    """Keep others of the same user from reading and tracing this process, and its /proc entries from being its own."""
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def limit_privileges(capabilities: int) -> None:
    """Give up all capabilities but these (a bit each), for good: no program that is executed gains any."""
    for number in range(_CAPABILITIES):
        if not capabilities >> number & 1:
            # Fails for numbers that the kernel does not know.
            _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = array.array("I", [_CAPABILITY_VERSION, 0])
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    data = array.array("I", [low, low, 0, high, high, 0])
    _check(_LIBC.capset(ctypes.c_void_p(header.buffer_info()[0]), ctypes.c_void_p(data.buffer_info()[0])))
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
