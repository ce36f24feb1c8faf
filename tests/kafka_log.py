"""Breaking what a broker has on disk."""

import struct
from pathlib import Path

from crc32c import crc32c


def spoil(segment: Path, offset: int, *, codec: int | None = None) -> None:
    """Break the batch that begins at `offset` in a log segment: its last byte, or give it an unknown codec."""
    log = bytearray(segment.read_bytes())
    at = 0
    while struct.unpack_from(">q", log, at)[0] != offset:
        at += 12 + struct.unpack_from(">i", log, at + 8)[0]
    end = at + 12 + struct.unpack_from(">i", log, at + 8)[0]
    if codec is None:
        log[end - 1] ^= 0xFF
    else:
        log[at + 22] |= codec
        struct.pack_into(">I", log, at + 17, crc32c(bytes(log[at + 21 : end])))
    segment.write_bytes(log)
