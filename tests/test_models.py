"""Shapes of known models, and of models from the heads of their files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from offload_llama.checkpoint.headers import model_shape
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.config import ModelConfig
from offload_llama.cost import KV_BITS, Setup, n_parameters
from offload_llama.errors import CheckpointError
from offload_llama.models import closest, find_preset, presets, slug


def facts() -> list[dict[str, str]]:
    text = (resources.files("offload_llama") / "data" / "kv_bytes.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def hub_settings(config: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` for this shape."""
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tied_output,
    }
    if config.rope_scaling is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return settings


def test_every_model_of_the_facts_table_is_a_preset_and_nothing_else_is() -> None:
    assert sorted(presets()) == sorted(slug(row["model"]) for row in facts())


@pytest.mark.parametrize("row", facts(), ids=lambda row: row["model"])
def test_a_preset_has_the_heads_and_the_kv_bytes_of_the_facts_table(row: dict[str, str]) -> None:
    config = presets()[slug(row["model"])].config
    columns = ("layers", "q_heads", "kv_heads", "head_dim", "d_model")
    shape = (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim, config.dim)
    assert shape == tuple(int(row[column]) for column in columns)
    assert config.kv_bytes_per_token(2) == int(row["kv_fp16_B_per_tok"])
    assert 2 * config.kv_row_bytes(2) == int(row["kv_fp16_B_per_tok_layer"])
    for kv_dtype, column in (
        ("fp16", "kv_fp16_B_per_tok"),
        ("int8", "kv_int8_g64_sym_B"),
        ("int4", "kv_int4_g64_asym_B"),
    ):
        setup = Setup(config=config, ctx=2, kv_dtype=kv_dtype)
        assert setup.kv_bytes_per_token == int(row[column]), KV_BITS[kv_dtype]


@pytest.mark.parametrize("row", facts(), ids=lambda row: row["model"])
def test_a_preset_has_as_many_parameters_as_the_facts_table_says(row: dict[str, str]) -> None:
    parameters = n_parameters(presets()[slug(row["model"])].config)
    assert parameters == pytest.approx(1e9 * float(row["params_b"]), rel=0.01)
    assert 2 * parameters == pytest.approx(1e9 * float(row["weights_fp16_gb"]), rel=0.01)


def test_the_preset_of_the_installed_model_is_what_its_file_says(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    checkpoint.close()
    preset = presets()["smollm2-135m"].config
    # The file holds norm_eps in 32 bits.
    assert checkpoint.config.norm_eps == pytest.approx(preset.norm_eps)
    assert replace(checkpoint.config, norm_eps=preset.norm_eps) == preset
    shape = model_shape("smollm2-135m")
    assert shape.config == checkpoint.config
    assert shape.file_bytes == smollm2_path.stat().st_size


def test_a_preset_says_where_its_numbers_come_from() -> None:
    for preset in presets().values():
        assert preset.source.endswith("/config.json") and preset.repository.count("/") == 1
        assert find_preset(preset.repository) is preset


def test_a_published_planner_finds_the_same_kv_bytes_for_its_models() -> None:
    kvfit = pytest.importorskip("kvfit.architectures")
    for preset in presets().values():
        for context_tokens in (1, 4096):
            estimate = kvfit.estimate_cache(
                hub_settings(preset.config), context_tokens=context_tokens, kv_bytes=2.0
            )
            ours = Setup(config=preset.config, ctx=2).kv_bytes_per_token * context_tokens
            assert estimate.total_bytes == ours, preset.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Llama 2 13B", "llama-2-13b"),
        ("SMOLLM2-1.7B", "smollm2-1.7b"),
    ],
)
def test_a_preset_is_found_by_the_spellings_people_use(name: str, expected: str) -> None:
    found = find_preset(name)
    assert found is not None and found.slug == expected


@pytest.mark.parametrize("name", ["llama-3.1-70b", "someone/Llama-3.1-8B", "", "-instruct"])
def test_another_models_name_is_no_preset(name: str) -> None:
    assert find_preset(name) is None


def test_an_unknown_name_gives_the_closest() -> None:
    assert closest("llama-3.2") == ["llama-3.2-1b", "llama-3.2-3b"]
    assert "mistral-7b" in closest("mistral-8b")
    with pytest.raises(CheckpointError, match=r"no shape for lama-3\.1-8b.*llama-3\.1-8b") as found:
        model_shape("lama-3.1-8b")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("preset", presets().values(), ids=lambda preset: preset.slug)
def test_a_folder_with_nothing_but_config_json_has_a_shape(preset: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_settings(preset.config)))
    shape = model_shape(str(tmp_path))
    assert shape.config == preset.config
    assert shape.file_bytes is None and shape.label == tmp_path.name


def test_metas_params_alone_have_a_shape(tmp_path: Path) -> None:
    params = {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
    }
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert model_shape(str(tmp_path)).config == presets()["llama-3.1-8b"].config


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "looked for config.json"),
        ({"a.gguf": b"GGUFxxxx", "b.gguf": b"GGUFxxxx"}, "several GGUF files"),
        ({"config.json": b"{"}, "not valid JSON"),
        ({"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'}, "GPT2LMHeadModel"),
        ({"params.json": b'{"dim": 64}'}, "no weights; looked for consolidated.00.pth"),
        ({"one.gguf": b"GGUF"}, "cut short"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(
    files: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as found:
        model_shape(str(tmp_path))
    assert "\n" not in str(found.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a model file"):
        model_shape(str(tmp_path / "notes.txt"))


def test_a_repository_that_was_never_fetched_is_refused_without_a_download() -> None:
    with pytest.raises(CheckpointError, match="not in the Hub's cache here"):
        model_shape("nobody-at-all/no-such-model")


def test_presets_and_gguf_heads_need_no_torch(smollm2_path: Path) -> None:
    code = (
        "import sys\nfrom offload_llama.checkpoint.headers import model_shape\n"
        f"model_shape('llama-3.1-8b'); model_shape({str(smollm2_path)!r})\n"
        "print(sorted({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
