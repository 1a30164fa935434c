"""The default model against two independent engines: ids exactly, logits within 2e-4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload_llama import LLM, SamplingParams
from tests.conftest import DATA
from tests.helpers_model import make_cache, prefill, run_step

POLICIES = ["gpu", "offload", "gpu-layers:15", "layers:0-14=gpu,15-29=offload"]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)


@pytest.fixture(scope="module")
def on_cpu(smollm2_path: Path) -> Iterator[LLM]:
    with LLM.load(str(smollm2_path), device="cpu", dtype="float32", max_batch_size=5) as llm:
        yield llm


def test_all_prompts_give_the_reference_s_ids_on_the_cpu(on_cpu: LLM, reference: dict[str, Any]):
    for prompt in reference["prompts"]:
        if prompt["kind"] == "chat":
            ids = on_cpu.encode_chat([{"role": "user", "content": prompt["prompt"]}])
        else:
            ids = on_cpu.encode(prompt["prompt"])
        assert ids == prompt["prompt_ids"]
        [done] = on_cpu.generate([ids], greedy(64))
        assert list(done.token_ids) == prompt["hf_ids"]


def test_a_batch_of_all_prompts_gives_each_its_own_ids(on_cpu: LLM, reference: dict[str, Any]):
    """B04 on the real model: five unequal prompts decoded together."""
    prompts = [prompt["prompt_ids"] for prompt in reference["prompts"]]
    for done, prompt in zip(
        on_cpu.generate(prompts, greedy(24)), reference["prompts"], strict=True
    ):
        assert list(done.token_ids) == prompt["hf_ids"][:24]


def test_logits_equal_the_reference_s_within_2e_4(on_cpu: LLM):
    expected = np.load(DATA / "reference_logits.npz")
    ids = expected["ids"].tolist()
    cache = make_cache(on_cpu.model, on_cpu.device, max_batch_size=1, part_tokens=64)
    logits = run_step(on_cpu.model, cache, {0: ids}, "all")
    top = logits.gather(1, torch.from_numpy(expected["top5_ids"]).long())
    assert (top - torch.from_numpy(expected["top5_logits"])).abs().max() < 2e-4
    lse = logits.logsumexp(-1)
    assert (lse - torch.from_numpy(expected["logsumexp"])).abs().max() < 2e-4
    last = torch.from_numpy(expected["last_logits"])
    assert (logits[-1] - last).abs().max() < 2e-4
    cache.free(0)
    assert (prefill(on_cpu.model, cache, 0, ids, 48) - last).abs().max() < 2e-4


def test_truncating_the_real_model_s_cache_and_going_on_equals_a_fresh_run(on_cpu: LLM):
    ids = np.load(DATA / "reference_logits.npz")["ids"].tolist()
    cache = make_cache(on_cpu.model, on_cpu.device, "offload", part_tokens=64)
    prefill(on_cpu.model, cache, 0, ids)
    cache.truncate(0, 77)
    again = prefill(on_cpu.model, cache, 0, ids[100:140])
    fresh = prefill(on_cpu.model, cache, 1, ids[:77] + ids[100:140])
    assert (again - fresh).abs().max() < 2e-4 and int(again.argmax()) == int(fresh.argmax())


def simulated_ids(model: Path, policy: str, prompt: dict[str, Any], n: int) -> list[int]:
    with LLM.load(str(model), device="sim:rtx-3060-12gb", dtype="float32", kv_policy=policy) as llm:
        [done] = llm.generate([prompt["prompt_ids"]], greedy(n))
        assert llm.device.card.errors == []
        host_layers = sum(p.store == "host" for p in llm.placements)
        assert (done.stats.h2d_bytes > 0) == (host_layers > 0)
        assert done.stats.simulated
    return list(done.token_ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulated_card_gives_the_same_ids_under_every_policy(
    smollm2_path: Path, reference: dict[str, Any], policy: str
):
    prompt = reference["prompts"][0]
    assert simulated_ids(smollm2_path, policy, prompt, 16) == prompt["hf_ids"][:16]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_all_prompts_give_all_ids_on_the_simulated_card(
    smollm2_path: Path, reference: dict[str, Any], policy: str
):
    for prompt in reference["prompts"]:
        assert simulated_ids(smollm2_path, policy, prompt, 64) == prompt["hf_ids"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_equals_resident_bit_for_bit_on_the_real_model(smollm2_path: Path, dtype: str):
    """Two chunks of prefill and four steps, parts of 64 tokens."""
    ids = np.load(DATA / "reference_logits.npz")["ids"].tolist()[:150]
    with LLM.load(str(smollm2_path), device="sim:rtx-3060-12gb", dtype=dtype) as llm:
        results = []
        for policy in ("gpu", "offload"):
            with llm.device.scope():
                cache = make_cache(llm.model, llm.device, policy, part_tokens=64)
                out = [prefill(llm.model, cache, 0, ids, 100)]
                out += [run_step(llm.model, cache, {0: [i]})[0] for i in ids[:4]]
                results.append(torch.stack(out))
                cache.close()
        assert torch.equal(*results) and llm.device.card.errors == []
