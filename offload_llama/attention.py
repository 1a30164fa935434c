"""Attention over parts of the cache, and their exact merge.

    N  packed new tokens      T  new tokens of one sequence     S  cached tokens of one part
    H  query heads            KH key/value heads                G  H / KH    D  head size

Every key is attended exactly once: a sequence's cache is cut into parts, each part gives a partial
output and the log-sum-exp of its scores, and partial results are merged in float32. The query
heads of one KV head are folded into the query axis, so keys and values are read once, not G times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

aten = torch.ops.aten

Partial = tuple[torch.Tensor, torch.Tensor]
"""An output (KH, G, T, D) and its log-sum-exp (KH, G, T) in float32."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Partial]
"""(q (B, X, T, D), k and v (B, X, S, D), causal) -> output like q, log-sum-exp (B, X, T)."""


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the attention kernel that this device has for this dtype.

    On CUDA cards: FlashAttention for half precision from compute capability 8.0, the
    memory-efficient kernel elsewhere. Both return the log-sum-exp that the merge needs. Devices
    without either get plain matrix products.
    """
    if device.type == "cpu":
        return _cpu_flash
    if device.type == "cuda" and head_dim % 8 == 0:
        half = dtype in (torch.float16, torch.bfloat16)
        major, _ = torch.cuda.get_device_capability(device)
        if half and head_dim <= 256 and (major >= 8 or torch.version.hip):
            return _cuda_flash
        if not torch.version.hip:
            return _cuda_efficient
    return plain_attention


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Partial:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cuda_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Partial:
    result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return result[0], result[1]


def _cuda_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Partial:
    result = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    # This kernel pads its log-sum-exp to a multiple of 32 queries.
    return result[0], result[1][..., : q.shape[-2]]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Partial:
    """The definition in float32 matrix products: slow, right, and the same on every device."""
    scores = (q.float() @ k.float().transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal:
        n_queries, n_keys = scores.shape[-2:]
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def attend(
    kernel: Kernel,
    q: torch.Tensor,
    cached: Iterable[tuple[torch.Tensor, torch.Tensor]],
    own: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the attention output of one sequence's new tokens, (T, H, D) in q's dtype.

    Args:
        kernel: from `choose_kernel`.
        q: queries, (T, H, D), rotary applied.
        cached: keys and values of one part after the other, each (S, KH, D) with S > 0, all
            visible to every query. A part may be overwritten once the next one was asked for.
        own: keys and values of the new tokens themselves, (T, KH, D), attended causally; None
            where the (single) new token already stands in the last cached part.
    """
    n_new, n_heads, head_dim = q.shape
    heads_first = q.transpose(0, 1).contiguous()
    merged: Partial | None = None
    for k, v in cached:
        n_kv_heads = k.shape[1]
        folded = heads_first.view(1, n_kv_heads, -1, head_dim)
        out, lse = kernel(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], False)
        shape = (n_kv_heads, n_heads // n_kv_heads, n_new)
        merged = merge(merged, (out.reshape(*shape, head_dim), lse.reshape(shape)))
    if own is not None:
        k, v = own
        n_kv_heads, groups = k.shape[1], n_heads // k.shape[1]
        # KV heads are the batch here; the group axis of keys and values repeats by stride 0.
        by_group = [
            x.transpose(0, 1)[:, None].expand(n_kv_heads, groups, n_new, head_dim) for x in (k, v)
        ]
        queries = heads_first.view(n_kv_heads, groups, n_new, head_dim)
        merged = merge(merged, kernel(queries, by_group[0], by_group[1], n_new > 1))
    if merged is None:
        raise ValueError("attention needs at least one key")
    out = merged[0].to(q.dtype)
    return out.reshape(n_heads, n_new, head_dim).transpose(0, 1)


def merge(left: Partial | None, right: Partial) -> Partial:
    """Return the attention over the keys of both partial results.

    With one partial result nothing is computed, so it stays in its own dtype; merged outputs are
    float32. Source: the online softmax of Milakov and Gimelshein, 2018 (arXiv 1805.02867).
    """
    if left is None:
        return right
    (out_l, lse_l), (out_r, lse_r) = left, right
    lse = torch.logaddexp(lse_l, lse_r)
    weight_l, weight_r = ((x - lse).exp_().unsqueeze(-1) for x in (lse_l, lse_r))
    return torch.addcmul(out_l.float() * weight_l, out_r.float(), weight_r), lse
