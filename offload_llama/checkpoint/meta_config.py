"""Meta's `params.json` as a ModelConfig.

What the file leaves out is taken from the tensors' shapes, or else from what was released with
such a file:

    max_seq_len        131072 with scaled rope, 16384 for theta 1e6 (Code Llama), 8192 for other
                       thetas above 10000 (Llama 3); for theta 10000, 2048 with norm_eps 1e-6
                       (Llama 1) and 4096 otherwise (Llama 2)
    scaled rope        factor 8 (Llama 3.1 and later), or 32 for the shapes of Llama 3.2 1B and 3B

Source: the Llama 2 and Llama 3 reference code, and the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_llama.checkpoint.settings import Settings, model_config, rope_scaling
from offload_llama.config import ModelConfig, RopeScaling
from offload_llama.errors import CheckpointError

# (dim, n_layers) of the models whose rotary frequencies are scaled by 32.
_FACTOR_32_SHAPES = ((2048, 16), (3072, 28))

_KNOWN = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "hidden_dim",
        "vocab_size",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
        "rope_theta",
        "use_scaled_rope",
        "rope_scaling_factor",
        "rope_high_freq_factor",
        "max_seq_len",
        "max_batch_size",
        "model_parallel_size",
    }
)


def meta_config(
    path: Path, params: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
    """Return the config that a `params.json` and the tensors' shapes describe.

    Args:
        path: of the file, for messages.
        shapes: by Meta's names; the embedding and the first layer's w1 are needed.

    Raises:
        CheckpointError: a key is missing, is not known (it might change the arithmetic), or
            contradicts a tensor; the message has both numbers.
    """
    keys = Settings(path, params)
    for key in params.keys() - _KNOWN:
        if params[key] not in (None, False):
            raise keys.error(
                key,
                "is not a known key and may change what the model computes; remove it from the "
                "file if it does not",
            )
    dim, n_heads = keys.integer("dim"), keys.integer("n_heads")
    n_kv_heads = keys.integer("n_kv_heads", n_heads)
    rope_theta, norm_eps = keys.number("rope_theta", 10000.0), keys.number("norm_eps", 1e-5)
    n_layers = keys.integer("n_layers")
    scaling = _rope_scaling(path, keys, (dim, n_layers))
    return model_config(
        path,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=keys.integer("head_dim", dim // max(1, n_heads)),
        hidden_dim=_hidden_dim(path, keys, dim, _rows(path, shapes, "layers.0.feed_forward.w1")),
        vocab_size=_vocab_size(path, keys, _rows(path, shapes, "tok_embeddings")),
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_seq_len=keys.integer(
            "max_seq_len", _trained_context(rope_theta, norm_eps, scaling is not None)
        ),
    )


def feed_forward_width(dim: int, multiple_of: int, multiplier: float = 1.0) -> int:
    """Return the hidden width of a SwiGLU layer: two thirds of 4 dim, stretched, rounded up.

    Source: `FeedForward.__init__` of the Llama 2 reference code.
    """
    width = int(multiplier * int(2 * (4 * dim) / 3))
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


def _rows(path: Path, shapes: Mapping[str, tuple[int, ...]], module: str) -> int:
    shape = shapes.get(f"{module}.weight")
    if shape is None:
        raise CheckpointError(f"{path.parent}: tensor {module}.weight is missing")
    return shape[0]


def _vocab_size(path: Path, keys: Settings, rows: int) -> int:
    """Return the embedding's rows; the file may say -1, which stands for "ask the tokenizer"."""
    vocab_size = keys.integer("vocab_size", -1)
    if vocab_size not in (-1, rows):
        raise CheckpointError(
            f"{path}: vocab_size is {vocab_size}, but tok_embeddings.weight has {rows} rows; set "
            "it to -1 to take the tensor's"
        )
    return rows


def _hidden_dim(path: Path, keys: Settings, dim: int, rows: int) -> int:
    """Return the rows of w1, after comparing them with what the file says, if it says anything."""
    hidden_dim = keys.integer("hidden_dim", 0)
    multiple_of = keys.integer("multiple_of", 0)
    if not hidden_dim and multiple_of > 0:
        hidden_dim = feed_forward_width(dim, multiple_of, keys.number("ffn_dim_multiplier", 1.0))
    if hidden_dim not in (0, rows):
        raise CheckpointError(
            f"{path}: its feed-forward width is {hidden_dim}, but layers.0.feed_forward.w1.weight "
            f"has {rows} rows"
        )
    return rows


def _rope_scaling(path: Path, keys: Settings, shape: tuple[int, int]) -> RopeScaling | None:
    if not keys.flag("use_scaled_rope"):
        return None
    factor = keys.number("rope_scaling_factor", 32.0 if shape in _FACTOR_32_SHAPES else 8.0)
    return rope_scaling(
        path, factor=factor, high_freq_factor=keys.number("rope_high_freq_factor", 4.0)
    )


def _trained_context(rope_theta: float, norm_eps: float, scaled: bool) -> int:
    if scaled:
        return 131072
    if rope_theta > 10000.0:
        return 16384 if rope_theta == 1e6 else 8192
    return 2048 if norm_eps == 1e-6 else 4096
