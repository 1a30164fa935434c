"""Attention over host memory: the native kernel and torch's, against the definition in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from offload_llama.native import HostAttention, NativeAttention, Run, TorchAttention, build
from offload_llama.native.attention import INSTRUCTION_SETS
from tests.helpers_native import kernel as kernel

RAGGED = (1, 0, 7, 1000, 33)
GROUPS = (1, 2, 3, 4, 5, 8)
HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""What torch's kernel may be off: it rounds queries and outputs to the dtype of the rows."""


@pytest.fixture(params=INSTRUCTION_SETS)
def forced(kernel: NativeAttention, request: pytest.FixtureRequest) -> NativeAttention:
    """The kernel on each of this processor's instruction sets in turn."""
    if request.param not in kernel.instruction_sets:
        pytest.skip(f"this processor has no {request.param}")
    return NativeAttention(build.load(), request.param)


def make(
    groups: int,
    head_dim: int,
    lengths: tuple[int, ...] = RAGGED,
    dtype: torch.dtype = torch.float32,
    n_kv_heads: int = 2,
    scale: float = 1.0,
) -> tuple[torch.Tensor, list[Run]]:
    shapes = [(n, n_kv_heads, head_dim) for n in lengths]
    runs = [(scale * torch.randn(s).to(dtype), torch.randn(s).to(dtype)) for s in shapes]
    return scale * torch.randn(n_kv_heads * groups, head_dim), runs


def definition(q: torch.Tensor, runs: list[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.cat([run[i] for run in runs]).double() for i in (0, 1))
    folded = q.double().view(k.shape[1], -1, q.shape[1])
    scores = torch.einsum("hgd,shd->hgs", folded, k) * q.shape[1] ** -0.5
    out = torch.einsum("hgs,shd->hgd", scores.softmax(-1), v)
    return out.reshape(q.shape), scores.logsumexp(-1).flatten()


def check(
    attention: HostAttention, q: torch.Tensor, runs: list[Run], out_tol: float, lse_tol: float
) -> None:
    out, lse = attention.attend(q, runs, 2)
    true_out, true_lse = definition(q, runs)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), true_out, atol=out_tol, rtol=0)
    torch.testing.assert_close(lse.double(), true_lse, atol=lse_tol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 40, 64, 96, 128])
def test_the_kernel_gives_the_definition_for_every_group_and_head_size(
    forced: NativeAttention, head_dim: int, dtype: torch.dtype
) -> None:
    # Rows of any dtype are widened exactly, so one tolerance holds for all.
    for groups in GROUPS:
        q, runs = make(groups, head_dim, dtype=dtype)
        check(forced, q, runs, out_tol=1e-6, lse_tol=2e-6)


def test_pieces_merge_within_a_millionth_of_one_call(kernel: NativeAttention) -> None:
    q, runs = make(4, 128, (20_000,), n_kv_heads=4)
    out, lse = kernel.attend(q, runs)
    one_out, one_lse = TorchAttention().attend(q, runs)
    assert (out - one_out).abs().max() <= 1e-6
    assert (lse - one_lse).abs().max() <= 2e-6  # two units in the last place of 10
    (k, v) = runs[0]
    cuts = [(k[a:b], v[a:b]) for a, b in ((0, 4_001), (4_001, 4_002), (4_002, 20_000))]
    cut_out, cut_lse = kernel.attend(q, cuts)
    assert (cut_out - out).abs().max() <= 1e-6
    assert (cut_lse - lse).abs().max() <= 2e-6


@pytest.mark.parametrize("n_kv_heads", [1, 8, 32])
def test_wide_rows_take_smaller_blocks_and_give_the_same(
    forced: NativeAttention, n_kv_heads: int
) -> None:
    q, runs = make(2, 128, (1, 77, 300), n_kv_heads=n_kv_heads)
    check(forced, q, runs, out_tol=1e-6, lse_tol=2e-6)


def test_every_float16_is_widened_as_torch_does(forced: NativeAttention) -> None:
    finite = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    finite = finite.view(torch.float16)
    finite = finite[finite.isfinite()].view(-1, 1, 64)
    for row in finite[::97]:
        # One row has the weight 1, so the output is its values.
        out, _ = forced.attend(torch.zeros(1, 64), [(torch.zeros_like(row)[None], row[None])])
        assert torch.equal(out, row.float())


def test_queries_of_any_float_dtype_are_taken(kernel: NativeAttention) -> None:
    q, runs = make(4, 64)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        expected = kernel.attend(q.to(dtype).float(), runs)
        assert torch.equal(kernel.attend(q.to(dtype), runs)[0], expected[0])
    wide = torch.randn(8, 128)
    assert torch.equal(
        kernel.attend(wide[:, :64], runs)[0], kernel.attend(wide[:, :64].clone(), runs)[0]
    )


def test_no_rows_have_no_weight_and_are_no_nan(kernel: NativeAttention) -> None:
    q, empty = make(4, 64, (0, 0))
    for attention in (kernel, TorchAttention()):
        for runs in (empty, []):
            out, lse = attention.attend(q, runs)
            assert torch.equal(out, torch.zeros(8, 64))
            assert torch.equal(lse, torch.full((8,), float("-inf")))


