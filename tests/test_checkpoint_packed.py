"""Models in 8 and 4 bits: packed while they load, saved, and read back."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama import LLM, SamplingParams
from offload_llama.checkpoint.headers import model_shape
from offload_llama.checkpoint.load import load_weights
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.packed import SETTINGS, WEIGHTS
from offload_llama.checkpoint.quantize import quantize_checkpoint
from offload_llama.checkpoint.shapes import empty_weights
from offload_llama.checkpoint.targets import loaded_bytes
from offload_llama.cli import run_command
from offload_llama.config import ModelConfig
from offload_llama.console import Console
from offload_llama.cost.packing import PACKED
from offload_llama.device import Device, open_device
from offload_llama.errors import CheckpointError, ConfigError, DoesNotFit
from offload_llama.model import Transformer
from offload_llama.saving import save_packed
from offload_llama.weights import QuantEmbedding, quantize
from offload_llama.weights.kernels import CpuInt4, unpacked
from tests.helpers_checkpoint import (
    State,
    meta_config,
    meta_state,
    save_as_gguf,
    save_as_meta,
    tiny_hf_model,
)
from tests.helpers_model import make_cache, prefill, run_step

CPU = open_device("cpu")
CARDS = ("sim:rtx-3060-12gb", "sim:rtx-2060-12gb")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tiny(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, ModelConfig]:
    with torch.no_grad():
        folder = tmp_path_factory.mktemp("tiny")
        _, model = tiny_hf_model(folder, tie_word_embeddings=request.param)
        return folder, meta_state(model), meta_config(model)


def load(path: Path, device: Device = CPU, **options: Any) -> Transformer:
    checkpoint = open_checkpoint(path)
    try:
        model = Transformer(checkpoint.config)
        settings: dict[str, Any] = {"dtype": torch.float32, "progress": False}
        load_weights(model, checkpoint, device=device, **(settings | options))
    finally:
        checkpoint.close()
    return model


def buffers(model: Transformer) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def same(left: Transformer, right: Transformer, device: Device = CPU) -> bool:
    a, b = buffers(left), buffers(right)
    with device.scope():
        equal = [torch.equal(a[name].cpu(), b[name].cpu()) for name in a]
    return a.keys() == b.keys() and all(equal)


def logits(model: Transformer, device: Device, ids: list[int], policy: str = "gpu") -> torch.Tensor:
    with device.scope():
        cache = make_cache(model, device, policy)
        out = [prefill(model, cache, 0, ids, 16)]
        out += [run_step(model, cache, {0: [i]})[0] for i in ids[:3]]
        cache.close()
    return torch.stack(out)


def test_a_matrix_is_packed_from_the_file_s_rows(tiny: tuple[Path, State, ModelConfig]) -> None:
    """wq, wk and wv lie in one matrix, and so do w1 and w3."""
    folder, state, _ = tiny
    found = buffers(load(folder, weights="int4-g32"))
    names = [f"layers.1.attention.{name}.weight" for name in ("wq", "wk", "wv")]
    codes = quantize(torch.cat([state[name] for name in names]), "int4-g32")
    kept = CpuInt4().pack(codes, torch.device("cpu"))
    for name, tensor in kept.items():
        assert torch.equal(found[f"layers.1.attention.wq.{name}"], tensor)
    assert not any(".wk." in name or ".w3." in name for name in found)
    rows = quantize(state["tok_embeddings.weight"], "int8")
    assert torch.equal(found["tok_embeddings.codes"], rows.codes)
    assert torch.equal(found["layers.2.ffn_norm.weight"], state["layers.2.ffn_norm.weight"])


@pytest.mark.parametrize("weights", PACKED)
def test_a_packed_model_answers_nearly_like_the_plain_one(
    weights: str, tiny: tuple[Path, State, ModelConfig]
) -> None:
    """And as the plain one does whose weights are what the codes stand for, up to bfloat16."""
    folder, state, config = tiny
    packed = load(folder, weights=weights)
    decoded = Transformer(config)
    for name, value in state.items():
        head = name in ("tok_embeddings.weight", "output.weight")
        kept = value if value.ndim == 1 else quantize(value, "int8" if head else weights)
        decoded.set_tensor(
            name, kept if isinstance(kept, torch.Tensor) else kept.dequantize(torch.float32)
        )
    decoded.tie_output()
    ids = list(range(5, 45))
    ours, right = logits(packed, CPU, ids), logits(decoded, CPU, ids)
    assert (ours - right).abs().max() < 0.03 * right.abs().max()
    plain = logits(load(folder), CPU, ids)
    loss = (ours - plain).norm() / plain.norm()
    assert loss < {"int8": 0.05, "int4-g32": 0.35, "int4": 0.6}[weights]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_streamed_equals_resident_bit_for_bit_with_packed_weights(
    weights: str, card: str, dtype: torch.dtype, tiny: tuple[Path, State, ModelConfig]
) -> None:
    device = open_device(card)
    model = load(tiny[0], device, weights=weights, dtype=dtype)
    ids = list(range(5, 75))
    resident = logits(model, device, ids)
    assert torch.equal(resident, logits(model, device, ids, "offload"))
    on_cpu = logits(load(tiny[0], weights=weights), CPU, ids)
    assert (resident - on_cpu).abs().max() < 0.05 * on_cpu.abs().max()
    assert device.card.errors == []


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("card", CARDS)
def test_what_is_loaded_takes_the_bytes_that_were_checked_beforehand(
    weights: str, card: str, tiny: tuple[Path, State, ModelConfig]
) -> None:
    folder, state, config = tiny
    device = open_device(card)
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    model = load(folder, device, weights=weights, dtype=torch.float16)
    held = {name: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()}
    with device.scope():
        needed = loaded_bytes(shapes, device.torch_device, torch.float16, weights)
        empty = Transformer(config)
        empty_weights(empty, device=device, dtype=torch.float16, weights=weights)
    assert needed == sum(b.numel() * b.element_size() for b in model.buffers())
    assert held == {name: (tuple(b.shape), b.dtype) for name, b in empty.named_buffers()}


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("layout", ["hf", "meta", "gguf"])
def test_a_saved_model_has_the_weights_that_loading_would_have_packed(
    weights: str, layout: str, tiny: tuple[Path, State, ModelConfig], tmp_path: Path
) -> None:
    folder, state, config = tiny
    source = {
        "hf": lambda: folder,
        "meta": lambda: save_as_meta(state, config, tmp_path / "meta"),
        "gguf": lambda: save_as_gguf(state, config, tmp_path / "m.gguf"),
    }[layout]()
    saved = quantize_checkpoint(source, tmp_path / "saved", weights=weights)
    with (
        closing(open_checkpoint(saved)) as checkpoint,
        closing(open_checkpoint(source)) as original,
    ):
        assert (checkpoint.format, checkpoint.weights) == ("packed", weights)
        assert checkpoint.config == original.config
        assert checkpoint.stop_token_ids == original.stop_token_ids
        assert checkpoint.n_bytes() < original.n_bytes() / 2
    assert model_shape(str(saved)).config == original.config
    assert same(load(saved, weights=weights), load(source, weights=weights))
    device = open_device(CARDS[0])
    ours, theirs = (load(path, device, weights=weights) for path in (saved, source))
    assert same(ours, theirs, device)


def test_a_saved_model_can_be_had_in_other_weights(
    tiny: tuple[Path, State, ModelConfig], tmp_path: Path
) -> None:
    folder, state, _ = tiny
    saved = quantize_checkpoint(folder, tmp_path / "saved", weights="int4")
    name = "layers.0.attention.wo.weight"
    decoded = quantize(state[name], "int4").dequantize(torch.float32)
    assert torch.equal(buffers(load(saved))[name], decoded)
    again = buffers(load(saved, weights="int8"))["layers.0.attention.wo.codes"]
    assert torch.equal(again, quantize(decoded, "int8").codes)


def test_a_saved_model_brings_its_vocabulary(smollm2_path: Path, tmp_path: Path) -> None:
    """The real one, from GGUF, and run as it was saved; doing it again copies what is there."""
    first = quantize_checkpoint(smollm2_path, tmp_path / "one", weights="int4-g32")
    second = quantize_checkpoint(first, tmp_path / "two", weights="int4-g32")
    assert (first / WEIGHTS).read_bytes() == (second / WEIGHTS).read_bytes()
    with LLM.load(str(second), device="cpu", ctx=64) as llm:
        assert isinstance(llm.model.tok_embeddings, QuantEmbedding)
        ids = llm.encode("The capital of France is")
        [done] = llm.generate([ids], SamplingParams(max_tokens=2))
    with LLM.load(str(smollm2_path), device="cpu", ctx=64) as plain:
        assert ids == plain.encode("The capital of France is")
        template = plain.chat_template
    assert "Paris" in done.text and llm.chat_template == template


def test_a_real_model_s_4_bit_groups_come_through(smollm2_path: Path) -> None:
    """Its matrices are Q4_1: groups of 32 keep the codes, so only scales are rounded."""
    checkpoint = open_checkpoint(smollm2_path)
    source = checkpoint.sources["layers.7.feed_forward.w2.weight"]
    rows = source.rows(0, source.shape[0])
    checkpoint.close()
    error = (quantize(rows, "int4-g32").dequantize(torch.float32) - rows).norm() / rows.norm()
    assert error < 2**-8


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"format": 9}, "format 9"),
        ({"weights": "int3"}, "damaged"),
        ({"config": {"dim": 64}}, "damaged"),
        ({"config": None}, "damaged"),
        ({"stop_token_ids": ["x"]}, "damaged"),
    ],
)
def test_damaged_settings_of_a_saved_model_are_named(
    damage: dict[str, Any], said: str, tiny: tuple[Path, State, ModelConfig], tmp_path: Path
) -> None:
    saved = quantize_checkpoint(tiny[0], tmp_path / "saved")
    settings = json.loads((saved / SETTINGS).read_text())
    (saved / SETTINGS).write_text(json.dumps(settings | damage))
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(saved)
    assert SETTINGS in str(caught.value) and "\n" not in str(caught.value)


def test_a_saved_matrix_that_lacks_its_scales_is_named(
    tiny: tuple[Path, State, ModelConfig], tmp_path: Path
) -> None:
    saved = quantize_checkpoint(tiny[0], tmp_path / "saved")
    data = (saved / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    del table["layers.2.attention.wo.weight.scales"]
    text = json.dumps(table).encode().ljust(size)
    (saved / WEIGHTS).write_bytes(data[:8] + text + data[8 + size :])
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention\.wo\.weight is not complete"):
        open_checkpoint(saved)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing_behind(
    tiny: tuple[Path, State, ModelConfig], tmp_path: Path
) -> None:
    folder, state, config = tiny
    with pytest.raises(ConfigError, match="--weights fp16 cannot be saved; use int8, int4"):
        quantize_checkpoint(folder, tmp_path / "a", weights="fp16")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(folder, folder)
    path = save_as_gguf(state, config, tmp_path / "m.gguf")
    checkpoint_bytes = path.read_bytes()
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    path.write_bytes(checkpoint_bytes[: len(checkpoint_bytes) // 2])
    with pytest.raises(CheckpointError, match="cut short"):
        quantize_checkpoint(path, tmp_path / "b")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_rows_of_no_whole_groups_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with torch.no_grad():
        folder, _ = tiny_hf_model(tmp_path / "odd", intermediate_size=200)
    with pytest.raises(ConfigError, match=r"multiple of 32.*w2\.weight has 200.*--weights int8"):
        load(folder, weights="int4")
    load(folder, weights="int8")


def test_packed_weights_that_exceed_the_card_are_refused_with_their_own_size(
    tiny: tuple[Path, State, ModelConfig],
) -> None:
    folder, state, _ = tiny
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    device = open_device("sim:rtx-3060-12gb")
    with device.scope():
        needed = loaded_bytes(shapes, device.torch_device, torch.float16, "int4")
        device.card.take_memory(device.memory().free_bytes - needed + 1)
    with pytest.raises(DoesNotFit) as caught:
        load(folder, device, weights="int4", dtype=torch.float16)
    assert caught.value.needed_bytes == needed


def test_unpacked_codes_of_a_loaded_matrix_are_those_of_the_file(
    tiny: tuple[Path, State, ModelConfig],
) -> None:
    folder, state, _ = tiny
    found = buffers(load(folder, weights="int4"))
    name = "layers.3.feed_forward.w2"
    codes = unpacked(found[f"{name}.packed"], found[f"{name}.scales"])
    assert torch.equal(codes.codes, quantize(state[f"{name}.weight"], "int4").codes)


def test_the_command_says_what_was_saved_and_how_to_run_it(
    tiny: tuple[Path, State, ModelConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "small")
    assert save_packed(str(tiny[0]), target, weights="int8", console=Console()) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"{target}: weights in int8, " in err and f"--model {target}" in err
    with pytest.raises(CheckpointError, match="is not empty; name a folder"):
        save_packed(str(tiny[0]), target, weights="int8", console=Console())


def test_quantize_saves_what_generate_loads_and_says_what_is_wrong(
    tiny: tuple[Path, State, ModelConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "packed")
    assert run_command(["quantize", str(tiny[0]), target, "--weights", "int4-g32", "-q"]) == 0
    assert json.loads((tmp_path / "packed" / SETTINGS).read_text("utf-8"))
    with closing(open_checkpoint(target)) as checkpoint:
        assert checkpoint.weights == "int4-g32"
    capsys.readouterr()
    for line, code, words in (
        (["quantize", str(tiny[0]), target], 4, "name a folder that does not exist yet"),
        (["quantize", "no-such-model", str(tmp_path / "x")], 4, "no-such-model"),
        (["quantize", str(tiny[0]), target, "--weights", "int3"], 2, "none of int8, int4, int4-g"),
        (["quantize", str(tiny[0])], 2, "Missing argument 'DST'"),
    ):
        assert run_command(line) == code
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err
