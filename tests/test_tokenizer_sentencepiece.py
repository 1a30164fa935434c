"""SentencePiece vocabularies, in their own file, in GGUF and as tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.open import open_tokenizer
from tests.helpers_tokenizer import (
    ANY_TEXT,
    TEXTS,
    ranks_as_json,
    sentencepiece_as_gguf,
    sentencepiece_as_json,
    sentencepiece_path,
    sentencepiece_processor,
    write_json,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def sp_file() -> Tokenizer:
    return open_tokenizer(sentencepiece_path())


@pytest.fixture(scope="module")
def sp_gguf(folder: Path) -> Tokenizer:
    return open_tokenizer(sentencepiece_as_gguf(folder / "sp.gguf"))


@pytest.fixture(scope="module")
def sp_json(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    library = sentencepiece_as_json(folder / "sp.json")
    return open_tokenizer(folder / "sp.json"), library


@settings(deadline=None, max_examples=300)
@given(text=ANY_TEXT)
def test_sentencepiece_file_and_gguf_equal_the_sentencepiece_library(
    sp_file: Tokenizer, sp_gguf: Tokenizer, text: str
) -> None:
    library = sentencepiece_processor()
    ids = library.encode(text)
    assert sp_file.encode(text) == ids
    assert sp_gguf.encode(text) == ids
    assert sp_file.decode(ids) == library.decode(ids)
    assert sp_gguf.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_of_sentencepiece_equals_the_library_on_known_texts(
    sp_gguf: Tokenizer, text: str
) -> None:
    assert sp_gguf.encode(text) == sentencepiece_processor().encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_every_beginning_and_end_of_a_text_decodes_as_in_the_library(
    sp_file: Tokenizer, text: str
) -> None:
    library = sentencepiece_processor()
    ids = library.encode(text)
    whole = [n for n in range(len(ids) + 1) if "\ufffd" not in library.decode(ids[n:])]
    assert len(whole) > 1
    for n in whole:
        assert sp_file.decode(ids[n:]) == library.decode(ids[n:])


def test_sentencepiece_special_ids_come_from_the_model(sp_file: Tokenizer) -> None:
    assert (sp_file.bos_id, sp_file.eos_id, sp_file.adds_bos) == (1, 2, True)
    assert sp_file.stop_ids == {2}
    assert dict(sp_file.control_ids) == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert sp_file.n_ids == 32000


def test_begin_markers_are_single_ids_and_text_after_them_starts_with_its_space(
    sp_file: Tokenizer, sp_gguf: Tokenizer
) -> None:
    """B59: matching is not upset by the space that SentencePiece puts in front."""
    hello = sentencepiece_processor().encode("Hello")
    for tokenizer in (sp_file, sp_gguf):
        assert tokenizer.encode("<s>Hello</s>", special=True) == [1, *hello, 2]
        assert tokenizer.encode("<s>Hello</s>", special=True, bos=True) == [1, *hello, 2]
        assert 1 not in tokenizer.encode("<s>Hello</s>")


def test_gguf_can_switch_off_the_space_in_front(folder: Path) -> None:
    path = sentencepiece_as_gguf(folder / "nospace.gguf", add_space_prefix=False)
    tokenizer = open_tokenizer(path)
    hello = sentencepiece_processor().piece_to_id("Hello")
    assert tokenizer.encode("Hello") == [hello]
    assert not tokenizer.drops_first_space
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def test_gguf_can_switch_off_the_begin_token(folder: Path) -> None:
    path = sentencepiece_as_gguf(folder / "nobos.gguf", add_bos_token=False)
    assert not open_tokenizer(path).adds_bos


def test_gguf_padding_pieces_are_never_text(folder: Path, sp_file: Tokenizer) -> None:
    """B26: pieces added to round the vocabulary up: unused, empty, or there twice."""
    library = sentencepiece_processor()
    n = library.vocab_size()
    path = sentencepiece_as_gguf(
        folder / "padded.gguf",
        tokens=[*(library.id_to_piece(i) for i in range(n)), "[PAD0]", "the", "the"],
        scores=[*(library.get_score(i) for i in range(n)), 0.0, 0.0, 0.0],
        token_type=[*([2, 3, 3] + [6] * 256 + [1] * (n - 259)), 5, 5, 5],
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.n_ids == n + 3
    assert tokenizer.decode([n, n + 1, n + 2]) == ""
    for text in (*TEXTS, "[PAD0] the"):
        assert tokenizer.encode(text) == sp_file.encode(text)


def test_added_chat_markers_in_a_gguf_are_control_tokens_and_stop_ids(folder: Path) -> None:
    """B59: converters stored them as user-defined pieces, which any text could contain."""
    library = sentencepiece_processor()
    n = library.vocab_size()
    path = sentencepiece_as_gguf(
        folder / "chatml.gguf",
        tokens=[*(library.id_to_piece(i) for i in range(n)), "<|im_start|>", "<|im_end|>"],
        scores=[*(library.get_score(i) for i in range(n)), 0.0, 0.0],
        token_type=[*([2, 3, 3] + [6] * 256 + [1] * (n - 259)), 4, 4],
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("<|im_start|>", special=True) == [n]
    assert tokenizer.encode("<|im_start|>") == library.encode("<|im_start|>")
    assert tokenizer.stop_ids == {2, n + 1}


@settings(deadline=None, max_examples=200)
@given(text=ANY_TEXT)
def test_tokenizer_json_of_sentencepiece_kind_equals_the_tokenizers_library(
    sp_json: tuple[Tokenizer, tokenizers.Tokenizer], text: str
) -> None:
    ours, library = sp_json
    library.encode_special_tokens = True
    ids = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
def test_stretches_behind_control_tokens_are_spaced_as_in_the_tokenizers_library(
    folder: Path, legacy: bool
) -> None:
    path = folder / f"legacy-{legacy}.json"
    library = sentencepiece_as_json(path, legacy=legacy)
    ours = open_tokenizer(path)
    for text in ("<s>Hello</s>world</s> two", "Hello", "</s>\n</s>", "a<s>  b"):
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True) == expected, text


def test_a_tokenizer_json_saved_with_truncation_and_padding_is_not_cut(tmp_path: Path) -> None:
    library = ranks_as_json(tmp_path / "tokenizer.json")
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("x y z " * 20)) == "x y z " * 20


def test_a_word_level_tokenizer_json_decodes_with_spaces(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("one two one") == [1, 2, 1]
    assert tokenizer.decode([1, 2, 1]) == library.decode([1, 2, 1]) == "one two one"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_metaspace_tokenizer_json_decodes_as_its_library(tmp_path: Path, scheme: Any) -> None:
    pieces = ["<unk>", "▁", "▁one", "two", "▁two"]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    for ids in ([2, 4], [3, 4], [2, 1, 4], [4]):
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    "decoder", [{"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC"}]
)
def test_a_decoder_that_is_not_supported_is_named(tmp_path: Path, decoder: dict[str, Any]) -> None:
    library = ranks_as_json(tmp_path / "tokenizer.json")
    content = {
        **_loads(library),
        "decoder": {"pad_token": "", "word_delimiter_token": "", **decoder},
    }
    content["decoder"].setdefault("cleanup", True)
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(TokenizerError, match=f"decodes with '{decoder['type']}'"):
        open_tokenizer(tmp_path)


def _loads(library: tokenizers.Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(library.to_str())
    return content