def test_large_scores_neither_overflow_nor_lose_the_others(forced: NativeAttention) -> None:
    q, runs = make(4, 64, scale=30.0)
    out, lse = forced.attend(q, runs)
    _, true_lse = definition(q, runs)
    assert true_lse.max() > 1000
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(lse.double(), true_lse, atol=0, rtol=1e-6)
    # All scores equal and huge: the mean of the values, whatever the block they are in.
    k = torch.full((500, 1, 64), 1e17)
    v = torch.randn(500, 1, 64)
    out, _ = forced.attend(torch.full((1, 64), 1e17), [(k, v)])
    torch.testing.assert_close(out, v.mean(0), atol=1e-6, rtol=0)


def test_scores_far_apart_leave_only_the_highest(forced: NativeAttention) -> None:
    for highest in (0, 299, 499):
        k = torch.full((500, 1, 64), -1e6)
        k[highest] = 1e6
        v = torch.randn(500, 1, 64)
        out, lse = forced.attend(torch.ones(3, 64), [(k, v)])
        assert torch.equal(out, v[highest].expand(3, 64))
        torch.testing.assert_close(lse, torch.full((3,), 8e6), rtol=1e-6, atol=0)


def test_nothing_outside_the_rows_is_read_into_the_result(forced: NativeAttention) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in (20, 40, 64):
            buffer = torch.full((2, 200, 2, head_dim), float("nan"), dtype=dtype)
            buffer[:, 50:101] = torch.randn(2, 51, 2, head_dim)
            inside = [(buffer[0, 50:101], buffer[1, 50:101])]
            check(forced, torch.randn(6, head_dim), inside, out_tol=1e-6, lse_tol=2e-6)


def test_a_nan_among_the_rows_is_not_hidden(forced: NativeAttention) -> None:
    for poisoned in (0, 1):
        q, runs = make(1, 64, (100,), n_kv_heads=1)
        runs[0][poisoned][57, 0, 13] = float("nan")
        out, _ = forced.attend(q, runs)
        assert out[0, 13].isnan()


def test_any_number_of_threads_gives_the_same_bits(forced: NativeAttention) -> None:
    q, runs = make(4, 128, (5, 3_000, 1, 2_000))
    expected = forced.attend(q, runs, 1)
    for n_threads in (2, 3, 16):
        for _ in range(5):
            out, lse = forced.attend(q, runs, n_threads)
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_concurrent_calls_do_not_meet(kernel: NativeAttention) -> None:
    cases = [make(groups, 64, (7, 2_000)) for groups in (1, 2, 4, 8)]
    expected = [kernel.attend(q, runs, 1)[0] for q, runs in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        q, runs = cases[index]
        for _ in range(30):
            if not torch.equal(kernel.attend(q, runs, 2)[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_threads_of_its_own(kernel: NativeAttention) -> None:
    # In a process of its own: forking beside torch's threads is nobody's business but a child's.
    code = (
        "import os, torch\n"
        "from offload_llama.native import NativeAttention, build\n"
        "torch.set_num_threads(1)\n"
        "kernel = NativeAttention(build.load())\n"
        "q, k, v = torch.randn(8, 64), torch.randn(5000, 2, 64), torch.randn(5000, 2, 64)\n"
        "before = kernel.attend(q, [(k, v)], 2)[0]\n"
        "child = os.fork()\n"
        "same = torch.equal(kernel.attend(q, [(k, v)], 2)[0], before)\n"
        "if not child: os._exit(not same)\n"
        "print(same, os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "0"]


@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_the_fallback_gives_the_definition_and_the_kernels_result(
    kernel: NativeAttention, groups: int
) -> None:
    q, runs = make(groups, 64)
    check(TorchAttention(), q, runs, out_tol=1e-6, lse_tol=2e-6)
    for dtype, tolerance in HALF.items():
        q, runs = make(groups, 64, dtype=dtype)
        ours, theirs = kernel.attend(q, runs), TorchAttention().attend(q, runs)
        for left, right in zip(ours, theirs, strict=True):
            assert left.shape == right.shape
            torch.testing.assert_close(left, right, atol=tolerance, rtol=0)


def test_rows_that_do_not_belong_together_are_refused(kernel: NativeAttention) -> None:
    q, [(k, v)] = make(2, 64, (5,))
    for attention in (kernel, TorchAttention()):
        for bad_q, runs, why in (
            (q, [(k, v[:4])], "differ"),
            (q, [(k, v.half())], "differ"),
            (q, [(k, v), (k.half(), v.half())], "differ"),
            (q, [(k[..., :32].contiguous(), v[..., :32].contiguous())], "do not belong"),
            (q[:3], [(k, v)], "do not belong"),
            (q, [(k.double(), v.double())], "do not belong"),
            (q, [(k[:, :1], v[:, :1])], "contiguous"),
            (q[None], [(k, v)], "queries must be"),
            (q.to("meta"), [(k, v)], "queries must be"),
            (q, [(k.to("meta"), v.to("meta"))], "host memory"),
        ):
            with pytest.raises(ValueError, match=why):
                attention.attend(bad_q, runs)
