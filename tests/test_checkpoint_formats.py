"""One model in three layouts: our logits equal transformers', whichever file they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama.checkpoint.api import Checkpoint
from offload_llama.checkpoint.load import load_weights
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.sources import InterleavedRows
from offload_llama.config import ModelConfig
from offload_llama.device import open_device
from offload_llama.errors import CheckpointError
from offload_llama.model import Transformer
from tests.helpers_checkpoint import (
    LLAMA3_ROPE,
    State,
    hf_logits,
    meta_config,
    meta_state,
    save_as_gguf,
    save_as_meta,
    tiny_hf_model,
)
from tests.helpers_model import make_cache, run_step

# Both sides compute in float32; the sums differ in order only.
TOLERANCE = 1e-5
IDS = [1 + (i * 37 + i * i) % 500 for i in range(50)]

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "a key/value head for each query head": {"num_key_value_heads": 8},
    "tied": {"tie_word_embeddings": True},
    "a wide head": {"head_dim": 16},
    "Llama-3 rope": {
        "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
        "max_position_embeddings": 16384,
    },
    "Llama-3 rope, tied": {
        "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "factor": 32.0},
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
}
LAYOUTS = ("hf", "hf in shards", "meta", "meta in 2 shards", "meta in 2 shards, rows", "gguf")


@dataclass
class Saved:
    """One model as transformers has it, and as files."""

    model: Any
    folder: Path
    state: State
    config: ModelConfig

    def save(self, layout: str, folder: Path, state: State | None = None) -> Path:
        state = self.state if state is None else state
        match layout:
            case "hf":
                return self.folder
            case "hf in shards":
                self.model.save_pretrained(folder, max_shard_size="100KB")
                assert len(list(folder.glob("*.safetensors"))) > 4
                return folder
            case "meta":
                return save_as_meta(state, self.config, folder)
            case "meta in 2 shards":
                return save_as_meta(state, self.config, folder, 2)
            case "meta in 2 shards, rows":
                return save_as_meta(state, self.config, folder, 2, embedding_axis=0)
            case _:
                return save_as_gguf(state, self.config, folder / "tiny.gguf")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Models by variant, made once."""
    made: dict[str, Saved] = {}

    def get(variant: str) -> Saved:
        if variant not in made:
            folder = tmp_path_factory.mktemp("tiny")
            with torch.no_grad():
                _, model = tiny_hf_model(folder, **VARIANTS[variant])
                made[variant] = Saved(model, folder, meta_state(model), meta_config(model))
        return made[variant]

    return get


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(checkpoint.config)
    load_weights(model, checkpoint, device=open_device("cpu"), dtype=dtype, progress=False)
    checkpoint.close()
    return model


