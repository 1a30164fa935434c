"""The attention kernels of the CUDA path, with their limits, computed by the CPU's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_llama.device.sim.dispatch import CardMode, aten
from offload_llama.device.sim.errors import PlacementError, SimError
from offload_llama.device.sim.schemas import handles
from offload_llama.device.sim.site import caller
from offload_llama.device.sim.tensor import SimTensor

_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256
_LSE_ALIGNMENT = 32

_sdpa = torch.nn.functional.scaled_dot_product_attention


def _cpu_kernel(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Write the output to `out` and return the log-sum-exp (B, H, T); on meta only its shape."""
    batch, heads, n_new, _ = q.shape
    if q.is_meta:
        return q.new_empty(batch, heads, n_new, dtype=torch.float32)
    groups = heads // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    values, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    out.copy_(values)
    contiguous: torch.Tensor = lse.contiguous()
    return contiguous


def _flash_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's output lies as its queries do, seen as (B, T, H, D)."""
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    return out, _cpu_kernel(out, q, k, v, causal, None, scale)


def _efficient_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None,
    scale: float | None,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output lies as (B, T, H, D); the log-sum-exp is padded, or empty if not wanted."""
    batch, heads, n_new, _ = q.shape
    out = q.new_empty(batch, n_new, heads, v.shape[-1]).transpose(1, 2)
    lse = _cpu_kernel(out, q, k, v, causal, bias, scale)
    if not with_lse:
        return out, lse.new_empty(batch, heads, 0)
    padding = (0, -n_new % _LSE_ALIGNMENT)
    return out, torch.nn.functional.pad(lse, padding, value=float("inf"))


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update(zip((a.name for a in schema), args, strict=False))
    return {**bound, **kwargs}


def _check(name: str, tensors: Sequence[Any], dropout: float) -> None:
    if not all(isinstance(x, SimTensor) for x in tensors):
        raise PlacementError(f"{name} needs all operands on the card ({caller()})")
    if tensors[1].shape[-2] == 0 or tensors[0].shape[-2] == 0:
        raise SimError(f"{name} over no keys or no queries is undefined ({caller()})")
    if dropout:
        raise SimError(f"{name} with dropout is not simulated")


@handles(aten._scaled_dot_product_flash_attention.default)
def flash(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """FlashAttention: half precision, grouped heads allowed, log-sum-exp (B, H, T)."""
    given = _arguments(func, args, kwargs)
    q, k, v, causal, scale = (given[n] for n in ("query", "key", "value", "is_causal", "scale"))
    name = "_scaled_dot_product_flash_attention"
    _check(name, (q, k, v), given["dropout_p"])
    if not mode.card.profile.flash_attention:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if q.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] > _MAX_FLASH_HEAD_DIM or q.shape[-1] % 8:
        raise RuntimeError(
            "FlashAttention forward only supports head dimension at most 256, a multiple of 8"
        )
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    n_new, n_keys = q.shape[-2], k.shape[-2]
    if causal and n_new != n_keys:
        raise SimError(
            f"{name}: is_causal with {n_new} queries and {n_keys} keys is aligned differently by "
            f"different kernels ({caller()})"
        )

    out, lse = mode.compute(
        _flash_kernel, name, [q.raw, k.raw, v.raw, causal, scale], {}, [q, k, v]
    )
    return out, lse, None, None, n_new, n_keys, None, None, None


@handles(aten._scaled_dot_product_efficient_attention.default)
def efficient(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Memory-efficient attention: any dtype, no grouped heads, log-sum-exp padded to 32 queries."""
    given = _arguments(func, args, kwargs)
    q, k, v, bias = (given[n] for n in ("query", "key", "value", "attn_bias"))
    name = "_scaled_dot_product_efficient_attention"
    operands = (q, k, v) if bias is None else (q, k, v, bias)
    _check(name, operands, given["dropout_p"])
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("_scaled_dot_product_efficient_attention: heads of query and key differ")
    with_lse, causal, scale = (given[n] for n in ("compute_log_sumexp", "is_causal", "scale"))

    raws = [q.raw, k.raw, v.raw, causal, None if bias is None else bias.raw, scale, with_lse]
    out, lse = mode.compute(_efficient_kernel, name, raws, {}, operands)
    return out, lse, None, None


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Choose a kernel as a card's dispatcher would; plain matrix products where none fits."""
    same_heads = query.dim() == 4 and query.shape[1] == key.shape[1]
    if not isinstance(query, SimTensor) or query.dim() != 4 or dropout_p:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    flash_fits = (
        attn_mask is None
        and query.dtype in _HALF
        and torch.cuda.get_device_capability()[0] >= 8
        and (same_heads or enable_gqa)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _MAX_FLASH_HEAD_DIM
        and (not is_causal or query.shape[-2] == key.shape[-2])
    )
    out: torch.Tensor
    if flash_fits:
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    elif same_heads:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[-2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, False, 0.0, is_causal, scale=scale
        )[0]
    else:
        out = _sdpa(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    return out
