"""Weights in 8 and 4 bits: what codes stand for, and every kernel against the portable one."""

from __future__ import annotations

import pytest
import torch

from offload_llama.cost.packing import PACKED, PORTABLE, TINYGEMM, group_of, tensor_sizes
from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.weights import (
    Codes,
    Linear,
    QuantLinear,
    backends,
    choose_kernel,
    empty_like_packed,
    quantize,
    stacked,
    together,
)
from offload_llama.weights.kernels import (
    CpuInt4,
    CpuInt8,
    Kernel,
    Portable,
    Tinygemm,
    cpu_block_rows,
    unpacked,
)

CPU = torch.device("cpu")
AMPERE, TURING = "rtx-3060-12gb", "rtx-2060-12gb"


def packed(
    kernel: Kernel, codes: Codes, device: torch.device, sizes: list[int] | None = None
) -> QuantLinear:
    return QuantLinear(kernel, kernel.pack(codes, device), codes.shape, sizes)


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def rounding(weights: str, w: torch.Tensor) -> torch.Tensor:
    """The most that one weight may be off: half a step, and the rounding of scale and zero."""
    grouped = w.view(len(w), -1, group_of(weights, w.shape[1]))
    if weights == "int8":
        return grouped.abs().amax(-1, keepdim=True) / 127 * 0.51
    span = grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)
    return span / 15 * 0.5 + grouped.abs().amax(-1, keepdim=True) * 2**-7


@pytest.mark.parametrize("weights", PACKED)
def test_a_code_stands_for_a_weight_within_half_a_step(weights: str) -> None:
    w = matrix(40, 192)
    codes = quantize(w, weights)
    off = (codes.dequantize(torch.float32) - w).abs().view(40, -1, group_of(weights, 192))
    assert (off <= rounding(weights, w)).all()
    assert codes.shape == (40, 192) and codes.group == group_of(weights, 192)


@pytest.mark.parametrize("weights", PACKED)
def test_groups_of_equal_weights_keep_their_value(weights: str) -> None:
    w = torch.zeros(3, 64)
    w[1], w[2] = 0.5, -3.0
    # With 8 bits a row's scale is 1/127 of it, rounded; with 4 the value itself is the zero.
    tolerance = 2**-8 if weights == "int8" else 0.0
    back = quantize(w, weights).dequantize(torch.float32)
    torch.testing.assert_close(back, w, rtol=tolerance, atol=0.0)


def test_weights_that_were_in_4_bits_get_the_same_codes_again() -> None:
    """As from a Q4_1 file: what is lost is only the rounding of each group's scale and zero."""
    numbers = torch.randint(0, 16, (64, 6, 32), generator=torch.Generator().manual_seed(1))
    numbers[..., 0], numbers[..., 1] = 0, 15
    step, low = torch.rand(64, 6, 1) * 0.01 + 0.001, -torch.rand(64, 6, 1) * 0.1
    w = (numbers * step.half().float() + low.half().float()).view(64, 192)
    assert torch.equal(quantize(w, "int4-g32").numbers() + 8, numbers.view(64, 192))


def test_a_matrix_is_quantised_row_by_row() -> None:
    """The loader reads pieces of any height."""
    w = matrix(50, 128)
    for weights in PACKED:
        whole = quantize(w, weights)
        pieces = [quantize(w[i : i + 7], weights) for i in range(0, 50, 7)]
        for tensor, parts in zip(
            whole.tensors(), zip(*(p.tensors() for p in pieces), strict=True), strict=True
        ):
            assert torch.equal(tensor, torch.cat(parts))