def our_logits(path: Path | Checkpoint, ids: list[int] = IDS) -> torch.Tensor:
    model = load(open_checkpoint(path) if isinstance(path, Path) else path)
    cache = make_cache(model, open_device("cpu"))
    logits = run_step(model, cache, {0: ids}, logits="all")
    cache.close()
    return logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(
    variant: str, layout: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """B07, B08, B29: any layout gives the logits of the model it was made from."""
    source = saved(variant)
    path = source.save(layout, tmp_path / "model")
    assert distance(our_logits(path), hf_logits(source.model, IDS)) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_config_are_those_of_the_model(
    variant: str, layout: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved(variant)
    checkpoint = open_checkpoint(source.save(layout, tmp_path / "model"))
    expected = dict(source.state)
    config = source.config
    if checkpoint.format == "meta" and config.tied_output:
        # Meta's releases write the output matrix out.
        expected["output.weight"] = expected["tok_embeddings.weight"]
        config = replace(config, tied_output=False)
    found = {name: tensor for name, tensor, _ in checkpoint.tensors()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert checkpoint.n_bytes() == sum(tensor.nbytes for tensor in expected.values())
    if checkpoint.format == "gguf":
        # Scaling comes as divisors and the norm's epsilon as float32.
        config = replace(
            config,
            norm_eps=checkpoint.config.norm_eps,
            rope_scaling=None,
            rope_freq_factors=checkpoint.config.rope_freq_factors,
        )
    assert checkpoint.config == config
    checkpoint.close()


@pytest.mark.parametrize("planted", ["wq", "wk"])
@pytest.mark.parametrize("layout", ["meta", "gguf"])
def test_half_split_rows_in_metas_layouts_change_the_logits(
    planted: str, layout: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """B07: the comparison with transformers does see a wrong row order."""
    source = saved("grouped heads")
    module = {"wq": "q_proj", "wk": "k_proj"}[planted]
    theirs = source.model.state_dict()
    wrong = dict(source.state)
    for layer in range(source.config.n_layers):
        wrong[f"layers.{layer}.attention.{planted}.weight"] = theirs[
            f"model.layers.{layer}.self_attn.{module}.weight"
        ]
    path = source.save(layout, tmp_path / "model", wrong)
    assert distance(our_logits(path), hf_logits(source.model, IDS)) > 100 * TOLERANCE


@pytest.mark.parametrize("fault", ["rows as they lie", "k as one long head"])
def test_wrong_row_order_when_reading_hf_changes_the_logits(
    fault: str, saved: Callable[[str], Saved]
) -> None:
    """B07: neither left out nor done with the wrong head count does the un-permuting pass."""
    source = saved("grouped heads")
    checkpoint = open_checkpoint(source.folder)
    wrong = dict(checkpoint.sources)
    for name, tensor in checkpoint.sources.items():
        if isinstance(tensor, InterleavedRows):
            if fault == "rows as they lie":
                wrong[name] = tensor.inner
            elif name.endswith("wk.weight"):
                wrong[name] = InterleavedRows(tensor.inner, tensor.shape[0])
    checkpoint.sources = wrong
    assert distance(our_logits(checkpoint), hf_logits(source.model, IDS)) > 100 * TOLERANCE


@pytest.mark.parametrize("layout", ["hf", "meta", "gguf"])
def test_theta_reaches_the_model_in_every_layout(layout: str, tmp_path: Path) -> None:
    """B20: theta 500000 differs from 10000 far into the context, and equals transformers'."""
    ids = [1 + (i * 31) % 500 for i in range(401)]
    logits = {}
    for theta in (10000.0, 500000.0):
        _, model = tiny_hf_model(
            tmp_path / f"hf{theta}", rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
        source = Saved(model, tmp_path / f"hf{theta}", meta_state(model), meta_config(model))
        path = source.save(layout, tmp_path / f"model{theta}")
        logits[theta] = our_logits(path, ids)[400]
        assert distance(logits[theta], hf_logits(model, ids)[400]) <= TOLERANCE
    assert distance(logits[10000.0], logits[500000.0]) > 1000 * TOLERANCE


def test_tied_model_loads_one_matrix_for_both_ends(saved: Callable[[str], Saved]) -> None:
    """B08: the output is the embedding, not a second copy of it."""
    model = load(open_checkpoint(saved("tied").folder))
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()


def test_missing_output_of_an_untied_model_is_named(tmp_path: Path) -> None:
    """B08: flag false and tensor absent stops before anything is loaded."""
    folder, _ = tiny_hf_model(tmp_path, tie_word_embeddings=True)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('embeddings": true', 'embeddings": false'))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .*missing"):
        open_checkpoint(folder)


def test_missing_output_in_metas_layout_is_named(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved("grouped heads")
    folder = save_as_meta(source.state, source.config, tmp_path)
    state = dict(source.state)
    del state["output.weight"]
    torch.save(state, folder / "consolidated.00.pth")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"missing tensor output\.weight"):
        load(checkpoint)


@pytest.mark.parametrize("equal", [True, False])
def test_tie_flag_beside_a_written_output_ties_only_equal_matrices(
    equal: bool, tmp_path: Path
) -> None:
    """As in transformers: with both matrices in the file, the values decide."""
    folder, model = tiny_hf_model(tmp_path)
    if equal:
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('embeddings": false', 'embeddings": true'))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tied_output is equal
    assert ("output.weight" in checkpoint.names()) is not equal
    assert distance(our_logits(checkpoint), hf_logits(model, IDS)) <= TOLERANCE


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    import transformers

    config = transformers.MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, sliding_window=None, max_position_embeddings=256,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    assert distance(our_logits(tmp_path), hf_logits(model, IDS)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["hf", "meta", "gguf"])
def test_weights_are_rounded_once_to_the_dtype_asked_for(
    layout: str, dtype: torch.dtype, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = saved("grouped heads")
    model = load(open_checkpoint(source.save(layout, tmp_path / "model")), dtype)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, source.state[name].to(dtype)), name
