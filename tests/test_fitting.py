"""What a model is loaded with: the user's wishes against what the device has."""

from __future__ import annotations

from typing import Any

import pytest

from offload_llama.config import ModelConfig
from offload_llama.device import Device, open_device
from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.errors import ConfigError, DoesNotFit
from offload_llama.fitting import Fit, Wishes, batch_size, dtype_name, fit
from offload_llama.report.saved import FORMAT
from tests.helpers_plan import SMOLLM2_1_7B

GIB, MIB = 1 << 30, 1 << 20


def wishes(**changes: Any) -> Wishes:
    values: dict[str, Any] = {
        "weights": "auto", "kv_dtype": "auto", "dtype": "float16", "kv_policy": "auto",
        "ctx": None, "max_batch_size": 1, "prefill_chunk": 512, "ram_bytes": 32 * GIB,
    }  # fmt: skip
    return Wishes(**(values | changes))


def fitted(device: Device, config: ModelConfig = SMOLLM2_1_7B, **changes: Any) -> Fit:
    lines: list[str] = []
    return fit(config, device, wishes(**changes), lines.append)


def card(vram: str) -> SimulatedDevice:
    return simulated(f"rtx-3060-12gb?vram={vram}", values=False)


def test_every_layer_stays_on_a_card_that_holds_them() -> None:
    found = fitted(card("12GiB"), ctx=8192)
    assert {p.store for p in found.placements} == {"resident"}
    assert found.plan is not None and found.plan.kv_budget_bytes is None


def test_layers_that_must_leave_later_start_on_the_card() -> None:
    found = fitted(card("5GiB"), ctx=8192)
    assert found.plan is not None and 0 < found.plan.n_host < 24
    assert {p.store for p in found.placements} == {"resident"}
    assert sum("until its place is needed" in p.reason for p in found.placements) == (
        found.plan.n_host
    )
    assert found.plan.kv_budget_bytes is not None


def test_a_context_that_was_not_asked_for_shrinks_to_what_fits_and_says_so() -> None:
    lines: list[str] = []
    found = fit(SMOLLM2_1_7B, card("12GiB"), wishes(ram_bytes=2 * GIB), lines.append)
    assert 256 <= found.max_seq_len < SMOLLM2_1_7B.max_seq_len
    assert f"context {found.max_seq_len:,} tokens: the model's 65,536 do not fit" in lines[0]
    assert found.plan is not None and found.plan.host_fits


def test_a_context_that_was_asked_for_is_refused_with_the_longest_that_fits() -> None:
    """B52: a KV cache beyond the host's memory; 900 MiB against 1 GiB, and 1 GiB against 900."""
    with pytest.raises(DoesNotFit, match=r"host memory are needed.*--ctx \d+") as caught:
        fitted(card("4.3GiB"), ctx=32768, ram_bytes=1 * GIB)
    assert caught.value.needed_bytes > caught.value.available_bytes == 1 * GIB
    longest = int(caught.value.suggestions[0].removeprefix("--ctx "))
    assert fitted(card("4.3GiB"), ctx=longest, ram_bytes=1 * GIB).max_seq_len == longest
    offloaded = {"kv_policy": "offload", "ctx": 4096}
    needed = 1.05 * 4096 * 196608 + 64 * MIB
    assert fitted(card("12GiB"), ram_bytes=round(needed) + 1, **offloaded).plan is not None
    with pytest.raises(DoesNotFit):
        fitted(card("12GiB"), ram_bytes=round(needed) - 100, **offloaded)


def test_a_policy_that_does_not_fit_is_refused_before_weights_are_read() -> None:
    """B19: and what does fit is named first."""
    device = card("5GiB")
    with pytest.raises(DoesNotFit, match="use --kv-policy auto or --ctx"):
        fitted(device, kv_policy="gpu", ctx=8192)
    assert device.memory().peak_bytes == 0


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    with pytest.raises(DoesNotFit, match="--max-batch-size") as caught:
        fitted(card("5GiB"), ctx=8192, max_batch_size=500)
    [smaller] = [s for s in caught.value.suggestions if s.startswith("--max-batch-size")]
    assert fitted(card("5GiB"), ctx=8192, max_batch_size=int(smaller.split()[1]))


