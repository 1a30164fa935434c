"""Partial attention and its merge."""

from __future__ import annotations

import pytest
import torch

from offload_llama.attention import attend, choose_kernel, plain_attention

CPU_KERNEL = choose_kernel(torch.device("cpu"), torch.float32, 8)


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Attention in float64 with every mask written out; query t sees keys 0..start+t."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * q.shape[-1] ** -0.5
    hidden = torch.arange(len(k))[None] > start + torch.arange(len(q))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kernel", [CPU_KERNEL, plain_attention])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("n_new", [1, 7, 33])
def test_parts_and_own_tokens_merge_to_attention_by_definition(kernel, kv_heads, groups, n_new):
    """B01: with a warm cache every new token sees all of it, and its own block causally."""
    s = 90
    q = torch.randn(n_new, kv_heads * groups, 16) * 2
    k, v = torch.randn(2, s + n_new, kv_heads, 16)
    cuts = [(0, 32), (32, 64), (64, s)]
    out = attend(kernel, q, [(k[a:b], v[a:b]) for a, b in cuts], (k[s:], v[s:]))
    # Scores reach 20, so their float32 rounding moves a weight by up to 20 * eps of itself.
    assert (out.double() - by_definition(q, k, v, s)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype):
    q, k, v = torch.randn(5, 4, 16), torch.randn(60, 2, 16), torch.randn(60, 2, 16)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = attend(CPU_KERNEL, q, [(k[:32], v[:32]), (k[32:55], v[32:55])], (k[55:], v[55:]))
    assert out.dtype == dtype
    # One rounding of each partial output and one of the result: 2 units in the last place.
    tolerance = 2 * torch.finfo(dtype).eps * 4
    assert (out.double() - by_definition(q, k, v, 55)).abs().max() < tolerance


def test_a_single_part_is_the_kernel_s_own_result():
    q, k, v = torch.randn(1, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    direct, _ = CPU_KERNEL(
        q.view(1, 2, 2, 8), k.transpose(0, 1)[None], v.transpose(0, 1)[None], False
    )
    assert torch.equal(attend(CPU_KERNEL, q, [(k, v)], None), direct.view(1, 4, 8))


def test_attention_without_any_key_is_refused():
    with pytest.raises(ValueError, match="at least one key"):
        attend(CPU_KERNEL, torch.randn(1, 4, 8), [], None)
