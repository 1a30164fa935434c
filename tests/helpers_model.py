"""Tiny random models and the ways the tests run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_llama.cache import KVCache
from offload_llama.config import ModelConfig
from offload_llama.device import Device
from offload_llama.model import Transformer
from offload_llama.policy import place


def tiny_config(**changes: Any) -> ModelConfig:
    """A 4-layer model with grouped heads; 64 bytes a row in float32."""
    values: dict[str, Any] = {
        "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
        "hidden_dim": 64, "vocab_size": 97, "max_seq_len": 1024,
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def random_model(
    config: ModelConfig, device: Device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Transformer:
    """A model with the same random weights on every device; call inside `device.scope()`."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    for name, shape in model.expected_tensors().items():
        if len(shape) == 1:
            weight = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weight = torch.randn(shape, generator=generator) * (3.0 / shape[-1]) ** 0.5
        model.set_tensor(name, weight.to(dtype).to(device.torch_device))
    model.tie_output()
    return model


def make_cache(model: Transformer, device: Device, policy: str = "gpu", **options: Any) -> KVCache:
    """A small cache; parts of 32 and flushes of 8 tokens unless told otherwise."""
    dtype = model.norm.weight.dtype
    settings: dict[str, Any] = {
        "dtype": dtype, "max_batch_size": 3, "max_seq_len": 512, "part_tokens": 32,
        "flush_tokens": 8, "ring_slots": 3,
    }  # fmt: skip
    placements = place(policy, model.params.n_layers)
    return KVCache(model.params, device, placements, **(settings | options))


def run_step(
    model: Transformer,
    cache: KVCache,
    new: dict[int, Sequence[int]],
    logits: str = "last",
    start: dict[int, int] | None = None,
) -> torch.Tensor:
    """Append tokens to rows in one step and return the logits on the CPU."""
    rows = list(new)
    first = [(start or {}).get(row, cache.lengths[row]) for row in rows]
    with cache.step(rows, first, [len(new[row]) for row in rows], logits) as step:
        out = model(step.upload([i for row in rows for i in new[row]]), step)
    return torch.empty(0) if out is None else out.cpu()


def prefill(
    model: Transformer, cache: KVCache, row: int, ids: Sequence[int], chunk: int = 64
) -> torch.Tensor:
    """Feed a prompt in chunks and return the last token's logits, (vocab_size,)."""
    out = torch.empty(0)
    for first in range(0, len(ids), chunk):
        out = run_step(model, cache, {row: ids[first : first + chunk]})
    return out[-1]


def greedy(
    model: Transformer, cache: KVCache, row: int, ids: Sequence[int], n: int, chunk: int = 64
) -> list[int]:
    """Return n greedy ids after a prompt."""
    new = [int(prefill(model, cache, row, ids, chunk).argmax())]
    while len(new) < n:
        new.append(int(run_step(model, cache, {row: [new[-1]]})[0].argmax()))
    return new
