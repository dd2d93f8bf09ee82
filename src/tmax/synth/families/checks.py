"""Sources of single final tests; the rule: tolerant where a reader of the instruction would be, strict elsewhere.

Each function gives one pytest function that relies on the frame in `manifest` (`read_lines`, `digest`, the imports).
"""

from collections.abc import Mapping, Sequence

from tmax.synth.families.manifest import literal, sha256
from tmax.task import FileSpec


def holds_lines(name: str, lines: Sequence[str], label: str = "text") -> str:
    """`name` holds exactly these lines; a missing last newline and blanks at line ends are forgiven."""
    return f"""
def test_{label}_is_right():
    assert read_lines({name!r}) == {literal(list(lines))}
"""


def holds_number(name: str, number: int) -> str:
    """`name` holds this number and nothing else; blanks around it are forgiven."""
    return f"""
def test_{name_of(name)}_holds_one_number():
    assert re.fullmatch(r"\\d+", "\\n".join(read_lines({name!r})).strip())


def test_number_is_right():
    assert int("\\n".join(read_lines({name!r})).strip()) == {number}
"""


def is_plain_file(*names: str) -> str:
    """Each name is a regular file, not a link."""
    return f"""
def test_new_files_are_plain_files():
    for name in {literal(list(names))}:
        assert os.path.isfile(name) and not os.path.islink(name), name
"""


def is_directory(name: str) -> str:
    """`name` is a real directory that its owner can use."""
    return f"""
def test_directory_is_there():
    assert os.path.isdir({name!r}) and not os.path.islink({name!r})


def test_directory_can_be_used():
    assert os.stat({name!r}).st_mode & 0o700 == 0o700
"""


def same_bytes(files: Mapping[str, FileSpec], label: str = "content") -> str:
    """Each name holds the given file's bytes and is a plain file."""
    return f"""
def test_{label}_is_right():
    wanted = {literal({name: sha256(file) for name, file in files.items()})}
    for name, value in wanted.items():
        assert os.path.isfile(name) and not os.path.islink(name), f"there is no file {{name}}"
        assert digest(name) == value, name
"""


def is_gone(*names: str, label: str = "old_names") -> str:
    """None of the names exists any more."""
    return f"""
def test_{label}_are_gone():
    for name in {literal(list(names))}:
        assert not os.path.lexists(name), f"{{name}} is still there"
"""


def no_copy_left(files: Mapping[str, FileSpec]) -> str:
    """Nothing under the directory holds the bytes of the given files: deleted, not renamed."""
    return f"""
def test_content_was_not_kept_elsewhere():
    deleted = {literal([sha256(file) for file in files.values()])}
    for path in Path(".").rglob("*"):
        assert not path.is_file() or digest(path) not in deleted, path
"""


def is_executable(*names: str) -> str:
    """The owner may run each name."""
    return f"""
def test_it_can_be_run():
    for name in {literal(list(names))}:
        assert os.stat(name).st_mode & 0o100, name
"""


def not_same_file(first: str, second: str) -> str:
    """Two names for two files: no link of any kind."""
    return f"""
def test_copy_stands_by_itself():
    assert not os.path.samefile({first!r}, {second!r})
"""


def directory_holds(name: str, entries: Sequence[str]) -> str:
    """The directory holds exactly these entries."""
    return f"""
def test_directory_holds_what_it_should():
    assert sorted(os.listdir({name!r})) == {literal(sorted(entries))}
"""


def name_of(path: str) -> str:
    """A path as part of a test's name."""
    return "".join(sign if sign.isalnum() else "_" for sign in path)
