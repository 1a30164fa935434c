"""GGUF files: every tensor type as the `gguf` package decodes it, and none read as another."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from offload_llama.checkpoint.dequant import TENSOR_TYPES
from offload_llama.checkpoint.gguf_file import open_gguf, read_metadata
from offload_llama.checkpoint.gguf_header import read_header
from offload_llama.config import ModelConfig
from offload_llama.errors import CheckpointError
from tests.helpers_checkpoint import save_as_gguf

# Where each type keeps its float16 scales within a block.
SCALE_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
CONFIG = ModelConfig(
    dim=256, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512, vocab_size=96
)
W2 = "layers.0.feed_forward.w2.weight"


def tiny_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "tok_embeddings.weight": (96, 256),
        "layers.0.attention.wq.weight": (256, 256),
        "layers.0.attention.wk.weight": (128, 256),
        "layers.0.attention.wv.weight": (128, 256),
        "layers.0.attention.wo.weight": (256, 256),
        "layers.0.feed_forward.w1.weight": (512, 256),
        W2: (256, 512),
        "layers.0.feed_forward.w3.weight": (512, 256),
        "layers.0.attention_norm.weight": (256,),
        "layers.0.ffn_norm.weight": (256,),
        "norm.weight": (256,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Random bytes as rows of a quantised type, with finite scales."""
    kind = next(t for t in TENSOR_TYPES.values() if t.name == name)
    n_blocks = rows * columns // kind.block_elements
    blocks = np.random.default_rng(5).integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    for offset in SCALE_OFFSETS[name]:
        blocks[:, offset + 1] &= 0xBF
    return blocks.reshape(rows, -1)


def write(path: Path, packed: np.ndarray[Any, Any] | None = None, kind: str = "F32") -> Path:
    """Write the tiny model; w2 comes as `packed` bytes of another type if given."""
    state = tiny_state()
    if packed is None:
        return save_as_gguf(state, CONFIG, path, types={W2: kind})
    del state[W2]
    original = gguf.GGUFWriter.write_header_to_file

    def add_then_write(writer: Any, *args: Any, **kwargs: Any) -> None:
        writer.add_tensor(
            "blk.0.ffn_down.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind]
        )
        original(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_then_write)
        return save_as_gguf(state, CONFIG, path)


def patch_entry(
    path: Path, *, columns: int | None = None, type_id: int | None = None, offset: int | None = None
) -> Path:
    """Change one line of the tensor table in place: that of w2."""
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4
    for shift, layout, value in ((0, "<Q", columns), (16, "<I", type_id), (20, "<Q", offset)):
        if value is not None:
            struct.pack_into(layout, data, at + shift, value)
    path.write_bytes(data)
    return path


def tensor(path: Path, name: str) -> torch.Tensor:
    checkpoint = open_gguf(path)
    found = {each: value for each, value, _ in checkpoint.tensors()}
    checkpoint.close()
    return found[name]


@pytest.mark.parametrize("kind", SCALE_OFFSETS)
def test_quantised_values_equal_the_gguf_package_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """B62: read back from a file, shape reversed to (rows, columns)."""
    packed = random_blocks(kind, 256, 512)
    found = tensor(write(tmp_path / "m.gguf", packed, kind), W2)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
    assert found.shape == (256, 512)
    assert torch.isfinite(found).all() and found.unique().numel() > 100
    assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_plain_floats_come_in_their_own_dtype(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """B62."""
    found = tensor(write(tmp_path / "m.gguf", kind=kind), W2)
    assert found.dtype is dtype
    assert torch.equal(found, tiny_state()[W2].to(dtype))


def test_every_supported_type_has_the_packages_block_size() -> None:
    for type_id, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(type_id)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_elements, kind.block_bytes)


@pytest.mark.parametrize(
    ("type_id", "name"), [(20, "IQ4_NL"), (39, "id 39"), (200, "unknown id 200"), (9, "Q8_1")]
)
def test_other_types_are_refused_at_open_with_the_supported_list(
    type_id: int, name: str, tmp_path: Path
) -> None:
    """B62: known to the package or not, nothing falls through to another type."""
    path = patch_entry(write(tmp_path / "m.gguf"), type_id=type_id)
    with pytest.raises(CheckpointError, match=name) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "blk.0.ffn_down.weight" in message and "Q4_K, Q5_K, Q6_K, BF16" in message


