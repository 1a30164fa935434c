"""What the settings of the three layouts become, and which ones are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama.checkpoint.gguf_file import gguf_config
from offload_llama.checkpoint.hf_config import hf_config, hf_stop_ids
from offload_llama.checkpoint.meta_config import feed_forward_width, meta_config
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.config import ModelConfig, RopeScaling
from offload_llama.errors import CheckpointError
from offload_llama.model import rope_frequencies
from tests.helpers_checkpoint import rope_factors, save_as_meta

PATH = Path("model/settings.json")

HF_1B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
META_1B = {
    "dim": 2048,
    "n_layers": 16,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.5,
    "multiple_of": 256,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "vocab_size": 128256,
}
META_1B_SHAPES = {
    "tok_embeddings.weight": (128256, 2048),
    "layers.0.feed_forward.w1.weight": (8192, 2048),
}
LLAMA2_7B = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-05,
    "vocab_size": -1,
}
LLAMA2_7B_SHAPES = {
    "tok_embeddings.weight": (32000, 4096),
    "layers.0.feed_forward.w1.weight": (11008, 4096),
}
GGUF_1B = {
    "llama.embedding_length": 2048,
    "llama.block_count": 16,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.feed_forward_length": 8192,
    "llama.context_length": 131072,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
GGUF_SHAPES = {"tok_embeddings.weight": (128256, 2048)}


def scaled(source: str) -> ModelConfig:
    """Llama 3.2 1B's config, its rotary scaling given in one of the ways files give it."""
    match source:
        case "rope_type":
            return hf_config(PATH, HF_1B | {"rope_scaling": SCALING | {"rope_type": "llama3"}})
        case "type":
            return hf_config(PATH, HF_1B | {"rope_scaling": SCALING | {"type": "llama3"}})
        case "rope_parameters":
            block = SCALING | {"rope_type": "llama3", "rope_theta": 500000.0}
            plain = {k: v for k, v in HF_1B.items() if k != "rope_theta"}
            return hf_config(PATH, plain | {"rope_parameters": block})
        case "use_scaled_rope":
            return meta_config(PATH, META_1B, META_1B_SHAPES)
        case _:
            divisors = tuple(rope_factors(scaled("rope_type")).tolist())
            return gguf_config(PATH, GGUF_1B, GGUF_SHAPES, divisors)


@pytest.mark.parametrize(
    "source", ["rope_type", "type", "rope_parameters", "use_scaled_rope", "rope_freqs"]
)
def test_scaled_frequencies_are_the_same_however_a_file_says_it(source: str) -> None:
    """B16: of 32 frequencies 15 are kept, 3 blended and 14 divided by 32."""
    config = scaled(source)
    plain = 1 / 500000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    found = rope_frequencies(config)
    ratio = plain / found.double()
    kept, divided = (ratio - 1).abs() < 1e-5, (ratio - 32).abs() < 1e-3
    assert (int(kept.sum()), int(divided.sum())) == (15, 14)
    assert kept[:15].all() and divided[18:].all()
    expected = [0.0012905479, 0.00042955680, 9.7082879e-05]
    assert found[15:18].tolist() == pytest.approx(expected, rel=1e-6)


def test_scaled_frequencies_of_llama_3_1_8b() -> None:
    """B16: head size 128 and factor 8 keep 29, blend 6 and divide 29."""
    params = META_1B | {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3}
    params["multiple_of"] = 1024
    shapes = {
        "tok_embeddings.weight": (128256, 4096),
        "layers.0.feed_forward.w1.weight": (14336, 4096),
    }
    config = meta_config(PATH, params, shapes)
    assert config.rope_scaling == RopeScaling(factor=8.0)
    ratio = 500000 ** (-torch.arange(0, 128, 2) / 128) / rope_frequencies(config)
    kept, divided = (ratio - 1).abs() < 1e-4, (ratio - 8).abs() < 1e-3
    assert (int(kept.sum()), int(divided.sum())) == (29, 29)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_rope_scalings_are_refused_by_name(kind: str, key: str) -> None:
    """B16: an unknown type is not read as none."""
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported.*llama3"):
        hf_config(PATH, HF_1B | {"rope_scaling": {key: kind, "factor": 4.0}})


