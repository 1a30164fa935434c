"""Byte-level vocabularies: Llama 3's ranks, in GGUF and as tokenizer.json."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.byte_alphabet import spell_bytes
from offload_llama.tokenizer.gguf_pretokenizers import pre_tokenizer
from offload_llama.tokenizer.gguf_vocab import gguf_vocabulary
from offload_llama.tokenizer.open import open_tokenizer
from offload_llama.tokenizer.tiktoken_model import LLAMA3_PATTERN
from tests.helpers_tokenizer import (
    ANY_TEXT,
    byte_ranks,
    ranks_as_gguf,
    ranks_as_json,
    tekken_pattern,
    write_gguf,
    write_ranks,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Tokenizer:
    return open_tokenizer(write_ranks(folder / "ranks.model"))


@pytest.fixture(scope="module")
def tiktoken_reference() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "reference", pat_str=LLAMA3_PATTERN, mergeable_ranks=byte_ranks(), special_tokens={}
    )


@pytest.fixture(scope="module")
def bpe_gguf(folder: Path) -> Tokenizer:
    return open_tokenizer(ranks_as_gguf(folder / "bpe.gguf"))


@pytest.fixture(scope="module")
def bpe_json(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    library = ranks_as_json(folder / "bpe.json")
    return open_tokenizer(folder / "bpe.json"), library


@settings(deadline=None, max_examples=200)
@given(text=ANY_TEXT)
def test_llama3_ranks_gguf_and_json_equal_their_libraries_and_each_other(
    ranks: Tokenizer,
    bpe_gguf: Tokenizer,
    bpe_json: tuple[Tokenizer, tokenizers.Tokenizer],
    tiktoken_reference: tiktoken.Encoding,
    text: str,
) -> None:
    ids = tiktoken_reference.encode_ordinary(text)
    ours, library = bpe_json
    library.encode_special_tokens = True
    assert ranks.encode(text) == ids
    assert bpe_gguf.encode(text) == ids
    assert ours.encode(text) == ids
    assert library.encode(text, add_special_tokens=False).ids == ids
    assert ours.decode(ids) == library.decode(ids) == ranks.decode(ids) == text


def test_llama3_ranks_are_followed_by_256_control_tokens(ranks: Tokenizer) -> None:
    """B05: with the Meta layout both the end of a text and the end of a turn stop."""
    n = len(byte_ranks())
    assert ranks.n_ids == n + 256
    ids = ranks.control_ids
    assert len(ids) == 256
    assert sorted(ids.values()) == list(range(n, n + 256))
    # Llama 3's published ids, less its 128,000 ranks.
    published = {
        "<|begin_of_text|>": 0,
        "<|end_of_text|>": 1,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
        "<|reserved_special_token_0|>": 2,
        "<|reserved_special_token_3|>": 11,
        "<|reserved_special_token_247|>": 255,
    }
    assert {name: ids[name] - n for name in published} == published
    assert ranks.bos_id == n
    assert {n + 1, n + 9} <= ranks.stop_ids
    assert ranks.adds_bos


@pytest.mark.parametrize("run", [" ", "x", "\n"])
def test_long_runs_in_llama3_text_are_bounded_and_lose_nothing(ranks: Tokenizer, run: str) -> None:
    text = "start " + run * 60_001 + " end"
    ids = ranks.encode(text)
    assert ranks.decode(ids) == text
    assert (
        ranks.encode(run * 25_000) == ranks.encode(run * 50_000)[: len(ranks.encode(run * 25_000))]
    )


def test_text_longer_than_the_bound_is_encoded_in_stretches(ranks: Tokenizer) -> None:
    text = "word " * 100_001
    assert ranks.decode(ranks.encode(text)) == text


_GPT2_BUILT_IN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gpt-2", _GPT2_BUILT_IN),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), _GPT2_BUILT_IN]
            ),
        ),
    ],
)
@settings(deadline=None, max_examples=200)
@given(text=ANY_TEXT)
def test_pre_tokenizers_cut_as_the_tokenizers_library_does(
    name: str, reference: pre_tokenizers.PreTokenizer, text: str
) -> None:
    assert _cut(name, text) == [span for _, span in reference.pre_tokenize_str(text)]


@settings(deadline=None, max_examples=100)
@given(text=ANY_TEXT)
def test_tekken_cuts_as_the_pattern_in_its_own_file(text: str) -> None:
    split = _splitter(tekken_pattern())
    assert _cut("tekken", text) == [span for _, span in split.pre_tokenize_str(text)]


@functools.cache
def _splitter(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(splits)


def _cut(name: str, text: str) -> list[tuple[int, int]]:
    splitter = _splitter(*pre_tokenizer(name, source="test").patterns)
    return [span for _, span in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-bpe", ["It", "'S", " ", "123", "45", "-ok", "!!\n\n", "  ", " x"]),
        ("qwen2", ["It", "'S", " ", "1", "2", "3", "4", "5", "-ok", "!!\n\n", "  ", " x"]),
        ("gpt-2", ["It", "'", "S", " 12345", "-", "ok", "!!", "\n\n  ", " x"]),
        ("smollm", ["It", "'", "S", " ", "1", "2", "3", "4", "5", "-", "ok", "!!", "\n\n  ", " x"]),
        ("default", ["It", "'", "S", " ", "123", "45", "-", "ok", "!!", "\n\n  ", " x"]),
    ],
)
def test_pre_tokenizers_differ_in_digits_case_and_lines(name: str, expected: list[str]) -> None:
    text = "It'S 12345-ok!!\n\n   x"
    assert [text[a:b] for a, b in _cut(name, text)] == expected


def test_an_unknown_pre_tokenizer_is_refused_by_name(folder: Path) -> None:
    path = ranks_as_gguf(folder / "unknown.gguf", pre="martian")
    with pytest.raises(TokenizerError, match=r"'martian'.*supported are .*llama-bpe") as caught:
        open_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_gguf_without_a_pre_tokenizer_uses_the_default_one(folder: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["1", "2", "12", "x"],
        "tokenizer.ggml.merges": ["1 2"],
    }
    tokenizer = gguf_vocabulary(metadata, source="test")
    assert tokenizer.encode("12x1") == [2, 3, 0]
    assert not tokenizer.adds_bos


def test_gguf_end_of_turn_ids_stop(folder: Path) -> None:
    """B05: the end-of-turn id counts beside the end of the text."""
    n = len(byte_ranks())
    path = ranks_as_gguf(
        folder / "eot.gguf",
        control=("<bos>", "<eos>", "<turn>", "<message>", "<other>"),
        bos_token_id=n,
        eos_token_id=n + 1,
        eot_token_id=n + 2,
        eom_token_id=n + 3,
    )
    tokenizer = open_tokenizer(path, model_stop_ids=(7,))
    assert tokenizer.stop_ids == {7, n + 1, n + 2, n + 3}
    assert tokenizer.adds_bos


def test_user_defined_pieces_are_single_ids_in_any_text(folder: Path) -> None:
    n = len(byte_ranks())
    path = ranks_as_gguf(
        folder / "user.gguf", control=("<|x|>", "    é "), token_type=[1] * n + [3, 4]
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("a    é b") == [*tokenizer.encode("a"), n + 1, *tokenizer.encode("b")]
    assert tokenizer.decode(tokenizer.encode("a    é b")) == "a    é b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert', which is not supported"),
        ({"tokens": []}, "holds no vocabulary"),
        ({"eos_token_id": 99}, "names 99 as its eos token but has only 4 tokens"),
        ({"token_type": [1, 1]}, "4 tokens but 2 token types"),
        ({"merges": ["1 9"]}, "merges do not fit"),
        ({"merges": ["12"]}, "merges do not fit"),
        ({"model": "llama"}, "4 tokens but 0 scores"),
        (
            {"model": "llama", "scores": [0.0] * 4, "token_type": [6, 1, 1, 2]},
            "1 of the 256 byte tokens",
        ),
    ],
)
def test_damaged_gguf_vocabularies_get_one_line(change: dict[str, Any], message: str) -> None:
    values = {"model": "gpt2", "tokens": ["1", "2", "12", "x"], "merges": ["1 2"], **change}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    with pytest.raises(TokenizerError, match=message) as caught:
        gguf_vocabulary(metadata, source="m.gguf")
    assert "\n" not in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_gguf_without_tokenizer_keys_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="holds no vocabulary"):
        open_tokenizer(write_gguf(tmp_path / "bare.gguf"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [*lines[:40], b"!!! 40", *lines[41:]], "line 41 is not"),
        (lambda lines: [*lines[:40], lines[40].split()[0], *lines[41:]], "line 41 is not"),
        (lambda lines: lines[:300] + lines[301:], "do not count from 0 without gaps"),
        (lambda lines: lines[:200], "single bytes are missing"),
    ],
)
def test_damaged_ranks_are_named(
    tmp_path: Path, spoil: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    path = write_ranks(tmp_path / "tokenizer.model")
    path.write_bytes(b"\n".join(spoil(path.read_bytes().splitlines())))
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(path)


def _letters(*words: str, control: tuple[str, ...] = (), pre: str = "llama-bpe") -> Tokenizer:
    """Return a vocabulary of single bytes, words without merges, and control tokens."""
    pieces = [spell_bytes(bytes([byte])) for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*pieces, *words, *control],
        "tokenizer.ggml.token_type": [1] * (256 + len(words)) + [3] * len(control),
    }
    return gguf_vocabulary(metadata, source="test")


def test_a_word_that_is_a_token_needs_no_merges_in_llama_3_s_vocabulary() -> None:
    assert _letters("hello").encode("hello") == [256]
    assert _letters("hello", pre="gpt-2").encode("hello") == list(b"hello")


def test_a_control_token_that_looks_like_a_word_is_never_text() -> None:
    tokenizer = _letters(control=("hello",))
    assert tokenizer.encode("hello") == list(b"hello")
    assert tokenizer.encode("hello", special=True) == [256]


@pytest.mark.parametrize("control", [("<a>", "<a><b>"), ("<a><b>", "<a>")])
def test_of_two_control_tokens_that_begin_alike_the_longer_is_read(
    control: tuple[str, str],
) -> None:
    tokenizer = _letters(control=control)
    longer, shorter = tokenizer.control_ids["<a><b>"], tokenizer.control_ids["<a>"]
    assert tokenizer.encode("<a><b><a>", special=True) == [longer, shorter]
