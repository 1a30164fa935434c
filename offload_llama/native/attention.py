"""Attention over host memory by the native kernel, and by torch's where that cannot be had."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from typing import ClassVar

import torch

from offload_llama.attention import merge
from offload_llama.errors import ConfigError
from offload_llama.native import build
from offload_llama.native.api import DTYPES, HostAttention, Run, nothing, rows_of

aten = torch.ops.aten

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
"""In the order of the kernel's own numbers, slowest first."""
_ERRORS = {1: ValueError("the kernel refused its arguments"), 2: MemoryError()}


class _Layout(ctypes.Structure):
    """How a row is laid out; see host_attention.h."""

    _fields_: ClassVar = [
        ("element", ctypes.c_int32),
        ("n_kv_heads", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("row_bytes", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
    ]


class NativeAttention:
    """The native kernel: one pass over keys and values, all query heads of a KV head together.

    Its result has the same bits for any number of threads. Python's lock is released meanwhile,
    and several threads may call at once.

    Args:
        library: from `build.load`.
        instruction_set: one of `INSTRUCTION_SETS`; the best this processor has where None.

    Raises:
        ConfigError: the instruction set is unknown, or this processor lacks it.
    """

    def __init__(self, library: ctypes.CDLL, instruction_set: str | None = None) -> None:
        library.host_attention_has.argtypes = [ctypes.c_int32]
        library.host_attention_has.restype = ctypes.c_int32
        here = [s for i, s in enumerate(INSTRUCTION_SETS) if library.host_attention_has(i)]
        chosen = here[-1] if instruction_set is None else instruction_set
        if chosen not in here:
            raise ConfigError(
                f"{build.VARIABLE} cannot be {chosen} here; choose 0 or one of {', '.join(here)}"
            )
        self.instruction_sets = tuple(here)
        self.instruction_set = chosen
        self._set = INSTRUCTION_SETS.index(chosen)
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._attend = library.host_attention_attend
        self._attend.argtypes = [
            *(pointer, pointer, int64, ctypes.POINTER(_Layout), ctypes.c_float),
            *(int32, int32, pointer, pointer),
        ]
        self._attend.restype = int32
        self._read = library.host_attention_read
        self._read.argtypes = [pointer, int64, int32, int32]
        self._read.restype = ctypes.c_uint64

    @property
    def title(self) -> str:
        return f"native kernel ({self.instruction_set})"

    def attend(
        self, q: torch.Tensor, runs: Sequence[Run], n_threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp; see `HostAttention.attend`."""
        filled = rows_of(q, runs)
        if not filled:
            return nothing(q)
        n_heads, head_dim = q.shape
        k = filled[0][0]
        row_bytes, head_bytes = (n * k.element_size() for n in k.stride()[:2])
        n_kv_heads = k.shape[1]
        element = DTYPES.index(k.dtype)
        layout = _Layout(
            *(element, n_kv_heads, n_heads // n_kv_heads, head_dim, row_bytes, head_bytes)
        )
        queries = q.detach().to(torch.float32).contiguous()
        places = array("q", [n for k, v in filled for n in (k.data_ptr(), v.data_ptr(), len(k))])
        out, lse = torch.empty(n_heads, head_dim), torch.empty(n_heads)
        status = self._attend(
            queries.data_ptr(),
            places.buffer_info()[0],
            len(filled),
            ctypes.byref(layout),
            head_dim**-0.5,
            n_threads or torch.get_num_threads(),
            self._set,
            out.data_ptr(),
            lse.data_ptr(),
        )
        if status:
            raise _ERRORS[status]
        return out, lse

    def read(self, memory: torch.Tensor, n_threads: int | None = None) -> None:
        """Read memory from end to end with the kernel's threads: a bound to measure against."""
        n_bytes = memory.numel() * memory.element_size()
        self._read(memory.data_ptr(), n_bytes, n_threads or torch.get_num_threads(), self._set)


class TorchAttention:
    """torch's own kernel, run by run, merged by log-sum-exp: slower, and always there."""

    title = "torch's kernel"

    def attend(
        self, q: torch.Tensor, runs: Sequence[Run], n_threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp; see `HostAttention.attend`.

        Queries are rounded to the dtype of the rows, and so is each run's output.
        """
        filled = rows_of(q, runs)
        if not filled:
            return nothing(q)
        n_heads, head_dim = q.shape
        n_kv_heads = filled[0][0].shape[1]
        folded = q.to(filled[0][0].dtype).reshape(1, n_kv_heads, -1, head_dim)
        merged = None
        for k, v in filled:
            merged = merge(
                merged,
                aten._scaled_dot_product_flash_attention_for_cpu(
                    folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
                ),
            )
        assert merged is not None
        out, lse = merged
        return out.float().reshape(n_heads, head_dim), lse.float().reshape(n_heads)


def choose() -> tuple[HostAttention, str]:
    """Return the best attention over host memory that can be had here, and why it is that one.

    The first call on a computer compiles the kernel, which takes some ten seconds.

    Raises:
        ConfigError: the variable `OFFLOAD_LLAMA_NATIVE` asks for what this processor lacks.
    """
    wanted = os.environ.get(build.VARIABLE)
    try:
        library = build.load()
    except build.BuildError as error:
        attention: HostAttention = TorchAttention()
        return attention, f"{attention.title}: {error}"
    native = NativeAttention(library, wanted or None)
    chosen = f"{build.VARIABLE} asks for it" if wanted else "the best this processor has"
    return native, f"{native.title}: {chosen}"
