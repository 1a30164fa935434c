"""Finding a vocabulary by content, and what the files beside it say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.open import open_tokenizer
from tests.helpers_tokenizer import (
    CHATML,
    LLAMA3_CONTROL,
    STRICT,
    ZEPHYR,
    byte_ranks,
    installed_file,
    ranks_as_gguf,
    ranks_as_json,
    sentencepiece_as_json,
    sentencepiece_path,
    sentencepiece_processor,
    write_json,
    write_ranks,
)

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 499723\n"
N = len(byte_ranks())


def _sentencepiece(folder: Path) -> None:
    shutil.copy(sentencepiece_path(), folder / "tokenizer.model")


def _ranks(folder: Path) -> None:
    write_ranks(folder / "tokenizer.model")


def _json(folder: Path) -> None:
    sentencepiece_as_json(folder / "tokenizer.json")


def _both(folder: Path) -> None:
    _sentencepiece(folder)
    sentencepiece_as_json(folder / "tokenizer.json", added=["<|added|>"])


def _original(folder: Path) -> None:
    (folder / "original").mkdir()
    _ranks(folder / "original")


def _gguf(folder: Path) -> None:
    ranks_as_gguf(folder / "model.gguf")


def _beside(folder: Path) -> None:
    write_json(folder / "params.json", {})
    _sentencepiece(folder.parent)


def _pointer_and_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(POINTER)
    _sentencepiece(folder)


@pytest.mark.parametrize(
    ("make", "n_ids"),
    [
        (_sentencepiece, 32000),
        (_ranks, N + 256),
        (_json, 32000),
        (_both, 32001),
        (_original, N + 256),
        (_gguf, N + len(LLAMA3_CONTROL)),
        (_beside, 32000),
        (_pointer_and_model, 32000),
    ],
)
def test_a_folder_is_opened_by_the_content_of_its_files(
    tmp_path: Path, make: Any, n_ids: int
) -> None:
    """B32: the same name may hold SentencePiece or ranks; many folders have one format only."""
    folder = tmp_path / "mödel folder"
    folder.mkdir()
    make(folder)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.n_ids == n_ids
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"


@pytest.mark.parametrize("name", ["anything.bin", "tokenizer.model", "tokenizer.model.v1"])
def test_a_file_is_opened_by_its_content_whatever_its_name(tmp_path: Path, name: str) -> None:
    shutil.copy(sentencepiece_path(), tmp_path / name)
    assert open_tokenizer(tmp_path / name).n_ids == 32000
    write_ranks(tmp_path / name)
    assert open_tokenizer(tmp_path / name).n_ids == N + 256
    ranks_as_gguf(tmp_path / name)
    assert open_tokenizer(tmp_path / name).n_ids == N + len(LLAMA3_CONTROL)
    ranks_as_json(tmp_path / name)
    assert open_tokenizer(tmp_path / name).n_ids == N + len(LLAMA3_CONTROL)


def test_a_weights_file_leads_to_the_vocabulary_beside_it(tmp_path: Path) -> None:
    _sentencepiece(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert open_tokenizer(weights).n_ids == 32000


def test_a_folder_without_vocabulary_lists_what_was_looked_for(tmp_path: Path) -> None:
    """B32: nothing usable."""
    write_json(tmp_path / "config.json", {})
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(tmp_path)
    message = str(caught.value)
    for name in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model", "*.gguf"):
        assert name in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path, name: str) -> None:
    """B32: a clone without the large files."""
    (tmp_path / name).write_text(POINTER)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(TokenizerError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
            open_tokenizer(path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no such file or folder: .*nowhere"):
        open_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"", "neither a SentencePiece model"),
        ("tokenizer.model", b"<html>not found</html>", "neither a SentencePiece model"),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15", "not a usable SentencePiece model"),
        ("tokenizer.json", b'{"error": "gone"}', "not a usable tokenizer.json"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type"', "not a usable tokenizer.json"),
        ("tokenizer.json", b'{"version": "\xff"}', "is not UTF-8"),
    ],
)
def test_damaged_files_get_one_line_that_names_them(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        open_tokenizer(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_sentencepiece_file_is_damaged(tmp_path: Path) -> None:
    data = sentencepiece_path().read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data[: len(data) // 2 + 3])
    with pytest.raises(TokenizerError, match="fetch the file again"):
        open_tokenizer(tmp_path)


def test_a_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    shutil.copy(installed_file("mistral-common", "tekken_240718.json"), tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"not a usable tokenizer.json"):
        open_tokenizer(tmp_path)


# What stands in the other files of a folder


@pytest.mark.parametrize("written", ["</s>", {"content": "</s>", "lstrip": False}])
def test_begin_and_end_tokens_come_from_the_tokenizer_config(
    tmp_path: Path, written: object
) -> None:
    _json(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": written})
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.adds_bos
    assert tokenizer.stop_ids == {2}


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("make", [_json, _sentencepiece])
def test_add_bos_token_of_the_tokenizer_config_decides(
    tmp_path: Path, make: Any, value: bool
) -> None:
    make(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": value})
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.adds_bos is value
    assert (tokenizer.encode("a", bos=True)[0] == 1) is value


def test_without_tokenizer_config_the_other_files_are_asked(tmp_path: Path) -> None:
    _json(tmp_path)
    write_json(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": [2, 5]})
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<unk>"}})
    assert open_tokenizer(tmp_path).eos_id == 0


def test_stop_ids_join_those_of_the_model_and_of_the_vocabulary(tmp_path: Path) -> None:
    """B05: the list in generation_config.json counts beside the tokenizer's one end token."""
    _json(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    assert open_tokenizer(tmp_path, model_stop_ids=(5, 9)).stop_ids == {2, 5, 9}
    assert open_tokenizer(tmp_path, model_stop_ids=(9,)).stop_ids == {2, 9}
    assert open_tokenizer(tmp_path).stop_ids == {2}


def test_the_end_of_turn_token_stops_although_only_the_end_of_text_is_configured(
    tmp_path: Path,
) -> None:
    """B05: a Llama 3 folder whose tokenizer_config names <|end_of_text|> only."""
    ranks_as_json(tmp_path / "tokenizer.json")
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|end_of_text|>"})
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.eos_id == N + 1
    assert tokenizer.stop_ids == {N + 1, N + 4}
    turn = tokenizer.encode("Hi.<|eot_id|>", special=True)
    assert tokenizer.decode(turn) == "Hi."


@pytest.mark.parametrize("make", [_json, _sentencepiece])
def test_tokens_added_by_the_tokenizer_config_are_found(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    added = {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "32000": {"content": "<|im_start|>", "special": True},
        "32001": {"content": "<|im_end|>", "special": True, "rstrip": True},
        "32002": {"content": "<think>", "special": False},
    }
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.n_ids == 32003
    assert tokenizer.control_ids["<|im_start|>"] == 32000
    assert tokenizer.eos_id == 32001
    hello = sentencepiece_processor().encode("Hello")
    text = "<|im_start|>Hello<|im_end|>  Hello"
    assert tokenizer.encode(text, special=True) == [32000, *hello, 32001, *hello]
    assert not {32000, 32001} & set(tokenizer.encode(text))
    assert tokenizer.encode("<think>Hello") == [32002, *hello]
    assert tokenizer.decode([32000, *hello, 32001, 32002]) == "Hello<think>"


def test_the_older_added_tokens_file_is_read(tmp_path: Path) -> None:
    _sentencepiece(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": 32001, "<|im_start|>": 32000})
    write_json(
        tmp_path / "special_tokens_map.json",
        {"additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>"}]},
    )
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.control_ids["<|im_end|>"] == 32001
    assert 32001 in tokenizer.stop_ids


def test_an_added_token_whose_id_belongs_to_another_piece_is_not_believed(tmp_path: Path) -> None:
    _sentencepiece(tmp_path)
    added = {"500": {"content": "<|wrong|>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    assert "<|wrong|>" not in open_tokenizer(tmp_path).control_ids


def test_the_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    _json(tmp_path)
    assert open_tokenizer(tmp_path).chat_template is None
    write_json(tmp_path / "chat_template.json", {"chat_template": STRICT})
    assert open_tokenizer(tmp_path).chat_template == STRICT
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": ZEPHYR})
    assert open_tokenizer(tmp_path).chat_template == ZEPHYR
    (tmp_path / "chat_template.jinja").write_text(CHATML, "utf-8")
    assert open_tokenizer(tmp_path).chat_template == CHATML


def test_of_named_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    _json(tmp_path)
    named = [{"name": "tool_use", "template": STRICT}, {"name": "default", "template": ZEPHYR}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert open_tokenizer(tmp_path).chat_template == ZEPHYR
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named[:1]})
    assert open_tokenizer(tmp_path).chat_template == STRICT


@pytest.mark.parametrize("content", ["{", "[]", '"\\'])
def test_a_damaged_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    _json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json is damaged"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("added", [{"x": {"content": "a"}}, {"5": {}}, {"5": "a"}, ["a"]])
def test_damaged_added_tokens_are_one_line(tmp_path: Path, added: object) -> None:
    _json(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(TokenizerError, match=r"added tokens in .* damaged"):
        open_tokenizer(tmp_path)
