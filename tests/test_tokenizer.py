"""The default model's vocabulary, and what every kind of vocabulary does alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings

from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.chat import Message, encode_chat
from offload_llama.tokenizer.open import open_tokenizer
from offload_llama.tokenizer.stream import Detokenizer
from tests.helpers_tokenizer import (
    ANY_TEXT,
    TEXTS,
    ranks_as_gguf,
    ranks_as_json,
    sentencepiece_as_gguf,
    sentencepiece_as_json,
    sentencepiece_path,
    write_ranks,
)

KINDS = ("default", "sentencepiece", "gguf-llama", "gguf-bpe", "ranks", "json-llama", "json-bpe")


@pytest.fixture(scope="module")
def default(smollm2_path: Path) -> Tokenizer:
    return open_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def every(default: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    for name in ("json-llama", "json-bpe"):
        (folder / name).mkdir()
    sentencepiece_as_json(folder / "json-llama" / "tokenizer.json")
    ranks_as_json(folder / "json-bpe" / "tokenizer.json")
    paths = {
        "sentencepiece": sentencepiece_path(),
        "gguf-llama": sentencepiece_as_gguf(folder / "sp.gguf"),
        "gguf-bpe": ranks_as_gguf(folder / "bpe.gguf"),
        "ranks": write_ranks(folder / "tokenizer.model"),
        "json-llama": folder / "json-llama",
        "json-bpe": folder / "json-bpe" / "tokenizer.json",
    }
    return {"default": default, **{name: open_tokenizer(path) for name, path in paths.items()}}


@pytest.mark.parametrize("index", range(5))
def test_prompt_ids_of_the_default_model_equal_the_reference(
    default: Tokenizer, reference: dict[str, Any], index: int
) -> None:
    prompt = reference["prompts"][index]
    assert default.encode(prompt["full_prompt"], bos=True, special=True) == prompt["prompt_ids"]
    if prompt["kind"] == "chat":
        messages: list[Message] = [{"role": "user", "content": prompt["prompt"]}]
        assert encode_chat(default, messages) == prompt["prompt_ids"]


@pytest.mark.parametrize("index", range(5))
def test_reference_ids_of_the_default_model_decode_and_stream_to_the_reference_text(
    default: Tokenizer, reference: dict[str, Any], index: int
) -> None:
    prompt = reference["prompts"][index]
    assert default.decode(prompt["hf_ids"], skip_special=False) == prompt["hf_text"]
    stream = Detokenizer(default, prompt_ids=prompt["prompt_ids"], skip_special=False)
    chunks = [stream.push(i) for i in prompt["hf_ids"]] + [stream.finish()]
    assert "".join(chunks) == prompt["hf_text"]


def test_the_default_model_states_its_special_ids(default: Tokenizer) -> None:
    assert (default.bos_id, default.eos_id, default.adds_bos) == (1, 2, False)
    assert default.stop_ids == {0, 2}
    assert default.n_ids == 49152
    assert default.control_ids["<|im_start|>"] == 1
    assert default.token(2) == "<|im_end|>"
    assert default.token(9690) == "system"


def test_opening_the_default_vocabulary_takes_less_than_half_a_second(smollm2_path: Path) -> None:
    def seconds() -> float:
        begin = time.process_time()
        open_tokenizer(smollm2_path)
        return time.process_time() - begin

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS, ""])
def test_text_survives_encoding_and_decoding(
    every: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """B11, B64: every space, line and foreign character comes back."""
    tokenizer = every[kind]
    # SentencePiece writes spaces as U+2581, and so takes that character for a space.
    expected = text.replace("\u2581", " ") if tokenizer.drops_first_space else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(text=ANY_TEXT)
def test_any_text_survives_encoding_and_decoding(
    every: dict[str, Tokenizer], default_bytes: set[int], kind: str, text: str
) -> None:
    tokenizer = every[kind]
    # The default vocabulary has no piece for a few bytes that only rare characters use.
    assume(kind != "default" or set(text.encode()) <= default_bytes)
    expected = text.replace("\u2581", " ") if tokenizer.drops_first_space else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.fixture(scope="module")
def default_bytes(default: Tokenizer) -> set[int]:
    pieces = map(default.token_bytes, range(default.n_ids))
    return {piece[0] for piece in pieces if len(piece) == 1}


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_typed_by_a_user_stay_plain_text(
    every: dict[str, Tokenizer], kind: str
) -> None:
    """B59: only `special=True` reads a spelling as one id, and then always."""
    tokenizer = every[kind]
    control = set(tokenizer.control_ids.values())
    assert control
    for spelling, token_id in tokenizer.control_ids.items():
        plain = tokenizer.encode(f"a{spelling}b {spelling}")
        assert not control & set(plain), spelling
        assert tokenizer.decode(plain) == f"a{spelling}b {spelling}"
        assert tokenizer.encode(f"a{spelling}", special=True)[-1] == token_id
        assert tokenizer.encode(spelling, special=True) == [token_id]


@pytest.mark.parametrize("kind", KINDS)
def test_special_encoding_joins_the_stretches_between_control_tokens(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    spelling, token_id = list(tokenizer.control_ids.items())[1]
    ids = tokenizer.encode(f"one two{spelling}{spelling}three", special=True)
    first, rest = tokenizer.encode("one two"), tokenizer.encode("three")
    assert ids == [*first, token_id, token_id, *rest]


@pytest.mark.parametrize("kind", KINDS)
def test_the_begin_token_comes_once_and_only_where_the_vocabulary_wants_it(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    plain = tokenizer.encode("Hello")
    assert tokenizer.adds_bos or kind in ("default", "gguf-bpe")
    if not tokenizer.adds_bos:
        assert tokenizer.encode("Hello", bos=True) == plain
        return
    assert tokenizer.bos_id is not None
    assert tokenizer.encode("Hello", bos=True) == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("", bos=True) == [tokenizer.bos_id]
    written = tokenizer.token(tokenizer.bos_id) + "Hello"
    assert tokenizer.encode(written, bos=True, special=True) == [tokenizer.bos_id, *plain]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_decode_to_nothing(
    every: dict[str, Tokenizer], kind: str
) -> None:
    """B26: an embedding may have more rows than the vocabulary has pieces."""
    tokenizer = every[kind]
    ids = tokenizer.encode("one two")
    extra = [tokenizer.n_ids, tokenizer.n_ids + 7, 10**6]
    for skip_special in (True, False):
        assert tokenizer.decode(extra, skip_special=skip_special) == ""
        assert tokenizer.decode([*ids, *extra], skip_special=skip_special) == "one two"
        assert tokenizer.decode([*extra, *ids], skip_special=skip_special) == "one two"
    assert tokenizer.token_bytes(tokenizer.n_ids) == b""
    assert tokenizer.token(tokenizer.n_ids) == ""
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, [*extra, *ids, *extra])) + stream.finish() == "one two"


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_below_n_ids_has_a_piece(every: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every[kind]
    nothing = [i for i in range(tokenizer.n_ids) if tokenizer.token(i) == ""]
    assert nothing == []


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_character_become_the_replacement_mark(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    byte_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_ids)}
    grin = [byte_of[bytes([b])] for b in "😀".encode()]
    assert tokenizer.decode(grin) == "😀"
    assert tokenizer.decode(grin[:3]) == "\ufffd"
    assert tokenizer.decode([grin[1], *grin]) == "\ufffd😀"


@pytest.mark.parametrize("kind", KINDS)
def test_input_that_was_not_utf8_encodes(every: dict[str, Tokenizer], kind: str) -> None:
    """B64: Python hands such bytes on as lone surrogates, which no encoder takes."""
    tokenizer = every[kind]
    piped = b"\x93quoted\x94 \xcf\x80".decode("utf-8", "surrogateescape")
    assert tokenizer.decode(tokenizer.encode(piped)) == "\ufffdquoted\ufffd π"
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello  world\n", " ", "a", "😀"], ids=["words", " ", "a", "😀"])
def test_very_long_input_encodes_in_seconds(
    every: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = every[kind]
    long = text * (100_000 // len(text.encode()))
    begin = time.process_time()
    ids = tokenizer.encode(long)
    assert time.process_time() - begin < 10
    assert tokenizer.decode(ids) == long
