"""`LLM`: seeds, streams, steps, turns, Ctrl-C, closing; the simulated card; the real model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama import LLM, PromptTooLong, RequestError, SamplingParams
from offload_llama.generate import Completion
from offload_llama.steps import Interrupted
from tests.helpers_generate import (
    write_tiny_llama3,
)

CTX = 256
LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama3(tmp_path_factory.mktemp("tiny"), max_seq_len=CTX)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="cpu", max_batch_size=4, prefill_chunk=32) as model:
        yield model


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


def drawn(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True, **settings)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_a_seed_gives_the_same_ids_alone_in_a_batch_and_streamed(llm: LLM) -> None:
    """B40: three runs, beside another row, after an unrelated call, streaming."""
    params = drawn(seed=7)
    runs = [llm.generate("abc", params)[0] for _ in range(3)]
    llm.generate(LONG, drawn())
    runs.append(llm.generate(["something else", "abc"], [drawn(), params])[1])
    stream = llm.stream("abc", params)
    streamed = [token.token_id for token in stream]
    assert all(run.token_ids == runs[0].token_ids and run.seed == 7 for run in runs)
    assert tuple(streamed) == runs[0].token_ids


def test_unseeded_runs_differ_and_report_the_seed_that_repeats_them(llm: LLM) -> None:
    """B40: unseeded runs."""
    first, second = (llm.generate("abc", drawn())[0] for _ in range(2))
    assert first.token_ids != second.token_ids
    assert llm.generate("abc", drawn(seed=first.seed))[0].token_ids == first.token_ids


def test_a_stream_gives_the_tokens_and_text_of_the_whole_answer(llm: LLM) -> None:
    [whole] = llm.generate(LONG, drawn(seed=3, stop=("\u00e9",)))
    tokens = list(llm.stream(LONG, drawn(seed=3, stop=("\u00e9",))))
    assert "".join(token.text for token in tokens) == whole.text
    assert tuple(token.token_id for token in tokens) == whole.token_ids
    assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
    last = tokens[-1].completion
    assert last is not None and last.token_ids == whole.token_ids


def test_a_closed_stream_keeps_what_there_is(llm: LLM) -> None:
    [whole] = llm.generate("abc", greedy())
    stream = llm.stream("abc", greedy())
    assert stream.completion is None
    next(stream), next(stream)
    stream.close()
    assert stream.completion is not None
    assert stream.completion.finish_reason == "interrupted"
    assert stream.completion.token_ids == whole.token_ids[:2]
    assert list(stream) == []
    assert llm.cache.lengths == [0] * 4


def test_an_iterator_that_is_dropped_frees_the_model(llm: LLM) -> None:
    """B56: an abandoned iterator."""
    stream = llm.stream("abc", greedy())
    next(stream)
    assert llm.cache.lengths[0] > 0
    del stream
    assert llm.cache.lengths == [0] * 4
    assert len(llm.generate("abc", greedy())) == 1


def test_a_second_run_in_the_thread_of_an_open_stream_is_refused_as_busy(llm: LLM) -> None:
    """B56: two streaming iterators interleaved in one thread; no deadlock."""
    [expected] = llm.generate("abc", greedy())
    stream, other = llm.stream("abc", greedy()), llm.stream("xyz", greedy())
    first = next(stream)
    with pytest.raises(RequestError, match="busy"):
        next(other)
    with pytest.raises(RequestError, match="busy"):
        llm.generate("xyz", greedy())
    rest = [token.token_id for token in stream]
    assert (first.token_id, *rest) == expected.token_ids
    assert len(llm.generate("xyz", greedy())) == 1


def test_threads_take_turns_and_each_gets_its_own_answer(llm: LLM) -> None:
    """B56: eight threads, one of which gives up half-way and one of which fails."""
    prompts = [f"thread {number}" for number in range(6)]
    expected = {p: llm.generate(p, greedy(12))[0].token_ids for p in prompts}
    found: dict[str, tuple[int, ...]] = {}
    refused: list[Exception] = []

    def answer(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, greedy(12))[0].token_ids

    def give_up() -> None:
        stream = llm.stream("never read to the end", greedy(12))
        next(stream)
        stream.close()

    def fail() -> None:
        try:
            llm.generate("x" * 500)
        except PromptTooLong as error:
            refused.append(error)

    threads = [threading.Thread(target=answer, args=(p,)) for p in prompts]
    threads[2:2] = [threading.Thread(target=give_up), threading.Thread(target=fail)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert found == expected and len(refused) == 1


def test_ctrl_c_in_a_batch_gives_the_completions_there_are(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["abc", "de", "f", "g", "h"]
    whole = llm.generate(prompts, greedy(6))
    calls = 0
    real = llm.model.norm.forward

    def interrupting(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:  # four prompts, two steps, and in the third
            raise KeyboardInterrupt
        return real(x)

    monkeypatch.setattr(llm.model.norm, "forward", interrupting)
    with pytest.raises(Interrupted) as caught:
        llm.generate(prompts, [greedy(6), greedy(2), greedy(6), greedy(6), greedy(6)])
    done = caught.value.completions
    assert isinstance(caught.value, KeyboardInterrupt)
    assert [c.finish_reason for c in done] == [
        "interrupted",
        "length",
        "interrupted",
        "interrupted",
    ]
    assert [len(c.token_ids) for c in done] == [3, 2, 3, 3]
    for part, full in zip(done, whole, strict=False):
        assert part.token_ids == full.token_ids[: len(part.token_ids)]
    assert llm.cache.lengths == [0] * 4


def test_an_error_in_the_progress_callback_frees_the_model(llm: LLM) -> None:
    def broken(_index: int, _completion: Completion) -> None:
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        llm.generate(["a", "b"], [greedy(1), greedy(5)], on_done=broken)
    assert llm.cache.lengths == [0] * 4
    assert len(llm.generate("a", greedy())) == 1


def test_steps_yield_each_sequence_that_moved(llm: LLM) -> None:
    steps = llm.steps(["a", "b"], [greedy(3), greedy(2)])
    assert [[token.index for token in tokens] for tokens in steps] == [[0], [1], [0, 1], [0]]
    assert ids(steps.completions) == ids(llm.generate(["a", "b"], [greedy(3), greedy(2)]))


def test_a_closed_model_says_so(folder: Path) -> None:
    with LLM.load(folder, device="cpu") as model:
        stream = model.stream("abc", greedy())
        next(stream)
    assert list(stream) == []
    assert stream.completion is not None and stream.completion.finish_reason == "interrupted"
    for call in (lambda: model.generate("abc"), lambda: model.cache, lambda: model.model):
        with pytest.raises(RequestError, match="closed"):
            call()
    model.close()


def test_no_gradients_are_recorded_and_the_callers_mode_stays(llm: LLM) -> None:
    with torch.enable_grad():
        stream = llm.stream("abc", greedy())
        next(stream)
        assert torch.is_grad_enabled()
        stream.close()


@pytest.mark.parametrize("kv_policy", ["gpu", "offload", "layers:0=gpu,1-3=offload"])
def test_a_simulated_card_gives_the_cpus_ids_under_every_policy(
    folder: Path, llm: LLM, kv_policy: str
) -> None:
    """B40, B04: greedy and seeded rows of unequal length, offload on and off, streaming."""
    prompts, settings = [LONG[:60], "hi"], [greedy(12), drawn(seed=7)]
    expected = ids(llm.generate(prompts, settings))
    with LLM.load(
        folder,
        device="sim:rtx-3060-12gb",
        dtype="float32",
        kv_policy=kv_policy,
        max_batch_size=2,
        prefill_chunk=32,
        part_tokens=16,
        flush_tokens=16,
    ) as model:
        before = torch.cuda.is_available()
        found = model.generate(prompts, settings)
        assert ids(found) == expected
        stream = model.stream(prompts[1], settings[1])
        assert next(stream).token_id == expected[1][0]
        # The scope of the simulated card is not held while the caller has its turn.
        assert torch.cuda.is_available() == before
        del stream
        assert model.cache.lengths == [0, 0]
        n_offloaded = sum(p.store == "host" for p in model.placements)
    stats = found[0].stats
    assert stats.simulated and stats.decode_s > 0 and stats.peak_device_bytes > 0
    assert (stats.host_kv_bytes > 0) == (stats.h2d_bytes_per_step > 0) == (n_offloaded > 0)
    if n_offloaded:
        # Keys and values of one token in one layer: 2 heads of 16 float32.
        token_bytes = 2 * 2 * 16 * 4
        assert stats.host_kv_bytes % (n_offloaded * token_bytes) == 0
        # Every row is copied down at most once.
        rows = sum(len(p) for p in prompts) + 2 + 2 * 16
        assert stats.d2h_bytes <= n_offloaded * token_bytes * rows


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    with LLM.load(device="cpu", max_batch_size=3) as model:
        yield model


def test_batched_alone_and_streamed_the_real_model_gives_the_reference_ids(
    real: LLM, reference: dict[str, Any]
) -> None:
    """B04, B28: prompts of 5, 34 and 18 tokens; a second call is like the first."""
    chosen = [reference["prompts"][i] for i in (0, 2, 4)]
    prompts = [p["full_prompt"] for p in chosen]
    expected = [tuple(p["hf_ids"][:16]) for p in chosen]
    batch = real.generate(prompts, greedy(16))
    assert [list(c.prompt_token_ids) for c in batch] == [p["prompt_ids"] for p in chosen]
    assert ids(batch) == expected
    tokens = list(real.stream(prompts[0], greedy(16)))
    assert tuple(token.token_id for token in tokens) == expected[0]
    assert "".join(token.text for token in tokens) == batch[0].text
    assert chosen[0]["hf_text"].startswith(batch[0].text)


def test_the_real_model_ends_at_the_end_of_its_turn(real: LLM, reference: dict[str, Any]) -> None:
    """B05: the reference goes on through <|im_end|> (id 2), its 30th token."""
    ends_at = reference["prompts"][0]["hf_ids"].index(2)
    [completion] = real.generate(reference["prompts"][0]["prompt"], SamplingParams(max_tokens=64))
    assert completion.finish_reason == "eos"
    assert list(completion.token_ids) == reference["prompts"][0]["hf_ids"][:ends_at]
    assert "<|" not in completion.text
