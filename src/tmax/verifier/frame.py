"""The report's way out of a sandbox: text lines that only who knows the nonce can have written.

The rule: every line is short enough for a pipe to take it in one piece, so that whatever else is written to the
same pipe falls between lines and never into one.
"""

import base64
import hashlib
import hmac
import zlib

CHUNK = 3000
"""Characters of a line's payload; with its head well under the 4,096 bytes that a pipe takes in one piece."""

SIZE_LIMIT = 400_000
"""Characters of a whole frame; a reader that keeps the last 500,000 of a stream keeps all of it."""


def encode(payload: bytes, nonce: bytes) -> list[bytes]:
    """The lines to write, one `write` each. Raises ValueError where the frame would pass SIZE_LIMIT."""
    seal = hmac.digest(nonce, payload, hashlib.sha256)
    text = base64.b64encode(seal + zlib.compress(payload, 6)).decode()
    if len(text) > SIZE_LIMIT:
        raise ValueError("the payload does not fit into a frame")
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    tag = _tag(nonce)
    # A line starts with a line feed, for another writer may have left one open.
    return [f"\n{tag} {index} {len(chunks)} {chunk}\n".encode() for index, chunk in enumerate(chunks)]


def decode(text: str, nonce: bytes) -> bytes | None:
    """The payload of the one frame in `text`, or None where there is none, more than one, or a forged one."""
    tag = _tag(nonce)
    lines = [line.split(" ") for line in text.split("\n") if line.startswith(tag)]
    count = len(lines)
    if not count or any(line[1:3] != [str(at), str(count)] or len(line) != 4 for at, line in enumerate(lines)):
        return None
    try:
        body = base64.b64decode("".join(line[3] for line in lines), validate=True)
        unpack = zlib.decompressobj()
        payload = unpack.decompress(body[32:], 100_000_000)
    except (ValueError, zlib.error):
        return None
    return payload if hmac.compare_digest(body[:32], hmac.digest(nonce, payload, hashlib.sha256)) else None


def without_frame(text: str, nonce: bytes) -> str:
    """The rest of `text`: what was printed beside the frame."""
    tag = _tag(nonce)
    return "\n".join(line for line in text.split("\n") if not line.startswith(tag))


def _tag(nonce: bytes) -> str:
    return "tmax-report-" + hmac.digest(nonce, b"tag", hashlib.sha256).hex()[:16]
