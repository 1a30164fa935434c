"""What a run costs and reports: times, bytes, log-probabilities, the JSON object."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_llama.cache import KVCache
from offload_llama.config import ModelConfig, SamplingParams
from offload_llama.device import open_device
from offload_llama.generate import Engine, Request, Run
from offload_llama.model import Transformer
from offload_llama.policy import place
from tests.helpers_generate import (
    ByteTokenizer,
    engine,
    hashed_logits,
    request,
    run,
)

LONG = "a prompt of many bytes, longer than a chunk"


def test_stats_count_tokens_steps_and_the_bytes_of_decode_steps_alone() -> None:
    parts = engine(prefill_chunk=4)
    [done] = run(parts, [request("x" * 9, max_tokens=5)])
    stats = done.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (10, 5)
    # The fake cache copies 10 bytes down per new token, and up 3 per cached one.
    assert stats.d2h_bytes == 10 * (10 + 4)
    assert stats.d2h_bytes_per_step == 10
    assert stats.h2d_bytes == 3 * (0 + 4 + 8) + 3 * (10 + 11 + 12 + 13)
    assert stats.h2d_bytes_per_step == round(3 * (10 + 11 + 12 + 13) / 4)
    assert (stats.host_kv_bytes, stats.device_kv_bytes, stats.pinned_bytes) == (14, 28, 4096)
    assert stats.peak_device_bytes > 0 and not stats.simulated


def test_a_run_of_one_token_has_no_decode_time_and_no_bytes_per_step() -> None:
    """B67: decode of one token gives no division by zero."""
    [done] = run(engine(), [request("abc", max_tokens=1)])
    assert done.stats.decode_s == 0
    assert done.stats.h2d_bytes_per_step == done.stats.d2h_bytes_per_step == 0
    assert 0 < done.stats.prefill_s <= done.stats.ttft_s


class TickingDevice:
    """A device whose clock moves a second each time a step ends or somebody waits for it."""

    simulated = True

    def __init__(self) -> None:
        self.now_s = 100.0

    def scope(self) -> Any:
        return torch.no_grad()

    def synchronize(self) -> None:
        self.now_s += 1

    def clock(self) -> float:
        return self.now_s

    def reset_peak(self) -> None: ...

    def memory(self) -> Any:
        return SimpleNamespace(peak_bytes=7)


def test_times_are_the_models_own_without_what_the_caller_does_between_steps() -> None:
    device = TickingDevice()
    parts = replace(engine(), device=device)
    step = parts.model.logits_of

    def slow(history: tuple[int, ...]) -> torch.Tensor:
        device.now_s += 10
        return step(history)

    parts.model.logits_of = slow
    batch = Run(parts, [request("a", max_tokens=3), request("b", max_tokens=2)])
    while not batch.done:
        batch.step()
        device.now_s += 1000  # the caller prints
    first, second = batch.completions[0].stats, batch.completions[1].stats
    # 1 at the start; a prefill is 10 + 1; decode steps are 20 and 10, each end waits 1.
    assert (first.prefill_s, second.prefill_s) == (11, 11)
    assert (first.ttft_s, second.ttft_s) == (12, 23)
    assert (second.decode_s, first.decode_s) == (21, 32)
    assert first.simulated and first.peak_device_bytes == 7


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_logprobs_of_prompt_and_answer_are_those_of_the_models_logits(chunk: int) -> None:
    asked = request(
        "abcdef", max_tokens=4, temperature=1.2, seed=3, logprobs=True, prompt_logprobs=True
    )
    [done] = run(engine(prefill_chunk=chunk), [asked])
    ids = (*done.prompt_token_ids, *done.token_ids)
    expected = [
        float(torch.log_softmax(hashed_logits(ids[:n]), 0)[ids[n]]) for n in range(1, len(ids))
    ]
    assert done.prompt_logprobs is not None and done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids) == 4
    assert [*done.prompt_logprobs, *done.logprobs] == pytest.approx(expected, abs=1e-5)
    plain = request("abcdef", max_tokens=4, temperature=1.2, seed=3)
    assert run(engine(), [plain])[0].token_ids == done.token_ids


def test_the_json_object_has_the_documented_keys() -> None:
    [done] = run(engine(), [request("a", max_tokens=2)])
    answer = done.as_dict()
    assert list(answer) == [
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "seed",
        "stats",
        "placements",
    ]
    assert {
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "prefill_s",
        "decode_s",
        "peak_device_bytes",
        "host_kv_bytes",
        "device_kv_bytes",
        "h2d_bytes",
        "d2h_bytes",
        "h2d_bytes_per_step",
        "d2h_bytes_per_step",
        "simulated",
    } <= set(answer["stats"])
    assert answer["token_ids"] == list(done.token_ids)


def test_the_peak_of_prefill_does_not_grow_by_prompt_times_vocabulary() -> None:
    """B13: 128,256 output rows; 4,096 positions of them would be 2 GiB in float32."""
    config = ModelConfig(
        dim=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        hidden_dim=32,
        vocab_size=128256,
        max_seq_len=8192,
        tied_output=True,
    )
    device = open_device("sim:rtx-3060-12gb")
    with device.scope():
        model = Transformer(config)
        for name, shape in model.expected_tensors().items():
            model.set_tensor(name, torch.randn(shape).to(device.torch_device))
        model.tie_output()
        cache = KVCache(
            config,
            device,
            place("gpu", 1),
            dtype=torch.float32,
            max_batch_size=1,
            max_seq_len=8192,
        )
    peaks = {}
    for prompt_tokens, chunk in ((1024, 512), (4096, 512), (4096, 4096)):
        parts = Engine(
            model=model,
            cache=cache,
            device=device,
            tokenizer=ByteTokenizer(),
            prefill_chunk=chunk,
        )
        asked = Request(
            prompt_ids=tuple(range(3, 3 + prompt_tokens)), params=SamplingParams(max_tokens=2)
        )
        peaks[prompt_tokens, chunk] = run(parts, [asked])[0].stats.peak_device_bytes
    parts.close_cache()
    device.close()
    logits_bytes = 128256 * 4
    kv_bytes = 2 * 16 * 4 * (4096 - 1024)
    # Parts grow by doubling, and old and new are there while a part moves.
    assert peaks[4096, 512] - peaks[1024, 512] < 4 * kv_bytes < 8 * logits_bytes
    assert peaks[4096, 4096] - peaks[4096, 512] < 64 * logits_bytes
