"""Llama 3's `tokenizer.model`: byte-level ranks in base64, one per line."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

import tiktoken

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.vocabulary import AddedToken

# Source: the pre-tokenizer of Llama 3, also in its tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Source: Llama 3.1 model card and reference tokenizer: 256 ids behind the ranks are reserved, and
# these have a meaning. Llama 3.0 left the ones unused that 3.1 names.
N_RESERVED = 256
_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}

# The library's regular expression engine and its merge loop degrade on huge inputs and on long
# runs without a break, so both are bounded, at the sizes Meta's own tokenizer uses.
_MAX_TEXT_CHARS = 400_000
_MAX_RUN_CHARS = 25_000
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN_CHARS}}}(?=\s)|\S{{{_MAX_RUN_CHARS}}}(?=\S)")


class TiktokenCodec:
    """A `Codec` over a file of ranks.

    Args:
        data: the file's bytes.
        source: what to call the file in an error.

    Raises:
        TokenizerError: a line is damaged, or ranks are missing.
    """

    drops_first_space = False

    def __init__(self, data: bytes, *, source: str) -> None:
        ranks = _parse_ranks(data, source)
        self.n_ids = len(ranks)
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        self._encoding = tiktoken.Encoding(
            "llama-3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of plain text."""
        ids: list[int] = []
        for start in range(0, len(text), _MAX_TEXT_CHARS):
            for run in _bounded_runs(text[start : start + _MAX_TEXT_CHARS]):
                ids += self._encoding.encode_ordinary(run)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one rank."""
        return self._bytes[token_id]

    def token(self, token_id: int) -> str:
        """Return the piece as text, U+FFFD for bytes that are not a whole character."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def find(self, piece: str) -> int | None:
        """Return the id of a piece, if there is one."""
        try:
            return self._encoding.encode_single_token(piece)
        except KeyError:
            return None

    def control_tokens(self) -> list[AddedToken]:
        """Return the 256 control tokens behind the ranks."""
        spare = (i for i in range(N_RESERVED))
        names = [_NAMED.get(i) or f"<|reserved_special_token_{next(spare)}|>" for i in range(256)]
        return [
            AddedToken(content=name, token_id=self.n_ids + i, control=True)
            for i, name in enumerate(names)
        ]


def _parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{source} is damaged: line {number} is not a base64 token and its rank; fetch "
                "the file again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise TokenizerError(
            f"{source} is damaged: its {len(ranks)} ranks do not count from 0 without gaps, or "
            "single bytes are missing; fetch the file again"
        )
    return ranks


def _bounded_runs(text: str) -> Iterator[str]:
    """Yield `text` in pieces with no run of one kind (white space or not) above the limit."""
    start = 0
    for match in _LONG_RUN.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]
