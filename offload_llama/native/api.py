"""What attention over host memory is, whoever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Run = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of neighbouring rows, each (S, KH, D), contiguous, on the CPU."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class HostAttention(Protocol):
    """Attention of one token of one sequence over rows that lie in runs of host memory."""

    @property
    def title(self) -> str:
        """What computes it, in a few words."""
        ...

    def attend(
        self, q: torch.Tensor, runs: Sequence[Run], n_threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention output over all rows, (H, D), and its log-sum-exp, (H), in float32.

        Without any row the output is zeros and the log-sum-exp -inf, so that a merge by
        log-sum-exp gives it no weight.

        Args:
            q: queries, (H, D), rotary applied, any float dtype, on the CPU.
            runs: the rows; all of one dtype, KH and D. Runs may be empty.
            n_threads: threads to use, torch's number where None. `TorchAttention` always uses
                torch's, which is one setting of the whole process.

        Raises:
            ValueError: shapes, dtypes or devices do not belong together.
        """
        ...


def rows_of(q: torch.Tensor, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that have rows, once all are known to belong together.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """
    if q.ndim != 2 or q.device.type != "cpu" or not q.is_floating_point():
        raise ValueError(f"queries must be (H, D) floats on the CPU, got {_describe(q)}")
    n_heads, head_dim = q.shape
    first = runs[0][0] if runs else None
    for k, v in runs:
        assert first is not None
        if k.shape != v.shape or k.dtype != first.dtype or v.dtype != first.dtype:
            raise ValueError(f"keys {_describe(k)} and values {_describe(v)} differ")
        if k.ndim != 3 or k.shape[1:] != first.shape[1:] or k.shape[2] != head_dim:
            raise ValueError(f"rows {_describe(k)} do not belong to queries {_describe(q)}")
        if n_heads % k.shape[1] or k.dtype not in DTYPES:
            raise ValueError(f"rows {_describe(k)} do not belong to queries {_describe(q)}")
        if k.device.type != "cpu" or v.device.type != "cpu":
            raise ValueError(f"rows must be in host memory, got {_describe(k)}")
        if not (k.is_contiguous() and v.is_contiguous()):
            raise ValueError(f"rows must be contiguous, got strides {k.stride()}, {v.stride()}")
    return [run for run in runs if len(run[0])]


def _describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over no rows."""
    n_heads, head_dim = q.shape
    return torch.zeros(n_heads, head_dim), torch.full((n_heads,), float("-inf"))
