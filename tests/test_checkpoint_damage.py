"""Damaged files of every format: one line with path, size and cause, and no huge allocation."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_llama.checkpoint.gguf_file import open_gguf
from offload_llama.checkpoint.meta import open_meta
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.safetensors_file import read_safetensors
from offload_llama.errors import CheckpointError
from tests.helpers_checkpoint import meta_config, meta_state, save_as_gguf, save_as_meta
from tests.helpers_checkpoint import tiny_hf_model as make_tiny

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4976698672\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound weights file of each format."""
    folder = tmp_path_factory.mktemp("sound")
    with torch.no_grad():
        _, model = make_tiny(folder / "hf")
        state, config = meta_state(model), meta_config(model)
    return {
        "safetensors": folder / "hf" / "model.safetensors",
        "pth": save_as_meta(state, config, folder / "meta") / "consolidated.00.pth",
        "gguf": save_as_gguf(state, config, folder / "tiny.gguf"),
    }


@pytest.fixture
def damaged(models: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Change a copy of the weights file; returns the message, checked for form and memory."""

    def check(kind: str, change: Callable[[bytes], bytes], match: str) -> str:
        data = change(models[kind].read_bytes())
        path = tmp_path / models[kind].name
        path.write_bytes(data)
        if kind != "gguf":
            settings = "config.json" if kind == "safetensors" else "params.json"
            (tmp_path / settings).write_text((models[kind].parent / settings).read_text())
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=match) as caught:
                open_checkpoint(tmp_path if kind != "gguf" else path)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        message = str(caught.value)
        assert str(path) in message and f"{len(data):,} bytes" in message
        assert "\n" not in message and caught.value.exit_code == 4
        assert peak_bytes < 2**24
        return message

    yield check


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("kind", ["safetensors", "pth", "gguf"])
@pytest.mark.parametrize(
    ("content", "match"),
    [(POINTER, "Git LFS pointer.*git lfs pull"), (PAGE, "web page"), (b"", "empty file")],
)
def test_placeholders_are_named_as_what_they_are(
    kind: str, content: bytes, match: str, damaged: Callable[..., str]
) -> None:
    """B37: what a clone without LFS, a login page or a failed download leaves."""
    damaged(kind, lambda _: content, match)


@pytest.mark.parametrize("kind", ["safetensors", "pth", "gguf"])
def test_files_cut_in_half_are_called_cut_short(kind: str, damaged: Callable[..., str]) -> None:
    """B37: the data is incomplete although the head may be whole."""
    damaged(kind, half, "cut short")


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_files_that_lack_their_last_byte_are_called_cut_short(
    kind: str, damaged: Callable[..., str]
) -> None:
    """B37."""
    damaged(kind, lambda data: data[:-1], "cut short")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:7], "too short for a safetensors file"),
        (lambda data: struct.pack("<Q", 2**63) + data[8:], "header of 9,223,372,036,854,775,808"),
        (lambda data: struct.pack("<Q", 10**8 + 1) + data[8:], "header of 100,000,001"),
        (lambda data: data[:20], "cut short"),
        (lambda data: data[:8] + b"x" + data[9:], "no JSON"),
    ],
)
def test_safetensors_headers_that_make_no_sense_are_refused(
    change: Callable[[bytes], bytes], match: str, damaged: Callable[..., str]
) -> None:
    """B37: the first 8 bytes are no length to trust."""
    damaged("safetensors", change, match)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "cannot be 12 bytes"),
        ({"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]}, "entry of tensor a"),
        ({"dtype": "F32", "shape": [4]}, "entry of tensor a"),
        ({"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}, "entry of tensor a"),
        ({"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}, "F8_E4M3; supported: F32"),
        ({"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}, "cut short"),
        ([], "entry of tensor a"),
    ],
)
def test_safetensors_entries_that_contradict_themselves_are_refused(
    entry: object, match: str, tmp_path: Path
) -> None:
    """B37: no entry makes the reader allocate or read beyond the file."""
    header = json.dumps({"a": entry, "__metadata__": {"format": "pt"}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(CheckpointError, match=match):
        read_safetensors(path)


def test_safetensors_of_the_reference_library_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(4, 2).to(torch.bfloat16),
        "c": torch.randn(7).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file, found = read_safetensors(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(found[name].rows(0, len(tensor)), tensor)
    assert torch.equal(found["b"].rows(1, 3), tensors["b"][1:3])
    file.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file, it begins with b'GGML'"),
        (lambda data: data[:4] + struct.pack("<I", 99) + data[8:], "GGUF version 99"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1,"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:6], "cut short"),
        (lambda data: data[:100], "cut short"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "cut short or damaged"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "damaged"),
        (lambda data: data[:24] + struct.pack("<Q", 2**63) + data[32:], "cut short or damaged"),
    ],
)
def test_gguf_heads_that_make_no_sense_are_refused(
    change: Callable[[bytes], bytes], match: str, damaged: Callable[..., str]
) -> None:
    """B37."""
    damaged("gguf", change, match)


def test_gguf_cut_at_every_place_of_its_head_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """B37: a download can stop anywhere."""
    data = models["gguf"].read_bytes()
    path = tmp_path / "cut.gguf"
    for n_bytes in range(8, 4000, 97):
        path.write_bytes(data[:n_bytes])
        with pytest.raises(CheckpointError, match="cut short"):
            open_gguf(path)


@pytest.mark.parametrize("where", [0.1, 0.9])
def test_gguf_tensor_offsets_beyond_the_file_are_refused(
    where: float, models: dict[str, Path], tmp_path: Path
) -> None:
    """B37: cut tensor data, by little or much."""
    data = models["gguf"].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * where) + 5000])
    with pytest.raises(CheckpointError, match=r"cut short, [\d,]+ bytes expected"):
        open_gguf(path)


def test_pth_that_is_no_archive_says_how_to_convert_it(damaged: Callable[..., str]) -> None:
    """B37: the format torch wrote before 1.6."""
    damaged("pth", lambda _: b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." * 9, "not a torch archive")


def test_pth_that_would_run_code_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """Only tensors are unpickled."""
    (tmp_path / "params.json").write_text((models["pth"].parent / "params.json").read_text())
    torch.save({"tok_embeddings.weight": print}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="more than tensors") as caught:
        open_meta(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"a.weight": [1, 2]}, "'a.weight' is not a tensor"),
        ({"a.weight": torch.ones(4, dtype=torch.int8)}, "dtype torch.int8; supported"),
        ([torch.ones(4)], "no named tensors"),
    ],
)
def test_pth_with_other_content_is_refused(
    content: object, match: str, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "params.json").write_text((models["pth"].parent / "params.json").read_text())
    torch.save(content, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=match):
        open_meta(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "params.json"])
@pytest.mark.parametrize("content", [POINTER, PAGE, b"", b'{"dim": 1', b"\xff\xfe"])
def test_damaged_settings_give_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    """B37: the small files of a clone may be pointers as well."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_file_that_shrinks_after_it_was_opened_is_reported(
    models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(models["gguf"].read_bytes())
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="cut short"):
        list(checkpoint.tensors())
    checkpoint.close()
