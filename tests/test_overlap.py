"""Copies hide behind compute, and compute behind copies, on the simulated card's clock."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from offload_llama.cache import KVCache
from offload_llama.config import ModelConfig
from offload_llama.device.sim import simulated
from offload_llama.model import Transformer
from offload_llama.policy import place
from tests.helpers_plan import LLAMA_8B, SMOLLM2_1_7B


@dataclass(frozen=True)
class Steps:
    """Seconds a decode step takes; of it those of kernels, and of the KV bytes at the link's rate.

    The last is what the rows on the host need at the least: no latency, nothing loaded twice.
    """

    total_s: float
    compute_s: float
    link_s: float


@functools.cache
def decode_steps(config: ModelConfig, policy: str, n_tokens: int) -> Steps:
    """Measure steps of a running decode: from one sampled token to another, nothing drained."""
    device = simulated("rtx-3060-12gb?vram=64GiB", values=False)
    n_steps = 5
    with device.scope():
        model = Transformer(config)
        for name, shape in model.expected_tensors().items():
            weight = torch.empty(shape, dtype=torch.float16, device=device.torch_device)
            model.set_tensor(name, weight)
        model.tie_output()
        cache = KVCache(
            config, device, place(policy, config.n_layers), dtype=torch.float16,
            max_batch_size=1, max_seq_len=n_tokens + 64,
        )  # fmt: skip
        with cache.step([0], [0], [n_tokens], "none") as step:
            model(step.upload([0] * n_tokens), step)
        for i in range(n_steps + 3):
            if i == 3:
                start_s, rows_bytes = device.clock(), cache.stats().host_kv_bytes
            with cache.step([0], [cache.lengths[0]], [1]) as step:
                logits = model(step.upload([0]), step)
            logits.argmax(-1).tolist()
        stop_s = device.clock()
        compute_s = sum(
            max(0.0, min(record.end_s, stop_s) - max(record.start_s, start_s))
            for record in device.card.timeline
            if record.engine == "compute"
        )
        cache.close()
    link_s = rows_bytes / device.card.profile.h2d_bytes_per_s
    return Steps((stop_s - start_s) / n_steps, compute_s / n_steps, link_s)


def over_the_larger(config: ModelConfig, policy: str, n_tokens: int) -> tuple[float, float]:
    """Return the copy-to-compute ratio, and a step's time over the larger of the two.

    Compute is the whole step of the same model with every layer resident: what the streamed one
    computes beyond that counts against it.
    """
    compute_s = decode_steps(config, "gpu", n_tokens).total_s
    steps = decode_steps(config, policy, n_tokens)
    return steps.link_s / compute_s, steps.total_s / max(compute_s, steps.link_s)


@pytest.mark.parametrize(
    ("config", "policy", "n_tokens", "ratio"),
    [
        (LLAMA_8B, "gpu-layers:16", 2048, (0.1, 0.2)),  # a part is larger than a layer
        (SMOLLM2_1_7B, "gpu-layers:18", 4096, (0.5, 0.6)),  # a layer is two parts
        (LLAMA_8B, "gpu-layers:16", 16384, (0.8, 0.9)),  # four parts
        (SMOLLM2_1_7B, "gpu-layers:18", 16384, (1.3, 1.5)),  # eight parts
        (SMOLLM2_1_7B, "gpu-layers:12", 16384, (2.0, 4.0)),
    ],
)
def test_a_decode_step_takes_the_larger_of_compute_and_copies(config, policy, n_tokens, ratio):
    """Within 5 %, below and above a copy-to-compute ratio of one."""
    measured_ratio, over = over_the_larger(config, policy, n_tokens)
    assert ratio[0] < measured_ratio < ratio[1]
    assert 0.999 <= over <= 1.05


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the link rests during the output head, and the spill order leaves uneven gaps",
)
@pytest.mark.parametrize(
    ("config", "policy", "n_tokens"),
    [
        (SMOLLM2_1_7B, "gpu-layers:20", 16384),
        (LLAMA_8B, "gpu-layers:13", 16384),
        (SMOLLM2_1_7B, "gpu-layers:13", 4096),
        (SMOLLM2_1_7B, "gpu-layers:19", 16384),
    ],
)
def test_a_step_also_takes_the_larger_where_the_two_are_nearly_equal(config, policy, n_tokens):
    """Copies of 0.9 to 1.15 times the compute: 8 to 12 % over, see the log."""
    _, over = over_the_larger(config, policy, n_tokens)
    assert over <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "policy", "n_tokens"),
    [(SMOLLM2_1_7B, "gpu-layers:19", 16384), (LLAMA_8B, "gpu-layers:13", 16384)],
)
def test_where_the_two_are_nearly_equal_a_step_is_never_more_than_an_eighth_over(
    config, policy, n_tokens
):
    _, over = over_the_larger(config, policy, n_tokens)
    assert over <= 1.125


def test_layers_in_one_lump_are_slower_than_spread_ones():
    """What the spill order is for: twelve of 24 layers, spread and as the upper half."""
    spread = decode_steps(SMOLLM2_1_7B, "gpu-layers:12", 4096)
    lump = decode_steps(SMOLLM2_1_7B, "layers:0-11=gpu,12-23=offload", 4096)
    assert lump.total_s > 1.1 * spread.total_s


def script(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_beside_transformers_we_stream_the_same_rows_and_send_back_only_new_ones():
    """A short context, so that it is quick; the figures for 4,096 and 16,384 are in the log."""
    result = script("compare_transformers_sim").compare("rtx-3060-12gb", 1024, 32)
    mine, peer = result["ours"], result["transformers"]
    assert result["times_faster"] > 1.2
    # 32 steps fill one tail of every layer, and four bytes or eight go down for each sampled id.
    assert mine["d2h_bytes_per_token"] == mine["new_kv_bytes"] + 8
    assert peer["d2h_bytes_per_token"] > 1000 * mine["new_kv_bytes"]
    assert mine["h2d_bytes_per_token"] < 1.05 * 1056 * mine["new_kv_bytes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("n_tokens", "at_least"), [(4096, 1.4), (16384, 1.15)])
def test_beside_transformers_we_are_faster_by_what_we_say(n_tokens, at_least):
    result = script("compare_transformers_sim").compare("rtx-3060-12gb", n_tokens, 8)
    assert result["times_faster"] >= at_least
