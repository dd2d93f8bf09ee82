"""A Python with pytest that runs in any image: one self-contained directory, built once, mounted read-only.

The rule: it is mounted at its own path and started through its own dynamic loader, so that neither the image's
libraries nor anything an agent left behind decides what runs; see `command`.
"""

import fcntl
import hashlib
import importlib.util
import os
import py_compile
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from compileall import compile_dir
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tmax.config import cache_dir
from tmax.errors import VerifierError

LAYOUT = "2"
"""Raised when what a bundle holds changes, so that older ones are not taken for it."""

PACKAGES = ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")

OURS = ("frame.py", "prepared.py", "runner.py", "server.py")
"""Modules of this package that run inside; they import the standard library and pytest only."""

_KEPT_DAYS = 30

_LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data",
    "site-packages", "dist-packages", "config-*", "_tkinter*", "_test*", "_ctypes_test*", "_xxtestfuzz*", "*.a",
)  # fmt: skip

_HINT = "remove the `verifier` folder of the cache (TMAX_CACHE) and try again"


def bundle() -> Path:
    """The directory to mount read-only, at the same path, into every sandbox; built on first use (some 10 s, 80 MB).

    Raises VerifierError where it cannot be built, for example for want of disk or of a dynamic loader.
    """
    try:
        final = cache_dir() / "verifier" / _fingerprint()
        if not final.is_dir():
            _build_once(final)
        with suppress(PermissionError):
            os.utime(final)
    except OSError as error:
        raise VerifierError(f"cannot build the verifier's interpreter: {error}", hint=_HINT) from error
    return final


def command(home: Path, module: str, *arguments: str) -> list[str]:
    """The argument vector that runs `main` of `tmax.verifier.<module>` by `home`'s interpreter, started in `home`."""
    start = f"import sys; sys.path.append({str(home / 'site')!r}); from tmax.verifier.{module} import main; main()"
    # No environment, no site packages, no bytecode, always UTF-8.
    return [
        *_loader_command(home),
        str(home / "bin" / "python3"),
        "-I",
        "-S",
        "-B",
        "-X",
        "utf8",
        "-c",
        start,
        *arguments,
    ]


def _loader_command(home: Path) -> list[str]:
    # In a list of directories a colon cannot be escaped; all libraries are loaded before the directory is left.
    libraries = "so" if set(":;") & set(str(home)) else str(home / "so")
    return [str(home / "so" / "ld.so"), "--inhibit-cache", "--library-path", libraries]


@cache
def _fingerprint() -> str:
    """Changes with the interpreter, the standard library, pytest and our runner; a stat of each file, no reading."""
    digest = hashlib.sha256(f"{LAYOUT} {sys.version} {_python()}".encode())
    for name in OURS:
        digest.update((Path(__file__).parent / name).read_bytes())
    for root in (_python(), *_stdlib(), *(_package(name) for name in PACKAGES)):
        for file in sorted(_files(root)):
            stat = file.stat()
            digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:20]


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        skipped = _LEFT_OUT(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in skipped]
        yield from (Path(folder, name) for name in names if name not in skipped)


def _python() -> Path:
    executable = getattr(sys, "_base_executable", None) or sys.executable
    return Path(executable).resolve()


def _stdlib() -> list[Path]:
    """The standard library's directory, and that of its compiled part where it lies elsewhere."""
    pure = Path(sysconfig.get_path("stdlib"))
    compiled = Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}))
    return [pure] if compiled.resolve() == pure.resolve() else [pure, compiled]


