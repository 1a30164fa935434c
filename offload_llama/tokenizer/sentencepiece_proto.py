"""A SentencePiece model file written from a list of pieces, as GGUF files carry them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum


class PieceType(IntEnum):
    """What a piece is; GGUF's `tokenizer.ggml.token_type` uses the same numbers.

    Source: `SentencePiece.Type` in sentencepiece_model.proto.
    """

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BPE_MODEL = 2  # TrainerSpec.ModelType.BPE


def model_proto(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    byte_fallback: bool,
) -> bytes:
    """Return a serialized `ModelProto` of kind BPE, ready for `SentencePieceProcessor`.

    Source: sentencepiece_model.proto: ModelProto {1 pieces, 2 trainer_spec, 3 normalizer_spec},
    SentencePiece {1 piece, 2 score, 3 type}, TrainerSpec {3 model_type, 35 byte_fallback},
    NormalizerSpec {1 name, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces}.
    """
    out = bytearray()
    for piece, score, kind in zip(pieces, scores, types, strict=True):
        text = piece.encode("utf-8")
        body = b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", score)
        out += _message(1, body + _number(3, kind))
    trainer = _number(3, _BPE_MODEL) + _number(35, int(byte_fallback))
    normalizer = (
        _message(1, b"identity")
        + _number(3, int(add_dummy_prefix))
        + _number(4, int(remove_extra_whitespaces))
        + _number(5, 1)
    )
    return bytes(out + _message(2, trainer) + _message(3, normalizer))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body
