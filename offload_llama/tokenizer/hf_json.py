"""Hugging Face's `tokenizer.json`, encoded by the tokenizers package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.byte_alphabet import piece_bytes
from offload_llama.tokenizer.vocabulary import AddedToken

_SPACE = "\u2581"


class _PieceDecoder:
    """Turns one piece into bytes, as the file's `decoder` block says.

    Joining the bytes of the pieces is then all there is to decoding, so that a text can be
    streamed, and cut anywhere, without decoding it again.

    Raises:
        TokenizerError: the block has a step of another kind.
    """

    def __init__(self, spec: Mapping[str, Any] | None, *, source: str) -> None:
        self.drops_first_space = False
        self._byte_level = False
        self._byte_fallback = False
        self._space = ""
        # Without a decoder, pieces are words, and stand apart.
        self._prefix = "" if spec else " "
        if spec is None:
            self.drops_first_space = True
        else:
            for step in _steps(spec):
                self._read(step, source)

    def __call__(self, piece: str) -> bytes:
        if self._byte_level:
            return piece_bytes(piece)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        text = self._prefix + piece
        return (text.replace(self._space, " ") if self._space else text).encode("utf-8", "replace")

    def _read(self, step: Mapping[str, Any], source: str) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                self._space = space
            case {"type": "Metaspace"}:
                self._space = step.get("replacement", _SPACE)
                prepends = step.get("prepend_scheme", "always") != "never"
                self.drops_first_space = prepends and step.get("add_prefix_space", True)
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if start <= 1:
                self.drops_first_space = start == 1
            case _:
                raise TokenizerError(
                    f"{source} decodes with {step.get('type')!r} in a way that is not supported; "
                    "supported are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse and Strip "
                    "of the space"
                )


class HfJsonCodec:
    """A `Codec` over a `tokenizer.json`.

    Args:
        text: the file's content.
        source: what to call the file in an error.

    Raises:
        TokenizerError: the tokenizers package cannot read it, or its decoder is not supported.
    """

    def __init__(self, text: str, *, source: str) -> None:
        try:
            self._spec: dict[str, Any] = json.loads(text)
            self._tokenizer = _load(text)
        except Exception as error:  # the package raises its plain base class
            raise TokenizerError(
                f"{source} is not a usable tokenizer.json ({error}); fetch the file again, or "
                "update the tokenizers package"
            ) from error
        self._decode_piece = _PieceDecoder(self._spec.get("decoder"), source=source)
        self.drops_first_space = self._decode_piece.drops_first_space
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.n_ids = max(vocabulary.values(), default=-1) + 1
        self._continuing: tokenizers.Tokenizer | None = None

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of plain text."""
        tokenizer = self._tokenizer if first else self._behind_another_token()
        return tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes an id stands for."""
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._decode_piece(piece)

    def token(self, token_id: int) -> str:
        """Return the piece as the file spells it; empty for an id that it leaves out."""
        return self._tokenizer.id_to_token(token_id) or ""

    def find(self, piece: str) -> int | None:
        """Return the id of a piece, if there is one."""
        return self._tokenizer.token_to_id(piece)

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that are matched whole."""
        return [
            AddedToken(
                content=token["content"],
                token_id=token["id"],
                control=bool(token.get("special", False)),
                lstrip=bool(token.get("lstrip", False)),
                rstrip=bool(token.get("rstrip", False)),
            )
            for token in self._spec.get("added_tokens") or ()
        ]

    def leading_id(self) -> int | None:
        """Return the first id that the file's post-processor puts in front of every text."""
        around_nothing = self._tokenizer.encode("", add_special_tokens=True).ids
        return around_nothing[0] if around_nothing else None

    def _behind_another_token(self) -> tokenizers.Tokenizer:
        """Return the tokenizer for text that does not begin a text.

        It differs only where a Metaspace puts its space in front of the first stretch alone: a
        stretch encoded by itself would count as the first.
        """
        if self._continuing is None:
            spec = json.loads(json.dumps(self._spec))
            changed = False
            for step in _steps(spec.get("pre_tokenizer") or {}):
                if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
                    step["prepend_scheme"] = "never"
                    changed = True
            self._continuing = _load(json.dumps(spec)) if changed else self._tokenizer
        return self._continuing


def _load(text: str) -> tokenizers.Tokenizer:
    tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
    # Files saved after training may carry both; a prompt must be neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Control tokens are found before the codec is asked; here they are plain text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _steps(spec: dict[str, Any] | Mapping[str, Any]) -> Iterator[Any]:
    """Yield the blocks of a decoder or pre-tokenizer, sequences opened."""
    if spec.get("type") == "Sequence":
        for step in spec.get("decoders") or spec.get("pretokenizers") or ():
            yield from _steps(step)
    elif spec:
        yield spec
