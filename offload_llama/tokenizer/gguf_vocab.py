"""The vocabulary inside a GGUF file: byte-level BPE (`gpt2`) or SentencePiece (`llama`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.byte_alphabet import piece_bytes
from offload_llama.tokenizer.gguf_pretokenizers import PreTokenizer, pre_tokenizer
from offload_llama.tokenizer.sentencepiece_model import SentencePieceCodec
from offload_llama.tokenizer.sentencepiece_proto import PieceType, model_proto
from offload_llama.tokenizer.vocabulary import END_SPELLINGS, AddedToken, Codec, Vocabulary

_CONTROL = (PieceType.CONTROL, PieceType.UNKNOWN)
_N_BYTE_PIECES = 256
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Older converters stored chat markers as ordinary user-defined tokens, which a user could forge.
_LOOKS_CONTROL = re.compile(r"<\|[^|<>]+\|>")


class ByteLevelCodec:
    """A `Codec` over byte-level pieces and the merges that build them.

    Raises:
        TokenizerError: the merges do not fit the pieces.
    """

    drops_first_space = False

    def __init__(
        self,
        pieces: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        pre: PreTokenizer,
        *,
        source: str,
    ) -> None:
        self._pieces = pieces
        self._types = types
        self.n_ids = len(pieces)
        others = {pieces[i] for i in _not_normal(types)}
        # Only normal pieces go in, so that no text can ever merge into a control token.
        self._ids = {piece: i for i, piece in enumerate(pieces) if piece not in others}
        try:
            pairs = [
                (left, right)
                for left, right in [merge.split(" ") for merge in merges]
                if left + right not in others
            ]
            model = models.BPE(self._ids, pairs, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the package raises its plain base class
            raise TokenizerError(f"{source}: the merges do not fit the tokens: {error}") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        splits: list[Any] = [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_alphabet])

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of plain text.

        A byte that the vocabulary has no piece for is left out, as in the programs the model was
        trained with: SmolLM2's lacks a few bytes that only unassigned characters begin with.
        """
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a normal piece stands for; the unused stand for nothing."""
        if self._types[token_id] != PieceType.NORMAL:
            return b""
        return piece_bytes(self._pieces[token_id])

    def token(self, token_id: int) -> str:
        """Return the piece as the file spells it."""
        return self._pieces[token_id]

    def find(self, piece: str) -> int | None:
        """Return the id of a normal piece, if there is one."""
        return self._ids.get(piece)


def gguf_vocabulary(
    metadata: Mapping[str, Any], *, source: str, model_stop_ids: Sequence[int] = ()
) -> Vocabulary:
    """Return the tokenizer described by a GGUF file's metadata.

    Args:
        metadata: the file's keys and values, arrays as sequences.
        source: what to call the file in an error.

    Raises:
        TokenizerError: there is no vocabulary, it is of an unknown kind or damaged, or its
            pre-tokenizer is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    pieces: list[str] = list(metadata.get("tokenizer.ggml.tokens", ()))
    if kind is None or not pieces:
        raise TokenizerError(f"{source} holds no vocabulary (tokenizer.ggml.tokens)")
    ids = {name: _token_id(metadata, name, pieces, source) for name in ("bos", "eos", "eot", "eom")}
    for name, spelling in (("bos", "<s>"), ("eos", "</s>")):
        if kind == "llama" and ids[name] is None and spelling in pieces:
            ids[name] = pieces.index(spelling)
    special = {i for i in ids.values() if i is not None}
    types = _types(metadata, pieces, special, source)
    codec, adds_bos = _codec(str(kind), metadata, pieces, types, source)
    # SentencePiece itself matches the user-defined pieces of its model.
    whole = _CONTROL if kind == "llama" else (*_CONTROL, PieceType.USER_DEFINED)
    added = [
        AddedToken(content=pieces[i], token_id=i, control=types[i] != PieceType.USER_DEFINED)
        for i in _not_normal(types)
        if pieces[i] and types[i] in whole
    ]
    return Vocabulary(
        codec,
        added=added,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        chat_template=metadata.get("tokenizer.chat_template"),
        stop_ids=[i for name, i in ids.items() if name != "bos" and i is not None],
        model_stop_ids=model_stop_ids,
    )


