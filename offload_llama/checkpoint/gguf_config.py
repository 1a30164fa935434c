"""What the head of a GGUF file says about the model: its kind, its shape, its tensors' names.

A plan reads no more of a file than this, and imports no torch for it.

Source: the ggml project's GGUF specification, and the tensor names of its llama architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload_llama.checkpoint.gguf_header import GGUFHeader
from offload_llama.checkpoint.settings import Settings, model_config
from offload_llama.config import ModelConfig
from offload_llama.errors import CheckpointError

_TOP_NAMES = {
    "token_embd.weight": "tok_embeddings.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "output.weight",
}
_LAYER_NAMES = {
    "attn_q.weight": "attention.wq.weight",
    "attn_k.weight": "attention.wk.weight",
    "attn_v.weight": "attention.wv.weight",
    "attn_output.weight": "attention.wo.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "attn_norm.weight": "attention_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
}


def meta_name(gguf_name: str) -> str:
    """Return Meta's name of a GGUF tensor; a name without one comes back as it is."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix == "blk" and layer.isdecimal() and leaf in _LAYER_NAMES:
        return f"layers.{layer}.{_LAYER_NAMES[leaf]}"
    return gguf_name


def check_kind(path: Path, header: GGUFHeader) -> None:
    """Let a whole file of the llama architecture pass.

    Raises:
        CheckpointError: it is of another architecture, or one of several parts.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported in GGUF files, only 'llama' is"
        )
    if header.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: one of {header.metadata['split.count']} parts of a model; join them first "
            "with llama-gguf-split --merge"
        )


def gguf_config(
    path: Path,
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_freq_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Return the config that the `llama.*` keys of a GGUF file describe.

    Args:
        shapes: shapes of the tensors by Meta's names; the embedding's gives the vocabulary size.

    Raises:
        CheckpointError: a key is missing, contradicts a tensor, or changes the arithmetic in a
            way that is not supported.
    """
    keys = Settings(path, metadata, "llama.")
    dim, n_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", dim // max(1, n_heads))
    max_seq_len = keys.integer("context_length")
    _refuse_other_arithmetic(keys, head_dim, max_seq_len)
    embedding = shapes.get("tok_embeddings.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    vocab_size = keys.integer("vocab_size", embedding[0])
    if vocab_size != embedding[0]:
        raise CheckpointError(
            f"{path}: llama.vocab_size is {vocab_size}, but token_embd.weight has {embedding[0]} "
            "rows"
        )
    return model_config(
        path,
        dim=dim,
        n_layers=keys.integer("block_count"),
        n_heads=n_heads,
        n_kv_heads=keys.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=keys.integer("feed_forward_length"),
        vocab_size=vocab_size,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_freq_factors=rope_freq_factors,
        max_seq_len=max_seq_len,
        tied_output="output.weight" not in shapes,
    )


def _refuse_other_arithmetic(keys: Settings, head_dim: int, max_seq_len: int) -> None:
    keys.only("expert_count", 0)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    keys.only("rope.scaling.type", "none")
    keys.only("rope.scaling.factor", 0.0, 1.0)
    keys.only("rope.scale_linear", 0.0, 1.0)
    window = keys.integer("attention.sliding_window", 0)
    if 0 < window < max_seq_len:
        raise keys.error("attention.sliding_window", f"= {window} is not supported")