def _package(name: str) -> Path:
    """A package's directory, or a module's only file."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise VerifierError(f"the package `{name}` is not installed beside tmax", hint="pip install --upgrade pytest")
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _build_once(final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with _lock(final.parent / ".lock"):
        if final.is_dir():
            return
        _remove_left_overs(final.parent)
        aside = Path(tempfile.mkdtemp(prefix=".build-", dir=final.parent))
        try:
            _fill(aside, final)
            _open_to_everybody(aside)
            _check(aside)
            aside.rename(final)
        except subprocess.SubprocessError as error:
            raise VerifierError(f"cannot build the verifier's interpreter: {error}", hint=_HINT) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _remove_left_overs(folder: Path) -> None:
    """What builders that were killed left, and what nobody has used for long; the lock is held."""
    long_ago = time.time() - _KEPT_DAYS * 86_400
    for entry in folder.iterdir():
        if entry.is_dir() and (entry.name.startswith(".build-") or entry.stat().st_mtime < long_ago):
            shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds off other processes, and other threads of this one: each call opens the file anew."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(home: Path, final: Path) -> None:
    library = home / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in _stdlib():
        shutil.copytree(folder, library, ignore=_LEFT_OUT, dirs_exist_ok=True)
    for name in PACKAGES:
        source = _package(name)
        if source.is_dir():
            shutil.copytree(source, home / "site" / name, ignore=_LEFT_OUT)
        else:
            shutil.copy(source, home / "site" / source.name)
    ours = home / "site" / "tmax" / "verifier"
    ours.mkdir(parents=True)
    for package in (ours.parent, ours):
        (package / "__init__.py").touch()
    for name in OURS:
        shutil.copy(Path(__file__).parent / name, ours / name)
    # An ini file of our own keeps pytest from looking for one.
    (home / "pytest.ini").write_text("[pytest]\npython_files = *.py\n", encoding="utf-8")
    (home / "bin").mkdir()
    (home / "so").mkdir()
    shutil.copy(_python(), home / "bin" / "python3")
    # For tests that start `sys.executable` where the image has no Python.
    start = shlex.join([*_loader_command(final), str(final / "bin" / "python3")])
    (home / "bin" / "python").write_text(f'#!/bin/sh\nexec {start} "$@"\n', encoding="utf-8")
    _copy_libraries(home, library / "lib-dynload")
    # Never checked against a source: the directory is read-only, and a stat of each file costs time.
    for folder in (library, home / "site"):
        compile_dir(folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def _copy_libraries(home: Path, extensions: Path) -> None:
    loader = _loader(home / "bin" / "python3")
    # The loader would load what an agent that was root wrote there; no file can ever lie under this one.
    image = loader.read_bytes().replace(b"/etc/ld.so.preload\0", b"/proc/version/none\0")
    (home / "so" / "ld.so").write_bytes(image)
    files = [home / "bin" / "python3", *sorted(extensions.glob("*.so"))]
    wanted: dict[str, str | None] = {}
    for file in files:
        needed = _needed(loader, file)
        if None in needed.values():
            file.unlink()  # An extension module whose library this machine lacks.
        else:
            wanted |= needed
    for name in ("libgcc_s.so.1",):  # Opened by the C library when a thread is cancelled.
        found = next((Path(path).parent / name for path in wanted.values() if path and "/libc.so" in path), None)
        if found and found.exists():
            wanted[name] = str(found)
    for name, path in wanted.items():
        if path:
            shutil.copy(path, home / "so" / name)


def _loader(program: Path) -> Path:
    """The dynamic loader that an ELF program names in its PT_INTERP segment."""
    image = program.read_bytes()
    if image[:5] != b"\x7fELF\x02" or image[5] != 1:
        raise VerifierError(f"`{_python()}` is no 64-bit little-endian ELF program", hint="use another Python")
    (start,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for offset in range(start, start + size * count, size):
        if struct.unpack_from("<I", image, offset) == (3,):
            (place,) = struct.unpack_from("<Q", image, offset + 8)
            return Path(image[place : image.index(b"\0", place)].decode()).resolve()
    raise VerifierError(f"`{_python()}` is linked statically", hint="use a Python that has a dynamic loader")


def _needed(loader: Path, file: Path) -> dict[str, str | None]:
    """Libraries that a file is linked with, over all steps, by name; None for one that is missing."""
    listed = subprocess.run([loader, "--list", file], capture_output=True, text=True, timeout=60, check=False)
    needed: dict[str, str | None] = {}
    for line in listed.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if arrow:
            needed[Path(name).name] = None if rest.startswith("not found") else rest.rsplit(" (", 1)[0]
    needed.pop(loader.name, None)
    return needed


def _open_to_everybody(home: Path) -> None:
    for folder, _, names in os.walk(home):
        Path(folder).chmod(0o755)
        for name in names:
            file = Path(folder, name)
            file.chmod(0o755 if file.parent.name in ("bin", "so") or ".so" in file.suffixes else 0o644)


def _check(home: Path) -> None:
    """Start what was built and see that it runs, and that nothing outside of it was loaded."""
    probe = command(home, "runner", "--self-test")
    ran = subprocess.run(probe, capture_output=True, text=True, timeout=120, cwd=home, env={}, check=False)
    outside = [line for line in ran.stdout.splitlines() if not line.startswith(str(home))]
    if ran.returncode or outside:
        what = f"it loads {outside[0]}" if outside else ran.stderr.strip()[-500:]
        raise VerifierError(f"the verifier's interpreter does not run by itself: {what}", hint=_HINT)