def _codec(
    kind: str, metadata: Mapping[str, Any], pieces: list[str], types: list[int], source: str
) -> tuple[Codec, bool]:
    """Return the codec, and whether a begin token goes in front unless the file says otherwise."""
    if kind == "gpt2":
        pre = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")), source=source)
        merges = list(metadata.get("tokenizer.ggml.merges", ()))
        return ByteLevelCodec(pieces, types, merges, pre, source=source), pre.adds_bos
    if kind == "llama":
        return _sentencepiece_codec(metadata, pieces, types, source), True
    raise TokenizerError(
        f"{source} has a vocabulary of kind {kind!r}, which is not supported; supported are "
        "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
    )


def _sentencepiece_codec(
    metadata: Mapping[str, Any], pieces: list[str], types: list[int], source: str
) -> SentencePieceCodec:
    """Return SentencePiece itself, fed with a model file written from the GGUF's lists."""
    scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
    n_bytes = types.count(PieceType.BYTE)
    if len(scores) != len(pieces):
        raise TokenizerError(f"{source} has {len(pieces)} tokens but {len(scores)} scores")
    if n_bytes not in (0, _N_BYTE_PIECES):
        raise TokenizerError(f"{source} has {n_bytes} of the {_N_BYTE_PIECES} byte tokens")
    unknown_id = _token_id(metadata, "unknown", pieces, source) or 0
    names, kinds = _distinct(pieces, types, unknown_id)
    model = model_proto(
        names,
        scores,
        kinds,
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(
            metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
        ),
        byte_fallback=n_bytes > 0,
    )
    return SentencePieceCodec(model, source=source)


def _distinct(pieces: list[str], types: list[int], unknown_id: int) -> tuple[list[str], list[int]]:
    """Return pieces and types that SentencePiece takes: no piece empty, none there twice.

    Padding to a round vocabulary size makes such pieces; they become unused ones. The library
    also wants exactly one piece for unknown text.
    """
    names, kinds = list(pieces), list(types)
    seen: set[str] = set()
    for i, piece in enumerate(pieces):
        if not piece or piece in seen:
            names[i], kinds[i] = f"<unused piece {i}>", PieceType.UNUSED
        seen.add(piece)
    kinds[unknown_id] = PieceType.UNKNOWN
    for i, kind in enumerate(kinds):
        if kind == PieceType.UNKNOWN and i != unknown_id:
            kinds[i] = PieceType.CONTROL
    return names, kinds


def _token_id(metadata: Mapping[str, Any], name: str, pieces: list[str], source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < len(pieces):
        raise TokenizerError(
            f"{source} names {int(value)} as its {name} token but has only {len(pieces)} tokens"
        )
    return int(value)


def _types(
    metadata: Mapping[str, Any], pieces: list[str], special: set[int], source: str
) -> list[int]:
    """Return each piece's `PieceType`, with chat markers made control tokens."""
    types = list(map(int, metadata.get("tokenizer.ggml.token_type", ())))
    if not types:
        types = [PieceType.BYTE if _BYTE_PIECE.fullmatch(p) else PieceType.NORMAL for p in pieces]
    if len(types) != len(pieces):
        raise TokenizerError(f"{source} has {len(pieces)} tokens but {len(types)} token types")
    markers = {pieces.index(spelling) for spelling in END_SPELLINGS if spelling in pieces}
    markers |= {
        i
        for i in _not_normal(types)
        if types[i] == PieceType.USER_DEFINED and _LOOKS_CONTROL.fullmatch(pieces[i])
    }
    for i in special | markers:
        if types[i] in (PieceType.NORMAL, PieceType.USER_DEFINED):
            types[i] = PieceType.CONTROL
    return types


def _not_normal(types: Sequence[int]) -> list[int]:
    normal = int(PieceType.NORMAL)  # comparing plain integers is several times faster
    return [i for i, kind in enumerate(types) if kind != normal]
