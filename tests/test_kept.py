"""Sequences that stay in the cache between two runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload_llama.generate import Completion, Engine, Request, Run
from tests.helpers_generate import engine, request, run, scripted


def kept(prompt: str, **settings: object) -> Request:
    return replace(request(prompt, **settings), keep=True)


def prefilled(parts: Engine, asked: Request) -> tuple[int, Completion]:
    """Return how many prompt tokens a request took through the model, and its answer."""
    parts.model.steps.clear()
    [done] = run(parts, [asked])
    n_prompt = len(done.prompt_token_ids)
    taken = [n_new[0] for _, n_new, _ in parts.model.steps]
    # Every generated token but the first has a step of its own.
    n_decode = done.stats.generated_tokens - (done.finish_reason != "eos")
    prompt_steps = taken[: len(taken) - n_decode]
    assert sum(prompt_steps) == n_prompt - done.stats.cached_tokens
    return sum(prompt_steps), done


def test_only_what_is_new_of_a_kept_prompt_is_computed() -> None:
    parts = engine(prefill_chunk=8)
    n_first, first = prefilled(parts, kept("a first message", max_tokens=4))
    assert n_first == len(first.prompt_token_ids) and first.stats.cached_tokens == 0
    said = parts.tokenizer.decode(first.token_ids)
    longer = kept("a first message", max_tokens=4)
    longer = replace(longer, prompt_ids=(*first.prompt_token_ids, *first.token_ids, 70, 71, 72))
    [fresh] = run(engine(prefill_chunk=8), [longer])
    n_second, second = prefilled(parts, longer)
    # The last generated token was never run: it is new, and so are the three behind it.
    assert n_second == 4 and said
    assert second.token_ids == fresh.token_ids


@pytest.mark.parametrize("again", ["a first message", "a first", "another one", "a fjord"])
def test_a_prompt_that_differs_is_kept_as_far_as_it_is_alike(again: str) -> None:
    parts = engine(prefill_chunk=8)
    prefilled(parts, kept("a first message", max_tokens=4))
    n_new, done = prefilled(parts, kept(again, max_tokens=4))
    [fresh] = run(engine(prefill_chunk=8), [request(again, max_tokens=4)])
    assert done.token_ids == fresh.token_ids
    alike = {"a first message": 15, "a first": 7, "another one": 2, "a fjord": 4}[again]
    # The last prompt token always runs; the begin token is in front.
    assert n_new == max(1, len(done.prompt_token_ids) - alike)


def test_any_other_run_frees_what_was_kept() -> None:
    parts = engine(prefill_chunk=8)
    prefilled(parts, kept("a first message", max_tokens=4))
    assert parts.kept and parts.cache.lengths[0] > 0
    run(parts, [request("something else", max_tokens=2)])
    assert not parts.kept and parts.cache.lengths[0] == 0
    assert prefilled(parts, kept("a first message", max_tokens=4))[1].stats.cached_tokens == 0


def test_a_wider_run_keeps_each_prompt_in_its_row() -> None:
    parts = engine(prefill_chunk=8)
    run(parts, [kept("the left one", max_tokens=2), kept("the right one", max_tokens=2)])
    again = [kept("the left one", max_tokens=2), kept("the right one", max_tokens=2)]
    assert [done.stats.cached_tokens for done in run(parts, again)] == [12, 13]
    run(parts, again[:1])
    assert parts.cache.lengths[1] == 0


def test_what_is_interrupted_is_kept_as_far_as_it_came() -> None:
    parts = engine(logits_of=scripted({"count": "one two three"}))
    generation = Run(parts, [kept("count", max_tokens=12)])
    for _ in range(4):
        generation.step()
    generation.close()
    assert generation.completions[0].finish_reason == "interrupted"
    [done] = run(parts, [kept("count", max_tokens=12)])
    assert done.stats.cached_tokens == len(done.prompt_token_ids) - 1


def test_a_run_that_never_began_still_keeps_what_it_took_over() -> None:
    parts = engine(prefill_chunk=8)
    prefilled(parts, kept("a first message", max_tokens=4))
    Run(parts, [kept("a first message and more", max_tokens=4)]).close()
    [done] = run(parts, [kept("a first message and more", max_tokens=4)])
    assert done.stats.cached_tokens == 16


def test_where_the_device_may_be_in_trouble_nothing_is_kept() -> None:
    parts = engine(prefill_chunk=8)
    generation = Run(parts, [kept("a first message", max_tokens=4)])
    generation.step()
    generation.close(interrupted=False)
    assert not parts.kept and parts.cache.lengths[0] == 0


def test_prompt_logprobs_are_those_of_the_whole_prompt() -> None:
    parts = engine(prefill_chunk=8)
    asked = replace(kept("a first message", max_tokens=2), prompt_logprobs=True)
    [first] = run(parts, [asked])
    [again] = run(parts, [asked])
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.stats.cached_tokens == 0