def expected(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """The product in float64, from the numbers that the codes stand for."""
    numbers = codes.numbers().view(len(codes.codes), -1, codes.group).double()
    w = numbers * codes.scales.double()[..., None]
    if codes.zeros is not None:
        w += codes.zeros.double()[..., None]
    return x.double() @ w.view(codes.shape).t()


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("block", [None, 24])
def test_the_portable_kernel_is_right_in_one_block_and_in_several(
    weights: str, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block is not None:
        monkeypatch.setattr("offload_llama.weights.kernels.block_rows", lambda columns: block)
    codes, x = quantize(matrix(100, 128), weights), matrix(5, 128)
    kernel = Portable()
    out = kernel.multiply(x, kernel.pack(codes, CPU))
    assert (out - expected(x, codes)).abs().max() < 1e-4


@pytest.mark.parametrize(("kernel", "weights"), [
    (CpuInt8(), "int8"), (CpuInt4(), "int4"), (CpuInt4(), "int4-g32"),
])  # fmt: skip
@pytest.mark.parametrize("n", [1, 3, 200])
@pytest.mark.parametrize("rows", [48, 208])
def test_the_cpu_s_kernels_equal_the_portable_one_on_rounded_activations(
    kernel: Kernel, weights: str, n: int, rows: int
) -> None:
    """bfloat16 in and out: 200 rows are a prompt, and take the dense way in float32."""
    codes, x = quantize(matrix(rows, 192), weights), matrix(n, 192).bfloat16().float()
    out = kernel.multiply(x, kernel.pack(codes, CPU))
    right = expected(x, codes)
    assert out.dtype == torch.float32
    assert ((out - right).abs() <= right.abs() * 2**-7 + 0.02).all()
    if n == 200:
        assert (out - right).abs().max() < 1e-4


def test_codes_in_the_cpu_s_layout_can_be_had_back() -> None:
    assert cpu_block_rows() is not None
    for rows in (16, 64, 208):
        codes = quantize(matrix(rows, 64), "int4")
        tensors = CpuInt4().pack(codes, CPU)
        back = unpacked(tensors["packed"], tensors["scales"])
        for mine, other in zip(back.tensors(), codes.tensors(), strict=True):
            assert torch.equal(mine, other)


def test_a_matrix_packed_in_blocks_is_packed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = quantize(matrix(208, 64), "int4")
    whole = CpuInt4().pack(codes, CPU)["packed"]
    monkeypatch.setattr("offload_llama.weights.kernels._PACK_ELEMENTS", 70 * 64)
    assert torch.equal(CpuInt4().pack(codes, CPU)["packed"], whole)


@pytest.mark.parametrize(("rows", "columns", "name"), [
    (64, 64, "CpuInt8"), (63, 48, "CpuInt8"), (64, 50, "Portable"),
])  # fmt: skip
def test_8_bit_matrices_whose_rows_no_vector_fits_are_left_to_the_portable_kernel(
    rows: int, columns: int, name: str
) -> None:
    """The CPU's kernel reads beyond such rows, and the process may die."""
    assert type(choose_kernel("int8", CPU, rows, columns)).__name__ == name
    assert type(choose_kernel("int4", CPU, 24, 64)).__name__ == "Portable"


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [72, 128])
def test_the_card_s_kernel_equals_the_portable_one(
    weights: str, dtype: torch.dtype, rows: int
) -> None:
    """Also 8 bits, which it takes as two times 4."""
    codes, x = quantize(matrix(rows, 192), weights), matrix(3, 192).bfloat16().to(dtype)
    card = simulated(AMPERE)
    with card.scope():
        place = card.torch_device
        kernel = choose_kernel(weights, place, rows, 192)
        assert kernel.name == TINYGEMM
        linear = packed(kernel, codes, place)
        out = linear(x.to(place)).cpu()
        sizes = tuple(b.numel() * b.element_size() for b in linear.buffers())
    assert out.dtype == dtype and card.card.errors == []
    right = expected(x, codes)
    assert ((out - right).abs() <= right.abs() * 2**-6 + 0.1).all()
    assert sizes == tensor_sizes(weights, TINYGEMM, rows, 192)
    with card.scope():
        empty = empty_like_packed(weights, place, rows, 192)
    like = {name: (b.shape, b.dtype) for name, b in linear.named_buffers()}
    assert {name: (b.shape, b.dtype) for name, b in empty.items()} == like


def test_the_two_halves_of_an_8_bit_code_stand_for_it_exactly() -> None:
    codes = Codes(
        torch.arange(-127, 128, dtype=torch.int8).repeat(8, 2)[:, :256].contiguous(),
        torch.full((8, 1), 2.0, dtype=torch.bfloat16),
        None,
    )
    card = simulated(AMPERE)
    with card.scope():
        kernel = Tinygemm()
        tensors = kernel.pack(codes, card.torch_device)
        one = torch.eye(256, dtype=torch.bfloat16).to(card.torch_device)
        out = kernel.multiply(one, tensors).cpu()
    assert torch.equal(out.float(), 2.0 * codes.codes.float().t())


@pytest.mark.parametrize("weights", PACKED)
def test_an_older_card_decodes_by_blocks_and_gets_the_cpu_s_numbers(weights: str) -> None:
    codes, x = quantize(matrix(40, 64), weights), matrix(2, 64)
    card = simulated(TURING)
    with card.scope():
        kernel = choose_kernel(weights, card.torch_device, 40, 64)
        linear = packed(kernel, codes, card.torch_device)
        out = linear(x.to(card.torch_device)).cpu()
        sizes = tuple(b.numel() * b.element_size() for b in linear.buffers())
    assert kernel.name == PORTABLE and card.card.errors == []
    assert torch.equal(out, Portable().multiply(x, Portable().pack(codes, CPU)))
    assert sizes == tensor_sizes(weights, PORTABLE, 40, 64)


@pytest.mark.parametrize("card", [simulated(AMPERE), simulated(TURING)], ids=["8.6", "7.5"])
def test_a_card_refuses_what_a_real_one_would(card: SimulatedDevice) -> None:
    aten = torch.ops.aten
    with card.scope():
        codes = torch.zeros(64, 32, dtype=torch.uint8, device=card.torch_device)
        if torch.cuda.get_device_capability() < (8, 0):
            with pytest.raises(RuntimeError, match=r"capability >= 8\.0"):
                aten._convert_weight_to_int4pack(codes, 2)
            return
        with pytest.raises(RuntimeError, match="multiple of 8"):
            aten._convert_weight_to_int4pack(codes[:60], 2)
        packed = aten._convert_weight_to_int4pack(codes, 2)
        scales = torch.ones(1, 64, 2, dtype=torch.bfloat16, device=card.torch_device)
        x = torch.ones(1, 64, device=card.torch_device)
        with pytest.raises(RuntimeError, match="takes bfloat16"):
            aten._weight_int4pack_mm(x, packed, 64, scales)
        with pytest.raises(RuntimeError, match="scales and zeros"):
            aten._weight_int4pack_mm(x.bfloat16(), packed, 32, scales)


def test_doctor_can_name_the_kernels() -> None:
    assert backends(CPU) == {
        "int8": "torch _weight_int8pack_mm",
        "int4": "torch _weight_int4pack_mm_for_cpu",
        "int4-g32": "torch _weight_int4pack_mm_for_cpu",
    }
    for name, kernel in ((AMPERE, TINYGEMM), (TURING, PORTABLE)):
        card = simulated(name)
        with card.scope():
            assert backends(card.torch_device) == dict.fromkeys(PACKED, kernel)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_matrices_that_lie_in_one_multiply_together_and_alone(weights: str | None) -> None:
    sizes = [64, 16, 16]
    whole, x = matrix(96, 64), matrix(2, 64)
    parts = [Linear(64, n) for n in sizes]
    if weights is None:
        modules = stacked(parts, whole)
        assert torch.equal(modules[1].weight, whole[64:80])
        assert sum(b.numel() for m in modules for b in m.buffers()) == whole.numel()
    else:
        codes = quantize(whole, weights)
        linear = packed(choose_kernel(weights, CPU, 96, 64), codes, CPU, sizes)
        modules = stacked(parts, linear)
        assert len({id(b) for m in modules for b in m.buffers()}) == len(list(linear.buffers()))
    at_once = together(x, *modules)
    assert [out.shape for out in at_once] == [(2, n) for n in sizes]
    for out, module in zip(at_once, modules, strict=True):
        torch.testing.assert_close(out, module(x))
