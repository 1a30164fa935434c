"""What a run holds of the card: each layer as it was asked, and nothing once it is over."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_llama import LLM, SamplingParams
from offload_llama.policy import place
from tests.helpers_generate import write_tiny_llama3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama3(tmp_path_factory.mktemp("tiny"), max_seq_len=320)


@pytest.fixture
def settings() -> Iterator[dict[str, Any]]:
    yield {
        "device": "sim:rtx-3060-12gb",
        "dtype": "float32",
        "part_tokens": 64,
        "flush_tokens": 16,
        "ring_slots": 2,
    }


@pytest.mark.parametrize("policy", ["gpu", "gpu-layers:2", "offload"])
def test_memory_does_not_creep_up_call_by_call_nor_load_by_load(
    folder: Path, settings: dict[str, Any], policy: str
) -> None:
    """B44: 30 generations of 10 to 300 tokens in random order, then five loads alike."""
    lengths = [10 + 10 * i for i in range(30)]
    random.Random(3).shuffle(lengths)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    after: list[int] = []
    with LLM.load(folder, kv_policy=policy, **settings) as llm:
        device = llm.device
        for length in lengths:
            llm.generate([65] * length, params)
            after.append(device.memory().allocated_bytes)
    assert len(set(after[1:])) == 1
    del llm
    assert device.memory().allocated_bytes == 0
    peaks = set()
    for _ in range(5):
        with LLM.load(folder, kv_policy=policy, **settings) as llm:
            llm.generate([65] * 40, params)
            peaks.add(llm.device.memory().peak_bytes)
    assert len(peaks) == 1


@pytest.mark.parametrize(
    "policy", ["gpu", "offload", "gpu-layers:1", "gpu-layers:3", "layers:0-1=offload,2-3=gpu"]
)
def test_after_ten_tokens_each_layer_is_where_it_was_asked_to_be(
    folder: Path, settings: dict[str, Any], policy: str
) -> None:
    """B58: residency per layer, and the bytes that keys and values hold on the card."""
    expected = place(policy, 4)
    with LLM.load(folder, kv_policy=policy, **settings) as llm:
        stream = llm.stream([65] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(10):
            next(stream)
        cache, row = llm.cache, 2 * 2 * 16 * 4
        for placement, store in zip(expected, cache.stores, strict=True):
            on_host = placement.store == "host"
            assert store.is_host == on_host
            assert store.device_bytes == (16 if on_host else 64) * row
            assert store.host_bytes == (40 * row if on_host else 0)
        assert [p.store for p in cache.placements] == [p.store for p in expected]
        stream.close()
