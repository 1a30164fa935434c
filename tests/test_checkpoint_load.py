"""Weights into a model: strict names and shapes, lean on host memory, warned beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from offload_llama.checkpoint import load as load_module
from offload_llama.checkpoint.load import load_weights
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.sources import PIECE_ELEMENTS
from offload_llama.config import ModelConfig
from offload_llama.device import PinRefused, open_device
from offload_llama.errors import CheckpointError, DoesNotFit
from offload_llama.model import Transformer
from tests.helpers_checkpoint import (
    State,
    meta_config,
    meta_state,
    save_as_gguf,
    save_as_meta,
    tiny_hf_model,
)

CPU = open_device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, ModelConfig]:
    with torch.no_grad():
        _, model = tiny_hf_model(tmp_path_factory.mktemp("tiny"))
        return meta_state(model), meta_config(model)


def load(path: Path, **options: Any) -> Transformer:
    checkpoint = open_checkpoint(path)
    try:
        model = Transformer(checkpoint.config)
        settings: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "progress": False}
        load_weights(model, checkpoint, **(settings | options))
    finally:
        checkpoint.close()
    return model


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("save", [save_as_meta, save_as_gguf])
def test_missing_extra_and_misshapen_tensors_are_named(
    save: Any, tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    state, config = tiny
    path = tmp_path / "model.gguf" if save is save_as_gguf else tmp_path / "model"
    name = "layers.2.feed_forward.w3.weight"

    save({k: v for k, v in state.items() if k != name}, config, path)
    assert f"missing tensor {name}" in refused(path)

    save(state | {"layers.0.attention.wq.weight": torch.zeros(64, 32)}, config, path)
    assert "layers.0.attention.wq.weight has shape [64, 32]" in refused(path)


@pytest.mark.parametrize(
    "name", ["layers.0.attention.wq.bias", "layers.4.ffn_norm.weight", "adapter"]
)
def test_extra_tensors_are_named_in_metas_layout(
    name: str, tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    state, config = tiny
    save_as_meta(state | {name: torch.zeros(64)}, config, tmp_path)
    message = refused(tmp_path)
    assert name in message and "not in the model" in message


def test_many_missing_tensors_are_counted(tiny: tuple[State, ModelConfig], tmp_path: Path) -> None:
    state, config = tiny
    kept = {k: v for k, v in state.items() if not k.startswith("layers.3.")}
    save_as_meta(kept, config, tmp_path)
    assert "and 6 more" in refused(tmp_path)


def test_tensors_that_every_model_computes_itself_are_ignored(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, model = tiny_hf_model(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    load(folder)
    state = meta_state(model) | {"rope.freqs": torch.zeros(4)}
    load(save_as_meta(state, meta_config(model), tmp_path / "meta"))


def test_nothing_is_read_before_the_names_are_checked(
    tiny: tuple[State, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, config = tiny
    save_as_gguf(
        {k: v for k, v in state.items() if k != "norm.weight"}, config, tmp_path / "m.gguf"
    )
    monkeypatch.setattr(load_module, "_Readers", None)
    assert "missing tensor norm.weight" in refused(tmp_path / "m.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pinning", [True, False])
def test_weights_on_a_simulated_card_are_those_on_the_cpu(
    dtype: torch.dtype, pinning: bool, tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    """Also where the platform refuses to pin the staging buffer."""
    state, config = tiny
    path = save_as_gguf(state, config, tmp_path / "m.gguf")
    expected = dict(load(path, dtype=dtype).named_buffers())
    card = open_device("sim:rtx-3060-12gb")
    if not pinning:

        def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            raise PinRefused("no")

        card.pinned_empty = refuse  # type: ignore[method-assign]  # stands in for WSL
    model = load(path, device=card, dtype=dtype)
    with card.scope():
        found = {name: buffer.cpu() for name, buffer in model.named_buffers()}
        card.synchronize()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert all(buffer.device.type == "cuda" for buffer in model.buffers())
    card.close()


def test_tensors_larger_than_a_piece_are_put_together_in_order(tmp_path: Path) -> None:
    """Rows of every kind of source, over several pieces that end within the matrix."""
    config = ModelConfig(
        dim=192, n_layers=1, n_heads=3, n_kv_heads=1, head_dim=64, hidden_dim=256, vocab_size=20011
    )
    generator = torch.Generator().manual_seed(2)
    state = {
        name: torch.randn(shape, generator=generator)
        for name, shape in Transformer(config).expected_tensors().items()
    }
    assert state["tok_embeddings.weight"].numel() > 3 * PIECE_ELEMENTS
    even = config.vocab_size - 11
    halves = {n: v[:even] if v.shape[0] == config.vocab_size else v for n, v in state.items()}
    small = ModelConfig(**{f: getattr(config, f) for f in config.__slots__} | {"vocab_size": even})
    for path, expected in (
        (save_as_gguf(state, config, tmp_path / "m.gguf"), state),
        (save_as_meta(state, config, tmp_path / "one"), state),
        (save_as_meta(halves, small, tmp_path / "columns", 2), halves),
        (save_as_meta(halves, small, tmp_path / "rows", 2, embedding_axis=0), halves),
    ):
        model = load(path)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, expected[name]), (path, name)


def test_loaded_weights_outlive_their_files(
    tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    """No weight is a view of mapped memory, though Meta's are mapped and need no conversion."""
    state, config = tiny
    folder = save_as_meta(state, config, tmp_path / "m")
    model = load(folder)
    with (folder / "consolidated.00.pth").open("r+b") as file:
        file.write(b"\0" * (folder / "consolidated.00.pth").stat().st_size)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, state[name]), name


def test_torch_has_its_threads_back_after_loading(
    tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    state, config = tiny
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load(save_as_meta(state, config, tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar_goes_to_stderr_if_asked_for(
    progress: bool,
    tiny: tuple[State, ModelConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, config = tiny
    load(save_as_meta(state, config, tmp_path), progress=progress)
    out, err = capsys.readouterr()
    assert out == "" and ("loading" in err) is progress


def test_preflight_stops_a_load_to_the_cpu_but_not_to_a_card(
    tiny: tuple[State, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B38."""
    state, config = tiny
    path = save_as_gguf(state, config, tmp_path / "m.gguf")
    need = sum(tensor.nbytes for tensor in state.values())
    monkeypatch.setattr(load_module, "host_memory_available", lambda: need - 1)
    with pytest.raises(DoesNotFit) as caught:
        load(path)
    assert caught.value.needed_bytes == need
    load(path, dtype=torch.bfloat16)
    load(path, device=open_device("sim:rtx-3060-12gb"))


def test_closed_checkpoint_lets_go_of_its_files(
    tiny: tuple[State, ModelConfig], tmp_path: Path
) -> None:
    """Also of the mapped shards, which nobody would close otherwise."""
    state, config = tiny
    save_as_meta(state, config, tmp_path / "meta", 2)
    save_as_gguf(state, config, tmp_path / "m.gguf")
    for path in (tmp_path / "meta", tmp_path / "m.gguf"):
        checkpoint = open_checkpoint(path)
        mapped_or_open = held_files(tmp_path)
        checkpoint.close()
        checkpoint.close()
        assert mapped_or_open and not held_files(tmp_path)
        assert checkpoint.names() == []


def held_files(folder: Path) -> set[str]:
    """Return the files below a folder that this process has open or mapped."""
    process = psutil.Process()
    paths = [file.path for file in (*process.open_files(), *process.memory_maps())]
    return {path for path in paths if path.startswith(str(folder))}
