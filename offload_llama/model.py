"""The whole forward pass, in Meta's structure and names.

    N  new tokens of this step, all sequences one after another (no padding)
    R  sequences in this step    H  query heads    KH  key/value heads    D  head size

The one change: where Meta's `Attention.forward` writes `cache_k` and `cache_v`, slices the prefix
and attends, there is one call to the layer's store, wherever its keys and values may live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from offload_llama.config import ModelConfig
from offload_llama.weights import Embedding, Linear, stacked, together

STACKS = (
    ("attention.wq", "attention.wk", "attention.wv"),
    ("feed_forward.w1", "feed_forward.w3"),
)
"""Matrices of a layer that multiply the same input."""


class Store(Protocol):
    """What attention asks of one layer's KV cache."""

    @property
    def cache_k(self) -> Any: ...

    @property
    def cache_v(self) -> Any: ...

    def attend(
        self, xq: torch.Tensor, xk: torch.Tensor, xv: torch.Tensor, step: Any
    ) -> torch.Tensor:
        """Append keys and values (N, KH, D) and return the attention output, (N, H, D)."""
        ...


class Cache(Protocol):
    """All layers' stores, in order; a layer that moves makes it a new list."""

    @property
    def stores(self) -> list[Any]: ...


class Step(Protocol):
    """One forward pass, prepared: positions (N,) on the device, and whose logits are wanted."""

    cache: Any
    positions: torch.Tensor

    def select(self, h: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of h (N, dim) whose logits are wanted, or None."""
        ...


class RMSNorm(nn.Module):
    """x / rms(x), times a learnt scale; the mean is taken in float32."""

    weight: torch.Tensor

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.register_buffer("weight", torch.empty(dim, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle each rotary pair turns by per position, (D/2,) float32 on the CPU.

    Source: RoFormer (arXiv 2104.09864), theta^(-2i/D); Llama 3.1's `apply_scaling`: long waves are
    slowed by `factor`, short ones kept, those between blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    freqs = 1.0 / (config.rope_theta**exponents)
    if config.rope_freq_factors is not None:
        freqs = freqs / torch.tensor(config.rope_freq_factors, dtype=torch.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    wavelengths = 2 * math.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_seq_len / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
    return torch.where(smooth < 0, freqs / scaling.factor, torch.where(smooth > 1, freqs, blended))


def precompute_freqs_cis(positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Return e^(i angle) for these positions, (N, 1, D/2) complex.

    Computed from the positions of the step, so there is no table to outgrow.
    """
    angles = positions.to(torch.float32)[:, None, None] * freqs
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Return x (N, heads, D) with each interleaved pair turned by its position's angle.

    In float32 that is x itself, turned in place.
    """
    wide = x.float()
    torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2)).mul_(freqs_cis)
    return wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the layer's cache."""

    store: Store

    def __init__(self, params: ModelConfig) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads = params.n_heads, params.n_kv_heads
        self.head_dim = params.head_dim
        self.wq = Linear(params.dim, params.n_heads * params.head_dim)
        self.wk = Linear(params.dim, params.n_kv_heads * params.head_dim)
        self.wv = Linear(params.dim, params.n_kv_heads * params.head_dim)
        self.wo = Linear(params.n_heads * params.head_dim, params.dim)

    @property
    def cache_k(self) -> Any:
        """The layer's keys in Meta's shape, gathered when asked for (see `cache.view`)."""
        return self.store.cache_k

    @property
    def cache_v(self) -> Any:
        """The layer's values in Meta's shape, gathered when asked for."""
        return self.store.cache_v

    def forward(self, x: torch.Tensor, step: Step, freqs_cis: torch.Tensor) -> torch.Tensor:
        """x: (N, dim) -> (N, dim)."""
        seqlen, _ = x.shape
        xq, xk, xv = together(x, self.wq, self.wk, self.wv)

        xq = xq.view(seqlen, self.n_local_heads, self.head_dim)
        xk = xk.view(seqlen, self.n_local_kv_heads, self.head_dim)
        xv = xv.view(seqlen, self.n_local_kv_heads, self.head_dim)

        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)

        output = self.store.attend(xq, xk, xv, step)  # (N, H, D)

        return self.wo(output.reshape(seqlen, -1))  # type: ignore[no-any-return]  # nn.Module


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self._gated(x))  # type: ignore[no-any-return]  # nn.Module

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = together(x, self.w1, self.w3)
        return F.silu(gate, inplace=True).mul_(up)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, layer_id: int, params: ModelConfig) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.attention = Attention(params)
        self.feed_forward = FeedForward(params.dim, params.hidden_dim)
        self.attention_norm = RMSNorm(params.dim, params.norm_eps)
        self.ffn_norm = RMSNorm(params.dim, params.norm_eps)

    def forward(self, x: torch.Tensor, step: Step, freqs_cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), step, freqs_cis)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    """The model. Built on the meta device; `set_tensor` puts the weights in place.

    Weights are buffers under Meta's names. The model is driven by steps of a `KVCache`:

        with cache.step(rows, start, n_new) as step:
            logits = model(step.upload(ids), step)
    """

    def __init__(self, params: ModelConfig) -> None:
        super().__init__()
        self.params = params
        self.tok_embeddings = Embedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList(TransformerBlock(i, params) for i in range(params.n_layers))
        self.norm = RMSNorm(params.dim, params.norm_eps)
        self.output = Linear(params.dim, params.vocab_size)
        self.rope_freqs = rope_frequencies(params)
        self.stores: list[Any] = []

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor a checkpoint must bring.

        `output.weight` is absent where the output is tied to the embedding.
        """
        buffers = self.named_buffers(remove_duplicate=False)
        shapes = {name: tuple(buffer.shape) for name, buffer in buffers}
        if self.params.tied_output:
            del shapes["output.weight"]
        return shapes

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Put one weight in place, by Meta's name; it already has its device and dtype."""
        path, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(path), leaf, tensor)

    def stacks(self) -> list[tuple[str, ...]]:
        """Return the names of matrices that multiply the same input, in the order of `together`."""
        return [
            tuple(f"layers.{layer}.{name}.weight" for name in names)
            for layer in range(self.params.n_layers)
            for names in STACKS
        ]

    def set_matrices(self, names: Sequence[str], whole: torch.Tensor | nn.Module) -> None:
        """Put matrices in place that lie below each other in one, or one that is packed."""
        paths = [name.removesuffix(".weight") for name in names]
        modules = [self.get_submodule(path) for path in paths]
        for path, module in zip(paths, stacked(modules, whole), strict=True):
            self.set_submodule(path, module)

    def tie_output(self) -> None:
        """Let a tied output use the embedding's matrix; called once the weights are in place."""
        if self.params.tied_output and isinstance(self.tok_embeddings, Embedding):
            self.output.weight = self.tok_embeddings.weight
        self.rope_freqs = self.rope_freqs.to(self.norm.weight.device)

    def use_cache(self, cache: Cache) -> None:
        """Let each layer's attention work on this cache's store."""
        for layer, store in zip(self.layers, cache.stores, strict=True):
            layer.attention.store = store  # type: ignore[union-attr]  # ModuleList is untyped
        self.stores = cache.stores

    def forward(self, tokens: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Return the logits that the step asked for, float32; None if it asked for none.

        Args:
            tokens: (N,) int64 on the device, the new tokens of all sequences of the step.
            step: from `KVCache.step`, entered.
        """
        if self.stores is not step.cache.stores:
            self.use_cache(step.cache)
        h = self.tok_embeddings(tokens)
        freqs_cis = precompute_freqs_cis(step.positions, self.rope_freqs)
        for layer in self.layers:
            h = layer(h, step, freqs_cis)
        selected = step.select(h)
        if selected is None:
            return None
        logits: torch.Tensor = self.output(self.norm(selected)).float()
        return logits
