"""Operations on the simulated card give the numbers of the CPU's kernels, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload_llama.device.sim import SimError, SimulatedDevice, simulated
from tests.helpers_sim import ORDERS

aten = torch.ops.aten
Op = Callable[[torch.Tensor], Any]

OPS: dict[str, Op] = {
    "arithmetic": lambda x: (x * 2 - 1) / (x.abs() + 1),
    "in place": lambda x: x.clone().exp_().mul_(x).add_(1).clamp_(max=3),
    "products": lambda x: x @ x.T,
    "linear with bias": lambda x: F.linear(x, x, x[:, 0]),
    "batched products": lambda x: torch.bmm(x.expand(2, 8, 8), x.expand(2, 8, 8)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "norm": lambda x: F.rms_norm(x, (8,), x[0], 1e-5),
    "silu": F.silu,
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logaddexp": lambda x: torch.logaddexp(x, x.T),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "reductions": lambda x: (x.sum(), x.mean(0), x.amax(-1), x.argmax(-1), x.max(0)),
    "sorting": lambda x: (x.sort(-1, descending=True), x.topk(3), x.argsort(0), x.cumsum(-1)),
    "casts": lambda x: (x.half().float(), x.to(torch.bfloat16), x.int(), x.view(torch.uint8)),
    "views": lambda x: (x.T, x[1:3, ::2], x.view(2, 4, 8).permute(2, 0, 1), x.expand(3, 8, 8)),
    "reshape": lambda x: x.T.reshape(-1),
    "contiguous": lambda x: x.T.contiguous(),
    "unflatten": lambda x: torch.stack(x.unflatten(-1, (-1, 2)).unbind(-1), -1).flatten(-2),
    "splits": lambda x: (*x.split(3), *x.chunk(2, 1), *x.unbind(0)),
    "cat and stack": lambda x: (torch.cat([x, x]), torch.stack((x, x), 1), x.repeat(2, 1)),
    "indexing": lambda x: (
        x[torch.tensor([1, 0], device=x.device)],
        x.index_select(1, torch.arange(3, device=x.device)),
        x.gather(0, torch.zeros(1, 8, dtype=torch.int64, device=x.device)),
        F.embedding(torch.tensor([[2]], device=x.device), x),
        x[x > 0],
        x[..., None, 3],
    ),
    "masks": lambda x: (
        x.masked_fill(x > 0, float("-inf")),
        torch.where(x > 0, x, -x),
        torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1),
        x.masked_select(x > 0),
        (x > 0) & (x < 1) | ~(x == 2),
    ),
    "factories": lambda x: (
        torch.arange(3, 7, device=x.device),
        torch.full((2, 2), 5, device=x.device),
        torch.eye(3, device=x.device),
        torch.linspace(0, 1, 5, device=x.device),
        torch.tensor([[1, 2], [3, 4]], device=x.device, dtype=torch.float32),
        torch.as_tensor([1, 2], device=x.device),
        x.new_zeros(3),
        torch.zeros_like(x),
        x.new_tensor([1.0, 2.0]),
    ),
    "out=": lambda x: torch.mm(x, x, out=torch.zeros(8, 8, device=x.device)),
    "writes through views": lambda x: writes_through_views(x.clone()),
    "scatter": lambda x: x.clone().scatter_(
        0, torch.zeros(1, 8, dtype=torch.int64, device=x.device), 9.0
    ),
    "index_copy_": lambda x: x.clone().index_copy_(
        0, torch.tensor([3, 1], device=x.device), x[:2].clone()
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 4, 8),) * 3),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(1, 2, 4, 8),) * 3, is_causal=True
    ),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(1, 2, 4, 8),) * 3,
        attn_mask=torch.ones(4, 4, dtype=torch.bool, device=x.device).tril(),
    ),
    "scalars": lambda x: (x[0, 0].item(), x[0].tolist(), float(x.sum()), bool(x[0, 0] > 0)),
    "comparison": lambda x: (torch.equal(x, x), torch.allclose(x, x), (x == x.T).all().item()),
}


def writes_through_views(x: torch.Tensor) -> torch.Tensor:
    x[1:3, ::2] = 5.0
    x.T[2].copy_(x[3])
    x.view(-1)[:4] += 1
    x[x > 1] = 0.0
    x[torch.tensor([4], device=x.device)] = x[5:6] * 2
    return x


def results(value: Any) -> list[Any]:
    """Return all tensors, brought to the host, and plain values of a nest."""
    if isinstance(value, torch.Tensor):
        return [value.cpu()]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in results(item)]
    return [value]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("order", ["inorder", "copy_last"])
def test_an_operation_gives_the_cpus_bits(op: Op, order: str) -> None:
    x = torch.randn(8, 8)
    expected = results(op(x))
    device = simulated(order=order)
    with device.scope():
        found = results(op(x.to(device.torch_device)))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        else:
            assert a == b
    assert device.card.errors == []


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_an_operation_has_the_same_shapes_without_values(op: Op) -> None:
    device = simulated(values=False)
    with device.scope():
        x = torch.randn(8, 8, device=device.torch_device)
        try:
            value = op(x)
        except SimError as error:
            assert "needs values" in str(error)
            return
    found = [v.shape for v in flat(value) if isinstance(v, torch.Tensor)]
    expected = [v.shape for v in flat(op(torch.zeros(8, 8))) if isinstance(v, torch.Tensor)]
    assert found == expected


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [value]


class Gate(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(4, 4, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, self.weight))


@pytest.mark.parametrize("order", ORDERS)
def test_a_module_holds_tensors_of_the_card_as_buffers(order: str) -> None:
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    module, device = Gate(), simulated(order=order)
    with device.scope():
        module.weight = weight.to(device.torch_device)
        assert module.weight.device == device.torch_device
        assert torch.equal(module(x.to(device.torch_device)).cpu(), F.silu(F.linear(x, weight)))


def test_inference_mode_works_as_no_grad_does() -> None:
    for order in ORDERS:
        device = simulated(order=order)
        with device.scope():
            cache = torch.zeros(4, device=device.torch_device)
            with torch.inference_mode():
                x = torch.ones(4, device=device.torch_device) * 2
                cache[:2].copy_(x[:2])
            assert cache.tolist() == [2.0, 2.0, 0.0, 0.0]


def heads(device: SimulatedDevice, dtype: torch.dtype, n_kv_heads: int, n: int) -> torch.Tensor:
    return torch.randn(2, n_kv_heads, n, 16, dtype=dtype).to(device.torch_device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_kv_heads", [6, 2])
def test_flash_attention_returns_the_definition_and_its_log_sum_exp(
    dtype: torch.dtype, n_kv_heads: int
) -> None:
    device = simulated()
    with device.scope():
        q, k, v = (
            heads(device, dtype, h, n) for h, n in ((6, 5), (n_kv_heads, 9), (n_kv_heads, 9))
        )
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v)
        assert rest[2:4] == [5, 9]
        q, k, v, out, lse = (x.cpu().double() for x in (q, k, v, out, lse))
    k, v = (x.repeat_interleave(6 // n_kv_heads, 1) for x in (k, v))
    scores = q @ k.mT / 4
    assert lse.shape == (2, 6, 5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=2e-3)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=0, atol=2e-2)


def test_flash_attention_is_half_precision_only_and_has_a_largest_head() -> None:
    device = simulated()
    with device.scope():
        x = heads(device, torch.float32, 2, 4)
        with pytest.raises(RuntimeError, match="fp16 and bf16"):
            aten._scaled_dot_product_flash_attention(x, x, x)
        odd = torch.ones(1, 1, 4, 12, dtype=torch.float16, device=device.torch_device)
        with pytest.raises(RuntimeError, match="multiple of 8"):
            aten._scaled_dot_product_flash_attention(odd, odd, odd)
    turing = simulated("rtx-2060")
    with turing.scope(), pytest.raises(RuntimeError, match="Ampere"):
        x = heads(turing, torch.float16, 2, 4)
        aten._scaled_dot_product_flash_attention(x, x, x)


def test_efficient_attention_pads_its_log_sum_exp_and_takes_no_grouped_heads() -> None:
    for kwargs in ({"order": "inorder"}, {"order": "copy_last"}, {"values": False}):
        device = simulated(**kwargs)
        with device.scope():
            q, k = heads(device, torch.float32, 4, 5), heads(device, torch.float32, 4, 9)
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, k, None, True)
            assert out.shape == q.shape and lse.shape == (2, 4, 32)
            # The output lies as (B, T, H, D), as on a card.
            assert out.transpose(1, 2).is_contiguous()
            if device.card.values:
                scores = q.cpu() @ k.cpu().mT / 4
                torch.testing.assert_close(lse[..., :5].cpu(), scores.logsumexp(-1))
                assert lse[..., 5:].isinf().all().item()
            nothing = aten._scaled_dot_product_efficient_attention(q, k, k, None, False)[1]
            assert nothing.numel() == 0
            grouped = heads(device, torch.float32, 2, 9)
            with pytest.raises(RuntimeError, match="heads"):
                aten._scaled_dot_product_efficient_attention(q, grouped, grouped, None, True)


def test_attention_over_no_keys_is_an_error_and_not_the_end_of_the_process() -> None:
    device = simulated()
    with device.scope():
        q, none = heads(device, torch.float16, 2, 4), heads(device, torch.float16, 2, 0)
        for attend in (
            lambda: aten._scaled_dot_product_flash_attention(q, none, none),
            lambda: aten._scaled_dot_product_efficient_attention(q, none, none, None, True),
            lambda: aten._scaled_dot_product_flash_attention_for_cpu(
                *(x.cpu() for x in (q, none, none))
            ),
        ):
            with pytest.raises(SimError, match="no keys"):
                attend()


def test_a_causal_mask_that_kernels_align_differently_is_refused() -> None:
    device = simulated()
    with device.scope():
        q, k = heads(device, torch.float16, 2, 4), heads(device, torch.float16, 2, 9)
        with pytest.raises(SimError, match="aligned differently"):
            aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)


def test_pytorchs_attention_chooses_a_kernel_as_a_card_does() -> None:
    device = simulated()
    with device.scope():
        half, full = heads(device, torch.float16, 4, 5), heads(device, torch.float32, 4, 5)
        grouped = heads(device, torch.float16, 2, 5)
        F.scaled_dot_product_attention(half, half, half)
        F.scaled_dot_product_attention(half, grouped, grouped, enable_gqa=True)
        F.scaled_dot_product_attention(full, full, full)
        device.synchronize()
        ops = [r.op for r in device.card.timeline if "attention" in r.op]
    flash = "_scaled_dot_product_flash_attention"
    assert ops == [flash, flash, "_scaled_dot_product_efficient_attention"]


def test_random_numbers_come_from_the_cpus_generator() -> None:
    device = simulated()
    with device.scope():
        found = torch.rand(
            4, device=device.torch_device, generator=torch.Generator().manual_seed(3)
        )
        assert found.tolist() == torch.rand(4, generator=torch.Generator().manual_seed(3)).tolist()


def test_numpy_is_refused_as_by_a_cuda_tensor() -> None:
    device = simulated()
    with device.scope():
        x = torch.ones(2, device=device.torch_device)
        with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
            x.numpy()
        assert x.numpy(force=True).tolist() == [1.0, 1.0]


def test_what_would_change_a_tensors_memory_is_refused() -> None:
    device = simulated()
    with device.scope():
        x = torch.ones(2, device=device.torch_device)
        with pytest.raises(SimError, match="not simulated"):
            x.resize_(4)
        with pytest.raises(SimError, match="resize its out= tensor"):
            torch.cat([x, x], out=torch.ones(0, device=device.torch_device))


def test_shapes_only_costs_neither_time_nor_memory() -> None:
    """A layer of Llama-3.1-8B's size, 15 GiB of weights in all."""
    device = simulated("rtx-3060-12gb?vram=24GiB", values=False)
    started = time.perf_counter()
    with device.scope():
        shapes = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
        layers = [
            [
                torch.empty(shape, dtype=torch.float16, device=device.torch_device)
                for shape in shapes
            ]
            for _ in range(32)
        ]
        x = torch.empty(1, 4096, dtype=torch.float16, device=device.torch_device)
        for _ in range(3):
            for wq, wk, w1, w2 in layers:
                h = F.rms_norm(x, (4096,))
                F.linear(h, wk)
                x = x + F.linear(h, wq) + F.linear(F.silu(F.linear(h, w1)), w2)
        assert x.sum().item() == 0.0
        assert x.cpu().count_nonzero() == 0
    weights_bytes = 32 * 2 * (4096 * 4096 + 1024 * 4096 + 2 * 14336 * 4096)
    assert device.memory().peak_bytes > weights_bytes
    assert device.clock() == pytest.approx(3 * weights_bytes / 360e9, rel=0.05)
    assert time.perf_counter() - started < 20


def test_an_operation_costs_the_host_little_time() -> None:
    """A decode step of 30 layers is about 1,500 operations; half a second of that is bearable."""
    device = simulated()
    with device.scope():
        x, w = (torch.ones(n, 64, device=device.torch_device) for n in (1, 64))
        started = time.perf_counter()
        for _ in range(300):
            F.linear(x, w).view(4, 16).mul_(2).add(1)[1:]
        per_launch_s = (time.perf_counter() - started) / 900
    assert per_launch_s < 1e-3
