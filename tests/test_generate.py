"""The loop: chunked prefill, packed decode, ends, stop strings, what is left after a failure."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from offload_llama.config import SamplingParams
from offload_llama.errors import RequestError
from offload_llama.generate import Completion, Run
from tests.helpers_generate import (
    BOS,
    EOS,
    EOT,
    N_IDS,
    ByteTokenizer,
    engine,
    ids_of,
    request,
    run,
    scripted,
    steps_of,
)

LONG = "a prompt of many bytes, longer than a chunk"


def outcome(completion: Completion) -> dict[str, Any]:
    answer = completion.as_dict()
    del answer["stats"], answer["seed"]  # a fresh seed differs, and greedy does not use it
    return answer


def test_the_answer_does_not_depend_on_the_prefill_chunk() -> None:
    asked = request(LONG, max_tokens=8, temperature=0.8, seed=1)
    [expected] = run(engine(), [asked])
    assert len(expected.token_ids) == 8
    for chunk in (1, 7, len(asked.prompt_ids) - 1, len(asked.prompt_ids), 1000):
        [found] = run(engine(prefill_chunk=chunk), [asked])
        assert outcome(found) == outcome(expected)


def test_only_a_prompts_last_position_and_each_new_token_get_logits() -> None:
    """B13: no logits for every prompt position."""
    parts = engine(prefill_chunk=16)
    run(parts, [request("x" * 39, max_tokens=3)])
    assert parts.model.steps == [
        ((0,), (16,), "none"),
        ((0,), (16,), "none"),
        ((0,), (8,), "last"),
        ((0,), (1,), "last"),
        ((0,), (1,), "last"),
    ]


def test_a_row_has_the_ids_of_its_single_run_whatever_its_neighbours() -> None:
    """B04: prompts of unequal length, in every order, and two identical rows."""
    asked = [
        request("abc", max_tokens=12),
        request("z" * 40, max_tokens=5, temperature=0.9, seed=4),
        request(LONG, max_tokens=9, repetition_penalty=1.3),
    ]
    alone = [outcome(run(engine(), [r])[0]) for r in asked]
    for order in permutations(range(3)):
        found = run(engine(), [asked[i] for i in order])
        assert [outcome(c) for c in found] == [alone[i] for i in order]
    twins = run(engine(), [asked[1], asked[0], asked[1]])
    assert [outcome(c) for c in twins] == [alone[1], alone[0], alone[1]]


def test_a_prompt_that_ends_in_the_end_token_is_answered_all_the_same() -> None:
    """B04: one row already ends in the eos id."""
    asked = request("abc", max_tokens=6)
    ended = replace(asked, prompt_ids=(*asked.prompt_ids, EOS))
    [alone] = run(engine(), [ended])
    assert len(alone.token_ids) == 6
    assert run(engine(), [asked, ended])[1].token_ids == alone.token_ids


def test_finished_rows_leave_the_step_and_are_freed_at_once() -> None:
    parts = engine()
    asked = [request("a", max_tokens=4), request("bc", max_tokens=2), request("d", max_tokens=1)]
    batch = Run(parts, asked)
    moved, freed = [], []
    while not batch.done:
        moved.append([token.index for token in batch.step()])
        freed.append(list(parts.cache.freed))
    assert moved == [[0], [1], [2], [0, 1], [0], [0]]
    assert freed == [[], [], [2], [2, 1], [2, 1], [2, 1, 0]]
    assert [step[0] for step in parts.model.steps[3:]] == [(0, 1), (0,), (0,)]


def test_steps_number_requests_from_the_first_index() -> None:
    batch = Run(engine(), [request("a", max_tokens=1), request("b", max_tokens=1)], first_index=4)
    assert [token.index for token in batch.step() + batch.step()] == [4, 5]
    assert sorted(batch.completions) == [4, 5]


@pytest.mark.parametrize("end", [EOS, EOT])
def test_each_of_the_models_end_tokens_ends_the_text_and_is_not_part_of_it(end: int) -> None:
    """B05: the 4th generated token is an end of turn."""
    parts = engine(scripted({"hi": [*ids_of("yes"), end, *ids_of("more")]}))
    steps = steps_of(parts, [request("hi", max_tokens=20)])
    [last] = steps[-1]
    assert last.token_id == end and last.text == ""
    assert last.completion is not None
    assert last.completion.text == "yes"
    assert last.completion.token_ids == tuple(ids_of("yes"))
    assert last.completion.finish_reason == last.finish_reason == "eos"
    assert last.completion.stats.generated_tokens == 3
    assert last.completion.prompt_token_ids == (BOS, *ids_of("hi"))


def test_with_ignore_eos_end_tokens_are_ordinary_ids_and_stay_in() -> None:
    answer = [*ids_of("a"), EOS, *ids_of("b"), EOT, *ids_of("c")]
    [done] = run(engine(scripted({"hi": answer})), [request("hi", max_tokens=5, ignore_eos=True)])
    assert done.token_ids == tuple(answer)
    assert (done.text, done.finish_reason) == ("abc", "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_of_the_caller_end_the_text_even_if_the_models_are_ignored(
    ignore_eos: bool,
) -> None:
    [done] = run(
        engine(scripted({"hi": "abcdef"})),
        [request("hi", stop_token_ids=tuple(ids_of("d")), ignore_eos=ignore_eos, max_tokens=6)],
    )
    assert (done.text, done.finish_reason) == ("abc", "stop")
    assert done.token_ids == tuple(ids_of("abc"))


def test_a_stop_string_ends_the_text_in_front_of_it_and_is_never_shown() -> None:
    parts = engine(scripted({"hi": "one EN two END three"}))
    steps = steps_of(parts, [request("hi", stop=("END", "never"), max_tokens=20)])
    shown = [token.text for [token] in steps]
    assert "".join(shown) == "one EN two "
    completion = steps[-1][0].completion
    assert completion is not None
    assert (completion.text, completion.finish_reason) == ("one EN two ", "stop")
    assert completion.token_ids == tuple(ids_of("one EN two END"))


def test_a_stop_string_that_spells_a_control_token_is_met_by_its_id() -> None:
    """B59: the stop list is given as "</s>"."""
    [done] = run(
        engine(scripted({"hi": [*ids_of("ab"), EOS, *ids_of("cd")]})),
        [request("hi", stop=("</s>",), ignore_eos=True, max_tokens=5)],
    )
    assert (done.text, done.finish_reason) == ("ab", "stop")
    assert done.token_ids == tuple(ids_of("ab"))


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    steps = steps_of(
        engine(scripted({"hi": "go EN"})), [request("hi", stop=("END",), max_tokens=5)]
    )
    assert [token.text for [token] in steps] == ["g", "o", " ", "", "EN"]
    assert steps[-1][0].finish_reason == "length"


def test_streamed_text_is_the_whole_text_with_characters_across_tokens() -> None:
    answer = "π 😀 done"
    steps = steps_of(engine(scripted({"hi": answer})), [request("hi", max_tokens=12)])
    completion = steps[-1][0].completion
    assert completion is not None and completion.text == answer
    assert "".join(token.text for [token] in steps) == answer
    assert all("\ufffd" not in token.text for [token] in steps)


@pytest.mark.parametrize("prompt_tokens", [1, 5, 62, 63])
def test_prompt_and_answer_fill_the_context_exactly(prompt_tokens: int) -> None:
    """B17, B47: works to capacity, then the reason is "context"."""
    parts = engine(max_seq_len=64, prefill_chunk=10)
    [done] = run(parts, [request("x" * (prompt_tokens - 1))])
    assert done.finish_reason == "context"
    assert len(done.prompt_token_ids) + len(done.token_ids) == 64


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "length"), (5, "context")])
def test_max_tokens_counts_as_long_as_the_context_has_room(max_tokens: int, reason: str) -> None:
    [done] = run(engine(max_seq_len=10), [request("x" * 5, max_tokens=max_tokens)])
    assert (len(done.token_ids), done.finish_reason) == (min(max_tokens, 4), reason)


@pytest.mark.parametrize("fail_at", [0, 1, 2, 4, 6])
def test_after_a_step_that_raised_the_rows_are_free_and_the_next_run_is_as_new(
    fail_at: int,
) -> None:
    """B28: a call after one that raised."""
    asked = [request(LONG, max_tokens=9), request("b", max_tokens=9)]
    expected = [outcome(c) for c in run(engine(prefill_chunk=32), asked)]
    parts = engine(prefill_chunk=32)
    parts.model.fail_at = fail_at
    batch = Run(parts, asked)
    with pytest.raises(RuntimeError, match="the model broke"):
        while not batch.done:
            batch.step()
    batch.close(interrupted=False)
    assert parts.cache.lengths == [0, 0, 0, 0]
    assert batch.completions == {}
    assert [outcome(c) for c in run(parts, asked)] == expected


def test_a_second_run_is_like_the_first_after_other_lengths_and_batch_sizes() -> None:
    """B28: long A, short B, A again, with another batch between."""
    parts = engine()
    a, b = request(LONG, max_tokens=9), request("b", max_tokens=4)
    first = outcome(run(parts, [a])[0])
    assert outcome(run(parts, [b])[0]) == outcome(run(engine(), [b])[0])
    run(parts, [b, a, b])
    assert outcome(run(parts, [a])[0]) == first


def test_closing_an_unfinished_run_frees_its_rows_and_keeps_what_there_is() -> None:
    parts = engine(scripted({"a": "first answer", "b": "second one", "c": "third"}))
    batch = Run(parts, [request(p, max_tokens=10, stop=("irX",)) for p in "abc"])
    batch.step()
    batch.step()
    batch.close()
    assert parts.cache.lengths == [0, 0, 0, 0]
    assert sorted(batch.completions) == [0, 1]  # the third had not begun
    assert batch.completions[0].finish_reason == "interrupted"
    assert (batch.completions[0].text, batch.completions[1].text) == ("f", "s")
    assert batch.done
    with pytest.raises(RequestError, match="over"):
        batch.step()
    freed = list(parts.cache.freed)
    batch.close()
    assert parts.cache.freed == freed


def test_an_interrupted_answer_shows_what_was_held_back() -> None:
    batch = Run(engine(scripted({"a": "go END"})), [request("a", stop=("END",), max_tokens=9)])
    for _ in range(4):
        batch.step()
    batch.close()
    assert batch.completions[0].text == "go E"


def test_an_interrupt_inside_a_step_leaves_completions_of_what_there_is() -> None:
    parts = engine(scripted({"a": "abcdef"}))
    parts.model.fail_at, parts.model.error = 3, KeyboardInterrupt()
    batch = Run(parts, [request("a", max_tokens=6)])
    with pytest.raises(KeyboardInterrupt):
        while not batch.done:
            batch.step()
    batch.close()
    assert batch.completions[0].text == "abc"
    assert batch.completions[0].stats.generated_tokens == 3
    assert parts.cache.lengths == [0, 0, 0, 0]


def test_unseeded_rows_report_the_seed_that_repeats_them() -> None:
    """B40: the reported seed gives the same text again."""
    asked = request("abc", max_tokens=10, temperature=1.5)
    first, second = run(engine(), [asked, asked])
    assert first.seed != second.seed and first.token_ids != second.token_ids
    again = request("abc", max_tokens=10, temperature=1.5, seed=first.seed)
    assert run(engine(), [again])[0].token_ids == first.token_ids


def test_rows_of_the_output_without_a_token_are_never_generated() -> None:
    """B26: the toy model likes its five extra rows best."""
    [greedy, drawn] = run(
        engine(), [request("a", max_tokens=20), request("a", max_tokens=20, temperature=3.0)]
    )
    assert max(*greedy.token_ids, *drawn.token_ids) < N_IDS


def test_a_reply_is_a_text_of_its_own_and_a_continuation_keeps_its_space() -> None:
    """B11: SentencePiece takes the space in front of a text's first word away."""

    class Spaced(ByteTokenizer):
        drops_first_space = True

    parts = engine(scripted({"hi": " there"}), tokenizer=Spaced())
    asked = request("hi", max_tokens=6)
    assert run(parts, [asked])[0].text == " there"
    assert run(parts, [replace(asked, continues_text=False)])[0].text == "there"


def test_sampling_settings_of_each_request_are_its_own() -> None:
    asked = [
        request("a", max_tokens=6),
        request("a", max_tokens=3, temperature=2.0, seed=1),
        request("a", max_tokens=6, stop_token_ids=(ids_of("a")[0],)),
    ]
    assert asked[0].params == SamplingParams(max_tokens=6)
    done = run(engine(), asked)
    assert len(done[0].token_ids) == 6 and len(done[1].token_ids) == 3
    assert done[0].token_ids[:3] != done[1].token_ids
