"""What the rest of the package asks of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """One vocabulary.

    `n_ids` is the number of ids that stand for text or control tokens; a model may have more
    embedding rows. `stop_ids` are the ids that end a turn or a text (end of sequence, end of
    turn). `control_ids` maps the spelling of each control token (`<|im_end|>`) to its id.
    `chat_template` is the jinja text from the model's files (or implied by their layout), or None.
    `drops_first_space`: texts are encoded with a space in front, which decoding takes away again
    (SentencePiece).
    """

    n_ids: int
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    control_ids: Mapping[str, int]
    adds_bos: bool
    drops_first_space: bool
    chat_template: str | None

    def encode(
        self, text: str, *, bos: bool = False, special: bool = False, guard: str = ""
    ) -> list[int]:
        """Return the ids of `text`.

        Args:
            bos: put the begin token in front if this vocabulary has one and wants it
                (`adds_bos`), never twice.
            special: read control tokens written out in the text (`<|im_end|>`) as single ids;
                otherwise they are plain characters, so a user cannot forge a turn.
            guard: a character without meaning: a control spelling that contains it is not read
                as one, and it is taken out before the text is encoded.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Ids without a piece of text (padding rows of the embedding) give nothing.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one id adds to a text, a control token's spelling included.

        Texts are these bytes joined, less one leading space where `drops_first_space` says so.
        """
        ...

    def token(self, token_id: int) -> str:
        """Return the piece as the vocabulary spells it (for messages and templates)."""
        ...
