"""Text while it is being generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from offload_llama.tokenizer.api import Tokenizer

# The longest UTF-8 character has 4 bytes, so 4 bytes of the prompt tell whether it ends inside one.
_LONGEST_CHARACTER_BYTES = 4


class Detokenizer:
    """Turns ids into text one at a time; the chunks joined are the whole text.

    A character is given out once all its bytes are there, and text that may be the beginning of
    a stop string once it turns out not to be. Each id costs the same, however long the text is.

    Args:
        prompt_ids: what the text continues. A SentencePiece vocabulary drops the space in front of
            a text's first word; behind a prompt that space belongs to the text ("Hello" continues
            with " there"). Leave it empty for a chat's reply, which is a text of its own. Bytes of
            a character that the prompt ends in the middle of are completed.
        stop: strings that end the text; the first one completed counts, and is not part of the
            text. One that spells a control token (`</s>`) is met by that token's id as well.
        skip_special: leave control tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._stop_ids = frozenset(
            tokenizer.control_ids[s] for s in stop if s in tokenizer.control_ids
        )
        self._control = frozenset(tokenizer.control_ids.values())
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space
        self._held = ""
        self._chunks: list[str] = []
        self._continue_from(prompt_ids)

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._chunks)

    def push(self, token_id: int) -> str:
        """Return the text that is safe to show after one more id; empty once stopped."""
        if self.stopped:
            return ""
        if token_id in self._stop_ids:
            chunk = self.finish()
            self.stopped = True
            return chunk
        if token_id in self._control:
            if self._skip_special:
                return ""
            data = self._tokenizer.token_bytes(token_id)
            self._drop_space = False
        else:
            data = self._without_first_space(self._tokenizer.token_bytes(token_id))
        return self._give_out(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was still held back; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        chunk = self._give_out(self._decoder.decode(b"", final=True))
        return chunk if self.stopped else chunk + self._release(self._take_held())

    def _continue_from(self, prompt_ids: Sequence[int]) -> None:
        """Bring the decoder to where the prompt's last bytes leave it."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._control:
                tail = self._tokenizer.token_bytes(token_id) + tail
                if len(tail) >= _LONGEST_CHARACTER_BYTES:
                    break
        if tail:
            self._drop_space = False
            self._decoder.decode(tail)

    def _without_first_space(self, data: bytes) -> bytes:
        if self._drop_space and data:
            self._drop_space = False
            return data.removeprefix(b" ")
        return data

    def _give_out(self, new_text: str) -> str:
        """Return what of held and new text can no longer become part of a stop string."""
        self._held += new_text
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            # The one completed first, so that the text does not depend on the tokens' borders.
            _end, start = min(found)
            kept, self._held = self._held[:start], ""
            return self._release(kept)
        n_keep = max((_longest_beginning(s, self._held) for s in self._stop), default=0)
        cut = len(self._held) - n_keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return self._release(safe)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _release(self, chunk: str) -> str:
        if chunk:
            self._chunks.append(chunk)
        return chunk


def _longest_beginning(stop: str, text: str) -> int:
    """Return how many of `text`'s last characters may be the beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
