"""The printable stand-ins that byte-level vocabularies write their 256 bytes in."""

from __future__ import annotations

from collections.abc import Mapping


def _stand_ins() -> dict[int, str]:
    """Return the character that stands for each byte.

    Source: GPT-2's vocabulary: the visible characters of Latin-1 stand for themselves, the other
    bytes take the code points from 256 upwards, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible}
    table.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return table


CHAR_OF_BYTE: Mapping[int, str] = _stand_ins()
BYTE_OF_CHAR: Mapping[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def piece_bytes(piece: str) -> bytes:
    """Return the bytes a piece stands for; one with foreign characters stands for its UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def spell_bytes(data: bytes) -> str:
    """Return how a byte-level vocabulary writes `data`."""
    return "".join([CHAR_OF_BYTE[byte] for byte in data])
