"""The slowest obvious Llama: no cache, float32, one sequence at a time. The oracle."""

from __future__ import annotations

import torch

from offload_llama.config import ModelConfig
from offload_llama.model import Transformer, rope_frequencies


def reference_logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Return the logits of every position, (len(ids), vocab_size), by definition."""
    config = model.params
    weights = {name: buffer.float() for name, buffer in model.named_buffers()}
    h = weights["tok_embeddings.weight"][torch.tensor(ids)]
    for i in range(config.n_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        h = h + _attention(_norm(h, layer["attention_norm.weight"], config), layer, config)
        x = _norm(h, layer["ffn_norm.weight"], config)
        gate, up = x @ layer["feed_forward.w1.weight"].T, x @ layer["feed_forward.w3.weight"].T
        h = h + (gate * torch.sigmoid(gate) * up) @ layer["feed_forward.w2.weight"].T
    output = weights["tok_embeddings.weight" if config.tied_output else "output.weight"]
    return _norm(h, weights["norm.weight"], config) @ output.T


def reference_greedy(model: Transformer, ids: list[int], n: int) -> list[int]:
    """Return n greedy ids after `ids`, each from a fresh pass over the whole sequence."""
    new: list[int] = []
    for _ in range(n):
        new.append(int(reference_logits(model, ids + new)[-1].argmax()))
    return new


def _norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _rotate(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    angles = torch.arange(len(x))[:, None] * rope_frequencies(config)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def _attention(
    x: torch.Tensor, layer: dict[str, torch.Tensor], config: ModelConfig
) -> torch.Tensor:
    n, d = len(x), config.head_dim
    q = _rotate((x @ layer["attention.wq.weight"].T).view(n, -1, d), config)
    k = _rotate((x @ layer["attention.wk.weight"].T).view(n, -1, d), config)
    v = (x @ layer["attention.wv.weight"].T).view(n, -1, d)
    k, v = (t.repeat_interleave(config.n_groups, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ layer["attention.wo.weight"].T
