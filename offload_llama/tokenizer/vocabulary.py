"""One tokenizer over every kind of vocabulary: a codec for plain text plus its added tokens.

A codec (one module per file format) turns plain text into ids and ids into bytes; it never sees
a control token. What all formats share stands here, once: control tokens written out in a text,
the begin token, stop ids, and decoding with bytes that are not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Spellings with which instruction-tuned models end a turn, or a base model a text. A vocabulary
# that has one as a control token means it: nothing else is trained to produce it.
END_SPELLINGS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
)


class Codec(Protocol):
    """Plain text to ids and back, for one file format.

    `n_ids` counts the ids the format's own file defines. `drops_first_space` as in `Tokenizer`.
    """

    n_ids: int
    drops_first_space: bool

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of non-empty text without control tokens.

        `first` is False behind another token, where some vocabularies leave out the space that
        they put in front of a text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes an id below `n_ids` stands for; empty if it stands for no text."""
        ...

    def token(self, token_id: int) -> str:
        """Return the piece of an id below `n_ids` as the file spells it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token matched whole in the text, before the codec sees it.

    `lstrip` and `rstrip`: the token swallows white space on that side. `control` tokens are
    matched only where the caller asks for it; the others always.
    """

    content: str
    token_id: int
    control: bool
    lstrip: bool = False
    rstrip: bool = False


class _Splitter:
    """Cuts texts at the spellings of some added tokens, the longest first."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = (
            re.compile("|".join(re.escape(s) for s in longest_first)) if longest_first else None
        )

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the stretches of plain text and, between them, the ids found."""
        if self._pattern is None:
            yield text
            return
        done, swallow = 0, False
        for match in self._pattern.finditer(text):
            token = self._tokens[match.group()]
            plain = text[done : match.start()]
            plain = plain.lstrip() if swallow else plain
            yield plain.rstrip() if token.lstrip else plain
            yield token.token_id
            done, swallow = match.end(), token.rstrip
        yield text[done:].lstrip() if swallow else text[done:]


class Vocabulary:
    """A `Tokenizer` made of a codec and its added tokens.

    Args:
        model_stop_ids: what the model's other files say ends a text; joined with `eos_id`,
            `stop_ids` and the control tokens that are spelled like an end of turn.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        added: Sequence[AddedToken],
        bos_id: int | None,
        eos_id: int | None,
        adds_bos: bool,
        chat_template: str | None = None,
        stop_ids: Iterable[int] = (),
        model_stop_ids: Iterable[int] = (),
    ) -> None:
        self._codec = codec
        self._added = {token.token_id: token for token in added}
        self._control = _Splitter(token for token in added if token.control)
        self._always = _Splitter(token for token in added if not token.control)
        self.control_ids: Mapping[str, int] = {
            token.content: token.token_id for token in added if token.control
        }
        self._control_id_set = frozenset(self.control_ids.values())
        self.n_ids = max([codec.n_ids, *(token.token_id + 1 for token in added)])
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.drops_first_space = codec.drops_first_space
        self.chat_template = chat_template
        ends = [self.control_ids[s] for s in END_SPELLINGS if s in self.control_ids]
        eos = [] if eos_id is None else [eos_id]
        self.stop_ids = frozenset([*model_stop_ids, *stop_ids, *eos, *ends])

    def encode(
        self, text: str, *, bos: bool = False, special: bool = False, guard: str = ""
    ) -> list[int]:
        """Return the ids of `text`; see `Tokenizer.encode`."""
        text = _without_surrogates(text)
        ids: list[int] = []
        for part in self._control.split(text) if special else [text]:
            if isinstance(part, int):
                ids.append(part)
                continue
            for piece in self._always.split(part.replace(guard, "") if guard else part):
                if isinstance(piece, int):
                    ids.append(piece)
                elif piece:
                    ids += self._codec.encode(piece, first=not ids)
        if bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; see `Tokenizer.decode`.

        One U+FFFD stands for each longest run of bytes that could have begun a character, as in
        Python's own decoder.
        """
        skipped = self._control_id_set if skip_special else ()
        pieces = [self.token_bytes(i) for i in ids if i not in skipped]
        first = next((n for n, piece in enumerate(pieces) if piece), None)
        if self.drops_first_space and first is not None:
            pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one id adds to a text; see `Tokenizer.token_bytes`."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode("utf-8", "replace")
        if not 0 <= token_id < self._codec.n_ids:
            return b""
        return self._codec.token_bytes(token_id)

    def token(self, token_id: int) -> str:
        """Return the piece as the vocabulary spells it, empty for an id it does not have."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content
        return self._codec.token(token_id) if 0 <= token_id < self._codec.n_ids else ""


def _without_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates as U+FFFD.

    Python makes lone surrogates of input bytes that are not UTF-8; no encoder takes them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