def test_hf_theta_is_read_from_both_places_and_defaults_to_10000() -> None:
    """B20: nested under rope_parameters by newer files."""
    plain = {k: v for k, v in HF_1B.items() if k != "rope_theta"}
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
    assert hf_config(PATH, HF_1B).rope_theta == 500000.0
    assert hf_config(PATH, plain | nested).rope_theta == 123.0
    assert hf_config(PATH, plain).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is not supported"),
        ({"architectures": None, "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer, not 'wide'"),
        ({"num_attention_heads": 0}, "n_heads must be positive"),
        ({"num_key_value_heads": 5}, "multiple of n_kv_heads"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": SCALING | {"type": "llama3", "factor": -1}}, "must be positive"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window = 4096"),
    ],
)
def test_hf_settings_that_change_the_arithmetic_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        hf_config(PATH, HF_1B | change)
    assert str(PATH) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hf_settings_of_old_and_sparse_files_are_filled_in() -> None:
    sparse = {k: v for k, v in HF_1B.items() if not k.startswith(("num_key", "rms", "tie", "arch"))}
    config = hf_config(PATH, sparse | {"model_type": "llama", "head_dim": None})
    assert (config.n_kv_heads, config.head_dim) == (32, 64)
    assert (config.norm_eps, config.tied_output) == (1e-6, False)


def test_stop_ids_come_from_both_files_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128009]}')
    assert hf_stop_ids(tmp_path, {"eos_token_id": 128001}) == (128001, 128009)
    assert hf_stop_ids(tmp_path, {"eos_token_id": [7, 128009]}) == (128001, 128009, 7)
    assert hf_stop_ids(tmp_path / "nowhere", {"eos_token_id": None}) == ()


def test_meta_vocabulary_of_minus_one_or_none_is_the_embedding() -> None:
    """B26: the official Llama-2 file loads as it is."""
    assert meta_config(PATH, LLAMA2_7B, LLAMA2_7B_SHAPES).vocab_size == 32000
    absent = {k: v for k, v in LLAMA2_7B.items() if k != "vocab_size"}
    assert meta_config(PATH, absent, LLAMA2_7B_SHAPES).vocab_size == 32000


def test_meta_vocabulary_that_disagrees_names_both_numbers() -> None:
    """B26."""
    with pytest.raises(CheckpointError, match=r"31999.*32000"):
        meta_config(PATH, LLAMA2_7B | {"vocab_size": 31999}, LLAMA2_7B_SHAPES)


@pytest.mark.parametrize("vocab_size", [-1, None])
def test_meta_folder_with_a_placeholder_vocabulary_opens(
    vocab_size: int | None, tmp_path: Path
) -> None:
    """B26: with more rows than the tokenizer may have pieces."""
    config = ModelConfig(
        dim=8, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=4, hidden_dim=16, vocab_size=40
    )
    state = {
        "tok_embeddings.weight": torch.randn(40, 8),
        "layers.0.feed_forward.w1.weight": torch.randn(16, 8),
        "layers.0.attention.wo.weight": torch.randn(8, 8),
    }
    save_as_meta(state, config, tmp_path, vocab_size=vocab_size, n_kv_heads=None)
    opened = open_checkpoint(tmp_path)
    assert (opened.config.vocab_size, opened.config.n_kv_heads) == (40, 2)


def test_meta_feed_forward_width_is_that_of_the_released_models() -> None:
    """(dim, multiple_of, multiplier): Llama 2 7B, 70B; Llama 3 8B, 70B; Llama 3.2 1B, 3B."""
    widths = {
        (4096, 256, 1.0): 11008,
        (8192, 4096, 1.3): 28672,
        (4096, 1024, 1.3): 14336,
        (2048, 256, 1.5): 8192,
        (3072, 256, 1.0): 8192,
    }
    assert {key: feed_forward_width(*key) for key in widths} == widths


