"""Hugging Face's `config.json` in our words. Names of theirs stay in this file and in `hf.py`.

Source: transformers' LlamaConfig and MistralConfig, and the Llama 3.1 rotary scaling that they
call "llama3". Files written by transformers 5 nest the rotary settings under `rope_parameters`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload_llama.checkpoint.damage import read_json
from offload_llama.checkpoint.settings import Settings, model_config, rope_scaling
from offload_llama.config import ModelConfig, RopeScaling
from offload_llama.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

# What an absent key means in MistralConfig, where that differs from LlamaConfig.
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def hf_config(path: Path, data: dict[str, Any]) -> ModelConfig:
    """Return the config that a `config.json` describes; `path` is for messages.

    Raises:
        CheckpointError: a key is missing or damaged, or the model's arithmetic is not supported;
            the message names the key and its value.
    """
    if "MistralForCausalLM" in _architectures(data):
        data = _MISTRAL_DEFAULTS | data
    _refuse_other_models(path, data)
    keys = Settings(path, data)
    dim, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    rope = Settings(path, _rope_block(keys))
    max_seq_len = keys.integer("max_position_embeddings", 2048)
    _refuse_other_arithmetic(keys, rope, max_seq_len)
    return model_config(
        path,
        dim=dim,
        n_layers=keys.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=keys.integer("num_key_value_heads", n_heads),
        head_dim=keys.integer("head_dim", dim // max(1, n_heads)),
        hidden_dim=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", keys.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_seq_len=max_seq_len,
        tied_output=keys.flag("tie_word_embeddings"),
    )


def hf_stop_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text: those of `generation_config.json`, then `config.json`'s."""
    settings = [config]
    generation = folder / "generation_config.json"
    if generation.is_file():
        settings.insert(0, read_json(generation))
    ids: list[Any] = []
    for each in settings:
        value = each.get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _architectures(data: dict[str, Any]) -> list[str]:
    """Return the names of the model's classes; old files give the family only."""
    names = data.get("architectures")
    if isinstance(names, list) and names:
        return [str(name) for name in names]
    family = str(data.get("model_type", "none"))
    return [f"{family.capitalize()}ForCausalLM"] if family in ("llama", "mistral") else [family]


def _refuse_other_models(path: Path, data: dict[str, Any]) -> None:
    names = _architectures(data)
    if not any(name in ARCHITECTURES for name in names):
        raise CheckpointError(
            f"{path}: architecture {', '.join(names)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    quantization = data.get("quantization_config")
    if quantization:
        known = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if known else "unknown"
        raise CheckpointError(
            f"{path}: weights quantised by {method} (quantization_config) are not supported; use "
            "the unquantised model or a GGUF file"
        )


def _refuse_other_arithmetic(keys: Settings, rope: Settings, max_seq_len: int) -> None:
    keys.only("hidden_act", "silu", "swish")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("partial_rotary_factor", 1.0)
    rope.only("partial_rotary_factor", 1.0)
    window = keys.integer("sliding_window", max_seq_len)
    if window < max_seq_len:
        raise keys.error("sliding_window", f"= {window} is not supported")


def _rope_block(keys: Settings) -> dict[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        block = keys.get(key)
        if block is not None:
            if not isinstance(block, dict):
                raise keys.error(key, f"must be an object, not {block!r}")
            return block
    return {}


def _rope_scaling(rope: Settings) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise rope.error("rope_type", f"{kind!r} is not supported; supported: 'default', 'llama3'")
    return rope_scaling(
        rope.path,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_seq_len=rope.integer("original_max_position_embeddings"),
    )
