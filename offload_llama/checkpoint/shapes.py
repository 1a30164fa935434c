"""Weights without values, for a card that keeps only shapes."""

from __future__ import annotations

import torch

from offload_llama.checkpoint.packed import EMBEDDING, OUTPUT, saved_weights
from offload_llama.checkpoint.targets import Model
from offload_llama.cost.packing import OUTPUT_WEIGHTS
from offload_llama.device.api import Device
from offload_llama.weights import (
    Codes,
    QuantEmbedding,
    QuantLinear,
    choose_kernel,
    empty_like_packed,
)


def empty_weights(
    model: Model, *, device: Device, dtype: torch.dtype, weights: str | None = None
) -> None:
    """Put uninitialised weights in place, of the sizes that `load_weights` would give them.

    Call it inside the device's scope.

    Args:
        weights: int8, int4 or int4-g32 for packed matrices; None to have them in the dtype.
    """
    place = device.torch_device
    expected = model.expected_tensors()
    for name, shape in expected.items():
        if weights is None or len(shape) == 1:
            model.set_tensor(name, torch.empty(shape, dtype=dtype, device=place))
        elif name == EMBEDDING:
            rows = Codes.empty(OUTPUT_WEIGHTS, shape[0], shape[1], place)
            if OUTPUT not in expected:
                output = _packed(OUTPUT_WEIGHTS, place, shape)
                model.set_matrices((OUTPUT,), output)
                kept = dict(output.named_buffers())
                if "codes" in kept:
                    rows = Codes(kept["codes"], kept["scales"], None)
            model.set_matrices((name,), QuantEmbedding(rows.codes, rows.scales, dtype))
        else:
            model.set_matrices((name,), _packed(saved_weights(name, weights), place, shape))
    model.tie_output()


def _packed(weights: str, device: torch.device, shape: tuple[int, ...]) -> QuantLinear:
    rows, columns = shape
    kernel = choose_kernel(weights, device, rows, columns)
    return QuantLinear(kernel, empty_like_packed(weights, device, rows, columns), (rows, columns))