def test_meta_feed_forward_width_that_disagrees_names_both_numbers() -> None:
    with pytest.raises(CheckpointError, match=r"11264.*11008"):
        meta_config(PATH, LLAMA2_7B | {"multiple_of": 1024}, LLAMA2_7B_SHAPES)
    plain = {k: v for k, v in LLAMA2_7B.items() if k != "multiple_of"}
    assert meta_config(PATH, plain, LLAMA2_7B_SHAPES).hidden_dim == 11008


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 4096),
        ({"norm_eps": 1e-6}, 2048),
        ({"rope_theta": 1e6}, 16384),
        ({"rope_theta": 500000.0}, 8192),
        ({"rope_theta": 500000.0, "use_scaled_rope": True}, 131072),
        ({"max_seq_len": 777}, 777),
    ],
)
def test_meta_context_is_that_of_the_release_unless_given(
    change: dict[str, Any], context: int
) -> None:
    config = meta_config(PATH, LLAMA2_7B | change, LLAMA2_7B_SHAPES)
    assert config.max_seq_len == context


def test_meta_rope_factor_is_32_for_the_small_3_2_models_and_can_be_given() -> None:
    """B16."""
    assert meta_config(PATH, META_1B, META_1B_SHAPES).rope_scaling == RopeScaling(factor=32.0)
    given = meta_config(PATH, META_1B | {"rope_scaling_factor": 16}, META_1B_SHAPES)
    assert given.rope_scaling == RopeScaling(factor=16.0)
    off = meta_config(PATH, META_1B | {"use_scaled_rope": False}, META_1B_SHAPES)
    assert off.rope_scaling is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": {"num_experts": 8}}, "moe is not a known key"),
        ({"quantization_args": {"group_size": 32}}, "quantization_args is not a known key"),
        ({"vision_chunk_size": 448}, "vision_chunk_size is not a known key"),
        ({"n_heads": None}, "n_heads is missing"),
        ({"dim": 4096.5}, "dim must be an integer"),
        ({"head_dim": 127}, "head_dim must be even"),
        ({"use_scaled_rope": 3}, "use_scaled_rope must be true or false"),
    ],
)
def test_meta_settings_that_may_change_the_arithmetic_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        meta_config(PATH, LLAMA2_7B | change, LLAMA2_7B_SHAPES)


def test_meta_keys_that_are_switched_off_are_no_reason_to_refuse() -> None:
    params = LLAMA2_7B | {"quantization_args": None, "lora_args": None, "moe": False}
    assert meta_config(PATH, params, LLAMA2_7B_SHAPES).dim == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, "expert_count = 8"),
        ({"rope.dimension_count": 32}, "rope.dimension_count = 32"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'"),
        ({"rope.scaling.factor": 2.0}, "rope.scaling.factor = 2.0"),
        ({"attention.value_length": 32}, "attention.value_length = 32"),
        ({"attention.sliding_window": 4096}, "attention.sliding_window = 4096"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"vocab_size": 128000}, "128000.*128256"),
        ({"attention.head_count": [32, 32]}, "must be an integer"),
    ],
)
def test_gguf_settings_that_change_the_arithmetic_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    metadata = GGUF_1B | {f"llama.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        gguf_config(PATH, metadata, GGUF_SHAPES)


def test_gguf_settings_that_files_leave_out_are_filled_in() -> None:
    sparse = {k: v for k, v in GGUF_1B.items() if "head_count_kv" not in k and "rope" not in k}
    config = gguf_config(PATH, sparse, GGUF_SHAPES)
    assert (config.n_kv_heads, config.head_dim, config.rope_theta) == (32, 64, 10000.0)
    assert config.tied_output and config.vocab_size == 128256
    wide = gguf_config(PATH, GGUF_1B | {"llama.attention.key_length": 128}, GGUF_SHAPES)
    assert wide.head_dim == 128


def test_settings_that_are_no_json_object_give_one_line(tmp_path: Path) -> None:
    for text, message in (("[1]", "object is expected"), ('{"a": ', "not valid JSON")):
        (tmp_path / "params.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


def test_rope_divisors_of_the_helper_follow_the_published_formula() -> None:
    """The divisors that tests write into GGUF files are not taken from the package."""
    divisors = rope_factors(scaled("rope_type"))
    assert divisors[0] == 1.0 and divisors[-1] == 32.0
    assert math.isclose(float(divisors[16]), 1 / (500000**0.5 * 0.00042955680), rel_tol=1e-3)