def test_rows_that_are_no_multiple_of_the_block_are_refused(tmp_path: Path) -> None:
    """B62."""
    packed = random_blocks("Q4_K", 256, 512)
    path = patch_entry(write(tmp_path / "m.gguf", packed, "Q4_K"), columns=480)
    with pytest.raises(CheckpointError, match=r"ffn_down.*480 values.*block of 256"):
        open_gguf(path)


def test_vector_in_a_block_type_is_read_by_whole_blocks(tmp_path: Path) -> None:
    norm = "layers.0.ffn_norm.weight"
    path = save_as_gguf(tiny_state(), CONFIG, tmp_path / "m.gguf", types={norm: "Q8_0"})
    packed = gguf.quantize(tiny_state()[norm].numpy(), gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(tensor(path, norm), torch.from_numpy(expected))


@pytest.fixture(scope="module")
def packages_reader(smollm2_path: Path) -> Any:
    """The default model as the `gguf` package reads it, which takes seconds."""
    return gguf.GGUFReader(smollm2_path)


def test_header_equals_what_the_package_reads(smollm2_path: Path, packages_reader: Any) -> None:
    """The default model's: a vocabulary, a template, floats, booleans and all tensor entries."""
    ours, theirs = read_header(smollm2_path), packages_reader
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        if key != "tokenizer.ggml.merges":
            assert ours.metadata[key] == theirs.fields[key].contents(), key
    assert ours.metadata["tokenizer.ggml.merges"][:99] == theirs.fields[
        "tokenizer.ggml.merges"
    ].contents(slice(0, 99))
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.type_id) == (other.name, int(other.tensor_type))
        assert list(mine.shape) == other.shape.tolist()[::-1]
        assert ours.data_start + mine.offset == other.data_offset


def test_default_model_opens_with_its_settings(smollm2_path: Path) -> None:
    checkpoint = open_gguf(smollm2_path)
    config = checkpoint.config
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.rope_theta, config.max_seq_len) == (64, 100000.0, 8192)
    assert config.tied_output and checkpoint.stop_token_ids == (2,)
    assert read_metadata(smollm2_path)["tokenizer.ggml.pre"] == "smollm"
    checkpoint.close()


def test_default_models_matrices_equal_the_packages_dequantisation(
    smollm2_path: Path, packages_reader: Any
) -> None:
    theirs = {each.name: each for each in packages_reader.tensors}
    checkpoint = open_gguf(smollm2_path)
    for ours, name in {
        "layers.29.attention.wk.weight": "blk.29.attn_k.weight",
        "layers.7.feed_forward.w2.weight": "blk.7.ffn_down.weight",
    }.items():
        source = checkpoint.sources[ours]
        expected = gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert torch.equal(source.rows(0, source.shape[0]), torch.from_numpy(expected))
    checkpoint.close()


def test_stop_ids_come_from_the_metadata(tmp_path: Path) -> None:
    def with_ids(writer: Any, *args: Any) -> None:
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)
        original(writer, *args)

    original = gguf.GGUFWriter.write_header_to_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_ids)
        path = write(tmp_path / "m.gguf")
    checkpoint = open_gguf(path)
    assert checkpoint.stop_token_ids == (2, 7)
    checkpoint.close()


def test_one_part_of_a_split_model_says_how_to_join_it(tmp_path: Path) -> None:
    def with_parts(writer: Any, *args: Any) -> None:
        writer.add_uint16("split.count", 3)
        original(writer, *args)

    original = gguf.GGUFWriter.write_header_to_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_parts)
        path = write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*--merge"):
        open_gguf(path)


def test_names_that_stand_twice_in_the_table_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_gate", b"blk.0.ffn_down", 1))
    with pytest.raises(CheckpointError, match="twice"):
        open_gguf(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen2", 1))
    with pytest.raises(CheckpointError, match="'qwen2' is not supported"):
        open_gguf(path)


def test_missing_rope_dimension_and_key_length_are_filled_in(tmp_path: Path) -> None:
    absent = {
        "rope.dimension_count": None,
        "attention.key_length": None,
        "attention.value_length": None,
        "vocab_size": None,
    }
    path = save_as_gguf(tiny_state(), CONFIG, tmp_path / "m.gguf", metadata=absent)
    checkpoint = open_gguf(path)
    assert (checkpoint.config.head_dim, checkpoint.config.vocab_size) == (64, 96)
    checkpoint.close()
