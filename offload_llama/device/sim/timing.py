"""Seconds that an operation takes on a card, from its own operands.

A roofline: the larger of bytes over memory bandwidth and operations over the matrix rate, plus
the fixed time of a kernel. This knows the hardware profile, and nothing of the engine's plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_llama.device.sim.spans import Span
from offload_llama.hardware import HardwareProfile

HALF = (torch.float16, torch.bfloat16)

# Position of the left factor among the arguments.
PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "linear", "mv", "dot", "_weight_int4pack_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), 1),
}
ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)
# These read as much of their first operand as they give back, not all of it.
GATHERS = frozenset({"index", "index_select", "embedding", "gather", "take"})
# These write as much of their first operand as their source holds.
SCATTERS = frozenset(
    {"index_put_", "_index_put_impl_", "index_copy_", "index_add_", "scatter_", "masked_scatter_"}
)
# Radix sorts make several passes over their data; a pass for each byte of a 64-bit pair.
SORTS = frozenset({"sort", "topk", "argsort", "kthvalue"})
_SORT_PASSES = 8


def matrix_flops(profile: HardwareProfile, dtype: torch.dtype) -> float:
    """Return the rate of matrix products in this dtype."""
    return profile.fp16_flops if dtype in HALF else profile.fp32_flops


def kernel_seconds(
    profile: HardwareProfile,
    name: str,
    args: Sequence[object],
    inputs: Sequence[Span],
    outputs: Sequence[Span],
    result: torch.Tensor | None,
) -> float:
    """Return the time of one kernel.

    Args:
        profile: the card.
        name: the operation's ATen name.
        args: its arguments, for shapes and dtypes.
        inputs: bytes it reads.
        outputs: bytes it writes.
        result: its (first) result, for its shape.
    """
    out_bytes = sum(span.nbytes for span in outputs)
    in_bytes = sum(span.nbytes for span in inputs)
    if name in GATHERS:
        in_bytes = out_bytes + sum(span.nbytes for span in inputs[1:])
    elif name in SCATTERS:
        in_bytes = out_bytes = sum(span.nbytes for span in inputs)
    elif name in SORTS:
        in_bytes *= _SORT_PASSES
    seconds = (in_bytes + out_bytes) / profile.mem_bytes_per_s
    flops, dtype = 0, torch.float32
    if name in PRODUCTS and result is not None:
        left = args[PRODUCTS[name]]
        assert isinstance(left, torch.Tensor)
        flops, dtype = 2 * result.numel() * left.shape[-1], left.dtype
    elif name in ATTENTION:
        query, key = args[0], args[1]
        assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor)
        # Two products, each a multiply and an add for every query, key and head dimension.
        flops, dtype = 4 * query.numel() * key.shape[-2], query.dtype
    if flops:
        seconds = max(seconds, flops / matrix_flops(profile, dtype))
    return profile.kernel_s + seconds


def copy_seconds(profile: HardwareProfile, kind: str, n_bytes: int, pinned: bool) -> float:
    """Return the time of one copy over the link, alone on it."""
    rate = profile.h2d_bytes_per_s if kind == "h2d" else profile.d2h_bytes_per_s
    if not pinned:
        rate *= profile.pageable_factor
    return profile.copy_latency_s + n_bytes / rate


def host_attention_seconds(profile: HardwareProfile, inputs: Sequence[Span]) -> float:
    """Return the time of attention on the CPU: its operands are read once from host memory."""
    return sum(span.nbytes for span in inputs) / profile.cpu_attention_bytes_per_s


def host_copy_seconds(profile: HardwareProfile, n_bytes: int) -> float:
    """Return the time of a copy within host memory, which reads and writes every byte."""
    return 2 * n_bytes / profile.host_dram_bytes_per_s
