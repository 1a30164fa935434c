"""SentencePiece vocabularies: Llama 1 and 2, TinyLlama, Mistral, and GGUF's `llama` kind."""

from __future__ import annotations

from typing import Any

import sentencepiece

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.vocabulary import AddedToken

_SPACE = "\u2581"


class SentencePieceCodec:
    """A `Codec` over a SentencePiece model.

    Args:
        model: the bytes of a `tokenizer.model` file.
        source: what to call the file in an error.

    Raises:
        TokenizerError: the bytes are no SentencePiece model.
    """

    def __init__(self, model: bytes, *, source: str) -> None:
        # The package has no types; `Any` keeps its calls unchecked here only.
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise TokenizerError(
                f"{source} is not a usable SentencePiece model ({reason}); fetch the file again"
            ) from error
        self.n_ids = int(self._processor.vocab_size())
        self.drops_first_space = self._decoding_drops_the_first_space()

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of plain text.

        The space in front belongs to every stretch of text, not to the first alone: so do Meta's
        code, which encodes the turns one by one, and the converters that follow it.
        """
        ids: list[int] = self._processor.encode(text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes an id stands for; empty for control and unused pieces."""
        processor = self._processor
        piece: str = processor.id_to_piece(token_id)
        if processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        if any(
            f(token_id) for f in (processor.is_control, processor.is_unknown, processor.is_unused)
        ):
            return b""
        return piece.replace(_SPACE, " ").encode("utf-8")

    def token(self, token_id: int) -> str:
        """Return the piece as the file spells it."""
        return str(self._processor.id_to_piece(token_id))

    def find(self, piece: str) -> int | None:
        """Return the id of a piece, if there is one."""
        token_id = int(self._processor.piece_to_id(piece))
        return token_id if self.token(token_id) == piece else None

    def control_tokens(self) -> list[AddedToken]:
        """Return the model's own control tokens, the one for unknown text among them."""
        processor = self._processor
        return [
            AddedToken(content=self.token(i), token_id=i, control=True)
            for i in range(self.n_ids)
            if processor.is_control(i) or processor.is_unknown(i)
        ]

    def special_id(self, name: str) -> int | None:
        """Return the model's "bos" or "eos" id, if it has one."""
        token_id = int(getattr(self._processor, f"{name}_id")())
        return token_id if token_id >= 0 else None

    def _decoding_drops_the_first_space(self) -> bool:
        """Ask the library, whose answer depends on the normalizer written into the model."""
        for token_id in range(self.n_ids):
            piece = self.token(token_id)
            one_space = piece.startswith(_SPACE) and not piece.endswith(_SPACE)
            if one_space and not self._processor.is_unused(token_id):
                text = str(self._processor.decode([token_id]))
                return text == self.token_bytes(token_id).decode("utf-8").removeprefix(" ")
        return False
