"""Vocabulary files for the tokenizer tests, written from real vocabularies found in packages."""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from offload_llama.tokenizer.byte_alphabet import spell_bytes
from offload_llama.tokenizer.tiktoken_model import LLAMA3_PATTERN

LLAMA3_CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)

# Chat templates in the manner of well-known models, written for these tests.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)

TEXTS = (
    "Hello world, this is  a test.\n  indented",
    " leading and trailing ",
    "   ",
    "\n",
    "\ufeffBOM",
    "tabs\tand\r\nlines\n\n\n",
    "π 😀 👩‍👩‍👧‍👦 é e\u0301 ß 你好，世界 مرحبا हिन्दी",
    "'s 're don't DON'T 1234567 12.5 x=3;",
    "def f(a, b):\n    return a + b  # ok\n",
    "<s> </s> <unk> [INST] <|im_end|> <0x0A>",
    "a\u2581b",
)

ANY_TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from(list(" \n\t'aehlrstv019.,<|>[]/_-")),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


def installed_file(distribution: str, name: str) -> Path:
    """Return the file of an installed distribution whose name ends with `name`."""
    [file] = [f for f in importlib.metadata.files(distribution) or [] if f.name.endswith(name)]
    return Path(str(file.locate()))


@functools.cache
def sentencepiece_path() -> Path:
    """Return a real SentencePiece model of 32,000 pieces with byte fallback, as Llama 2's."""
    return installed_file("mistral-common", "tokenizer.model.v1")


@functools.cache
def sentencepiece_processor() -> Any:
    """Return the library's own processor of that model."""
    return sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path()))


def piece_type(processor: Any, token_id: int) -> int:
    """Return GGUF's number for the type of a SentencePiece piece."""
    if processor.is_unknown(token_id):
        return 2
    if processor.is_control(token_id):
        return 3
    if processor.is_unused(token_id):
        return 5
    return 6 if processor.is_byte(token_id) else 1


def write_gguf(path: Path, **keys: Any) -> Path:
    """Write a GGUF file without tensors; `keys` are `tokenizer.ggml.*` values."""
    writer = gguf.GGUFWriter(path, "llama")
    add_string = {"model": writer.add_tokenizer_model, "pre": writer.add_tokenizer_pre}
    for key, value in keys.items():
        full = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if key in add_string:
            add_string[key](value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_as_gguf(path: Path, **more: Any) -> Path:
    """Write the SentencePiece model as a GGUF vocabulary of kind `llama`."""
    processor = sentencepiece_processor()
    n = processor.vocab_size()
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in range(n)],
        "scores": [processor.get_score(i) for i in range(n)],
        "token_type": [piece_type(processor, i) for i in range(n)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return write_gguf(path, **{**keys, **more})


@functools.cache
def sentencepiece_merges() -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, the best score first."""
    processor = sentencepiece_processor()
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[259:]:
        splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        rank = -processor.get_score(ids[piece])
        merges += [(rank, a, b) for a, b in splits if a in ids and b in ids]
    merges.sort(key=lambda m: (m[0], ids[m[1]], ids[m[2]]))
    return [(a, b) for _, a, b in merges]


def sentencepiece_as_json(
    path: Path, *, legacy: bool = True, added: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Write the model as a `tokenizer.json`; not `legacy`: only a text's start has a space."""
    processor = sentencepiece_processor()
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            ids,
            sentencepiece_merges(),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(s, normalized=False) for s in ("<unk>", "<s>", "</s>", *added)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(path))
    return tokenizer


@functools.cache
def byte_ranks(n: int = 6000) -> dict[bytes, int]:
    """Return the first ranks of a real byte-level vocabulary."""
    tekken = json.loads(installed_file("mistral-common", "tekken_240718.json").read_text("utf-8"))
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken["vocab"][:n]}


@functools.cache
def tekken_pattern() -> str:
    """Return the pattern that cuts text for that vocabulary."""
    tekken = json.loads(installed_file("mistral-common", "tekken_240718.json").read_text("utf-8"))
    return str(tekken["config"]["pattern"])


def write_ranks(path: Path) -> Path:
    """Write the ranks as Llama 3's `tokenizer.model`."""
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in byte_ranks().items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@functools.cache
def rank_merges() -> list[tuple[str, str]]:
    """Return every pair that makes a ranked token, in the order in which they merge."""
    ranks = byte_ranks()
    merges = []
    for token, rank in ranks.items():
        splits = [(token[:n], token[n:]) for n in range(1, len(token))]
        merges += [(rank, ranks[a], ranks[b], a, b) for a, b in splits if a in ranks and b in ranks]
    return [(spell_bytes(a), spell_bytes(b)) for *_, a, b in sorted(merges)]


def ranks_as_gguf(
    path: Path, *, pre: str = "llama-bpe", control: Sequence[str] = LLAMA3_CONTROL, **more: Any
) -> Path:
    """Write the ranks as a GGUF vocabulary of kind `gpt2`, control tokens behind them."""
    pieces = [spell_bytes(token) for token in byte_ranks()]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*pieces, *control],
        "token_type": [1] * len(pieces) + [3] * len(control),
        "merges": [f"{a} {b}" for a, b in rank_merges()],
    }
    return write_gguf(path, **{**keys, **more})


def ranks_as_json(path: Path, control: Sequence[str] = LLAMA3_CONTROL) -> tokenizers.Tokenizer:
    """Write the ranks as a `tokenizer.json` in the manner of Llama 3's."""
    pieces = {spell_bytes(token): rank for token, rank in byte_ranks().items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, rank_merges(), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in control])
    if control:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{control[0]} $A",
            pair=f"{control[0]} $A $B",
            special_tokens=[(control[0], len(pieces))],
        )
    tokenizer.save(str(path))
    return tokenizer


def write_json(path: Path, content: object) -> Path:
    """Write `content` as JSON."""
    path.write_text(json.dumps(content), "utf-8")
    return path