def test_weights_beyond_the_card_are_named() -> None:
    with pytest.raises(DoesNotFit, match=r"weights alone are 3\.19 GiB.*smaller model"):
        fitted(card("2GiB"), ctx=512)


def test_a_reserve_that_is_in_the_way_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"--reserve \d+MiB") as caught:
        fitted(card("4000MiB"), ctx=512, reserve_bytes=300 * MIB)
    [smaller] = [s for s in caught.value.suggestions if s.startswith("--reserve")]
    left = int(smaller.split()[1].removesuffix("MiB")) * MIB
    assert fitted(card("4000MiB"), ctx=512, reserve_bytes=left).plan is not None


def test_what_other_programs_hold_is_not_planned_with() -> None:
    """B65: free memory counts, not the card's size."""
    device = card("5GiB")
    before = fitted(device, ctx=8192).plan
    device.card.take_memory(512 * MIB)
    after = fitted(device, ctx=8192).plan
    assert before is not None and after is not None
    assert after.available_bytes == before.available_bytes - 512 * MIB
    assert after.n_host > before.n_host


def test_more_than_is_free_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"--vram 13 GiB: .* has 12 GiB free of 12 GiB"):
        fitted(card("12GiB"), ctx=512, vram_bytes=13 * GIB)
    found = fitted(card("12GiB"), ctx=8192, vram_bytes=5 * GIB).plan
    assert found is not None and found.n_host > 0


def test_as_many_sequences_as_fit_are_planned_for() -> None:
    lines: list[str] = []
    found = fit(SMOLLM2_1_7B, card("6GiB"), wishes(max_batch_size=None), lines.append)
    assert found.max_batch_size > 1 and found.max_seq_len == 1024
    assert f"batch of {found.max_batch_size} sequences of 1,024 tokens" in lines[0]
    asked = fitted(card("6GiB"), max_batch_size=None, ctx=4096)
    assert asked.max_seq_len == 4096 and asked.max_batch_size < found.max_batch_size


def test_a_saved_plan_is_replayed_layer_by_layer_or_refused() -> None:
    stores = ["host" if layer % 3 == 0 else "resident" for layer in range(24)]
    saved = {
        "format": FORMAT,
        "placements": [{"layer": i, "store": store} for i, store in enumerate(stores)],
    }
    found = fitted(card("12GiB"), ctx=2048, saved=saved)
    assert [p.store for p in found.placements] == stores
    assert found.plan is not None and found.plan.kv_budget_bytes is None
    with pytest.raises(DoesNotFit, match="--plan"):
        fitted(card("3GiB"), ctx=2048, saved=saved)
    saved["placements"] = saved["placements"][:23]
    with pytest.raises(ConfigError, match="places 23 layers, this model has 24"):
        fitted(card("12GiB"), ctx=2048, saved=saved)


def test_on_the_cpu_the_cache_must_fit_beside_the_system() -> None:
    device = open_device("cpu")
    found = fitted(device, ctx=4096, dtype="float32")
    assert found.plan is None and found.max_seq_len == 4096
    with pytest.raises(DoesNotFit, match=r"needs 1\.50 GiB of host memory.*--ctx 2560 or less"):
        fitted(device, ctx=4096, dtype="float32", ram_bytes=1 * GIB)
    assert fitted(device, dtype="float32", ram_bytes=1 * GIB).max_seq_len == 2560


def test_names_and_numbers_are_checked() -> None:
    assert batch_size("auto") is None and batch_size(3) == 3
    for wrong in ("many", 0):
        with pytest.raises(ConfigError, match="--max-batch-size must be"):
            batch_size(wrong)
    assert dtype_name("auto", open_device("cpu")) == "float32"
    assert dtype_name("auto", simulated("rtx-2060")) == "float16"
    assert dtype_name("auto", simulated("rtx-3060-12gb")) == "bfloat16"
