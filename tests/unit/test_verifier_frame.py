"""The report's frame: believed whole and sealed, or not at all."""

import random

import pytest

from tmax.verifier import frame

NONCE = bytes(range(32))
PAYLOAD = random.Random("frame").randbytes(20_000)


def text(lines: list[bytes]) -> str:
    return b"".join(lines).decode()


def test_what_was_encoded_is_decoded_from_among_other_output() -> None:
    lines = frame.encode(PAYLOAD, NONCE)
    assert len(lines) == 9  # (32 + 20,006 bytes) * 4/3 = 26,720 characters at 3,000 a line.
    between = b"printed with no end of line".join(lines)
    assert frame.decode("before\n" + between.decode() + "after", NONCE) == PAYLOAD


def test_every_line_fits_into_one_write_to_a_pipe() -> None:
    assert max(map(len, frame.encode(PAYLOAD, NONCE))) < 4096


def test_without_a_frame_there_is_nothing() -> None:
    assert frame.decode("", NONCE) is None
    assert frame.decode("running test_a\n.", NONCE) is None


def test_another_nonce_opens_nothing() -> None:
    lines = text(frame.encode(PAYLOAD, NONCE))
    assert frame.decode(lines, bytes(32)) is None


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_missing_doubled_or_moved_line_spoils_the_frame(at: int) -> None:
    lines = frame.encode(PAYLOAD, NONCE)
    assert frame.decode(text(lines[:at] + lines[at + 1 :]), NONCE) is None
    assert frame.decode(text([*lines, lines[at]]), NONCE) is None
    assert frame.decode(text([*lines[at + 1 :], *lines[: at + 1]]), NONCE) == (PAYLOAD if at == 8 else None)


def test_two_frames_are_refused() -> None:
    assert frame.decode(text(frame.encode(b"one", NONCE) + frame.encode(b"two", NONCE)), NONCE) is None


def test_a_changed_frame_never_says_something_else() -> None:
    (line,) = frame.encode(b'{"passed": 0.0}', NONCE)
    for at in range(line.rindex(b" ") + 1, len(line) - 1):
        for other in b"AQgw/":
            changed = line[:at] + bytes([other]) + line[at + 1 :]
            assert frame.decode(changed.decode(), NONCE) in (None, b'{"passed": 0.0}')
    broken_seal = line.replace(line.split(b" ")[3][:4], b"AAAA")
    assert frame.decode(broken_seal.decode(), NONCE) is None


def test_output_beside_the_frame_is_kept_for_people() -> None:
    printed = "running test_a\n" + text(frame.encode(b"x", NONCE)) + "Segmentation fault\n"
    assert frame.without_frame(printed, NONCE).split() == ["running", "test_a", "Segmentation", "fault"]


def test_a_payload_that_is_too_large_is_refused_not_cut() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        frame.encode(random.Random("large").randbytes(400_000), NONCE)
