"""How each GGUF pre-tokenizer (`tokenizer.ggml.pre`) cuts text before merging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.tiktoken_model import LLAMA3_PATTERN

# Source for all patterns: the tokenizer.json of the models that the names come from; which name
# shares which pattern, as in llama.cpp's `llama_vocab`.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Patterns applied one after another; each splits the stretches the one before left.

    `ignore_merges`: a stretch that is a token as a whole is taken so. `adds_bos`: whether a begin
    token goes in front where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(patterns=(LLAMA3_PATTERN,), ignore_merges=True, adds_bos=True)
_DIGITS_APART = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_PLAIN = PreTokenizer(patterns=(_GPT2,))

_PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_APART,
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _PLAIN),
    "qwen2": PreTokenizer(patterns=(_QWEN2,)),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def pre_tokenizer(name: str, *, source: str) -> PreTokenizer:
    """Return the pre-tokenizer of that name.

    Raises:
        TokenizerError: the name is not one of those known.
    """
    try:
        return _PRE_TOKENIZERS[name]
    except KeyError:
        raise TokenizerError(
            f"{source} needs the pre-tokenizer {name!r}, which is not supported; supported are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        ) from None
