"""Tiny random Llama models in every format, for anyone's tests.

`tiny_hf_model` makes one with transformers, `meta_state` gives its weights under Meta's names (by
a conversion written independently of the package's), and `save_as_meta` and `save_as_gguf` write
them in the other two layouts.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from offload_llama.config import ModelConfig, RopeScaling

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
State = dict[str, torch.Tensor]

_META_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GGUF_MODULES = {
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


def tiny_hf_model(folder: Path | None = None, **overrides: Any) -> tuple[Path, Any]:
    """Return (folder, model): a random Llama made and saved by transformers, float32.

    Four layers of width 64, 8 query heads on 2 key/value heads, vocabulary 512, untied. The
    overrides are LlamaConfig's arguments; `max_shard_size` (such as "50KB") splits the files.
    """
    folder = Path(tempfile.mkdtemp(prefix="tiny-llama-")) if folder is None else folder
    max_shard_size = overrides.pop("max_shard_size", "5GB")
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    config = transformers.LlamaConfig(**(settings | overrides))
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms away from one, and weights large enough that attention is far from uniform.
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.12 * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder, model


def hf_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' float32 logits of one sequence, (N, vocab)."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0].float()


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return q or k rows in Meta's order: row 2i of a head is its i-th, row 2i+1 its (i+D/2)-th."""
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(len(rows) // head_dim)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def meta_state(model: Any) -> State:
    """Return a transformers model's weights under Meta's names; without `output` if it is tied."""
    theirs = {name: value.detach().clone() for name, value in model.named_parameters()}
    head_dim = model.config.head_dim
    state = {"tok_embeddings.weight": theirs["model.embed_tokens.weight"]}
    for layer in range(model.config.num_hidden_layers):
        for ours, name in _META_MODULES.items():
            value = theirs[f"model.layers.{layer}.{name}.weight"]
            rotated = ours in ("attention.wq", "attention.wk")
            state[f"layers.{layer}.{ours}.weight"] = (
                interleave(value, head_dim) if rotated else value
            )
    state["norm.weight"] = theirs["model.norm.weight"]
    if not model.config.tie_word_embeddings:
        state["output.weight"] = theirs["lm_head.weight"]
    return state


def meta_config(model: Any) -> ModelConfig:
    """Return a transformers model's config in our words."""
    theirs = model.config
    rope = theirs.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )
    return ModelConfig(
        dim=theirs.hidden_size,
        n_layers=theirs.num_hidden_layers,
        n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads,
        head_dim=theirs.head_dim,
        hidden_dim=theirs.intermediate_size,
        vocab_size=theirs.vocab_size,
        norm_eps=theirs.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        max_seq_len=theirs.max_position_embeddings,
        tied_output=theirs.tie_word_embeddings,
    )


def save_as_meta(
    state: State,
    config: ModelConfig,
    folder: Path,
    shards: int = 1,
    *,
    embedding_axis: int = 1,
    **params: Any,
) -> Path:
    """Write `params.json` and the shards; returns the folder.

    A tied output is written out, as in Meta's releases. `params` go into `params.json`; None
    leaves a key out. The scaling's own base length cannot be said there: it must be 8192.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_seq_len": config.max_seq_len,
    }
    if config.head_dim != config.dim // config.n_heads:
        settings["head_dim"] = config.head_dim
    if config.rope_scaling is not None:
        assert config.rope_scaling.original_max_seq_len == 8192
        settings |= {
            "use_scaled_rope": True,
            "rope_scaling_factor": config.rope_scaling.factor,
        }
    settings = {k: v for k, v in (settings | params).items() if v is not None}
    (folder / "params.json").write_text(json.dumps(settings))
    whole = dict(state)
    whole.setdefault("output.weight", state["tok_embeddings.weight"])
    for index in range(shards):
        piece = {
            name: _shard(name, value, index, shards, embedding_axis)
            for name, value in whole.items()
        }
        torch.save(piece, folder / f"consolidated.{index:02d}.pth")
    return folder


def _shard(name: str, value: torch.Tensor, index: int, shards: int, axis: int) -> torch.Tensor:
    if value.ndim == 1:
        return value.clone()
    if "tok_embeddings" not in name:
        axis = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
    return value.chunk(shards, dim=axis)[index].clone()


def rope_factors(config: ModelConfig) -> torch.Tensor:
    """Return the divisors that a GGUF converter writes for Llama-3 scaling, (D/2,) float32."""
    scaling = config.rope_scaling
    assert scaling is not None
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    divisors = []
    for i in range(config.head_dim // 2):
        wavelength = 2 * np.pi * config.rope_theta ** (2 * i / config.head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling.factor)
        else:
            smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def save_as_gguf(
    state: State,
    config: ModelConfig,
    path: Path,
    *,
    types: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write one GGUF file with the `gguf` package; returns its path.

    Args:
        types: tensor type by Meta's tensor name ("Q8_0"); F32 where it says nothing.
        metadata: further `llama.*` integer keys, without the prefix; None leaves a key out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    integers = {
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "feed_forward_length": config.hidden_dim,
        "context_length": config.max_seq_len,
        "vocab_size": config.vocab_size,
    } | (metadata or {})
    for key, value in integers.items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_theta)
    if config.rope_scaling is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors(config).numpy())
    for name, value in state.items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        data = value.float().contiguous().numpy()
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), data)
        else:
            packed = gguf.quantize(data, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_name(meta_name: str) -> str:
    """Return the Hugging Face name of a tensor given by Meta's name."""
    top = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if meta_name in top:
        return top[meta_name]
    _, layer, module = meta_name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{_META_MODULES[module]}.weight"


def gguf_name(meta_name: str) -> str:
    """Return the GGUF name of a tensor given by Meta's name."""
    top = {
        "tok_embeddings.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "output.weight": "output.weight",
    }
    if meta_name in top:
        return top[meta_name]
    _, layer, module = meta_name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{_GGUF_MODULES[module]}.weight"
