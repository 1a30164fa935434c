"""Choosing tokens: greedy, the filters, the draw, seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from offload_llama.config import SamplingParams
from offload_llama.errors import ConfigError, OffloadLlamaError
from offload_llama.sampling import Sampler, largest, sample


def draws(logits: torch.Tensor, count: int = 200, **settings: Any) -> list[int]:
    """Return ids drawn again and again from the same logits."""
    settings.setdefault("temperature", 1.0)
    settings.setdefault("seed", 3)
    sampler = Sampler(SamplingParams(**settings))
    return [sampler.choose(logits, logits.shape[0]).token_id for _ in range(count)]


def naive_candidates(
    logits: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> set[int]:
    """Return the ids that may be drawn, by sorting plain Python lists."""
    probs = torch.softmax(logits.double() / temperature, 0).tolist()
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:top_k]
    if top_p < 1:
        total, kept = sum(probs[i] for i in ranked), []
        for token_id in ranked:
            kept.append(token_id)
            if sum(probs[i] for i in kept) >= top_p * total:
                break
        ranked = kept
    return {i for i in ranked if probs[i] >= min_p * max(probs)}


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = torch.randn(4, 50)
    samplers = [Sampler(SamplingParams()) for _ in range(4)]
    assert [c.token_id for c in sample(logits, samplers, 50)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("logprobs", [False, True])
def test_of_equal_logits_greedy_takes_the_lowest_id_on_the_device_and_on_the_cpu(
    logprobs: bool,
) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 77, 78]] = 9.0
    [choice] = sample(logits, [Sampler(SamplingParams(), logprobs=logprobs)], 5000)
    assert choice.token_id == 77


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-4, 0.01])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """B25: a half-precision logit of 20 over a tiny temperature overflows."""
    logits = torch.randn(1000).half()
    logits[123] = 20.0
    assert set(draws(logits.float(), temperature=temperature, top_p=0.9)) == {123}


@pytest.mark.parametrize("temperature", [0.0101, 100.0, 1e30])
@pytest.mark.parametrize("top_p", [1e-4, 0.9])
def test_other_temperatures_draw_a_token_without_overflow(temperature: float, top_p: float) -> None:
    """B25: also with the largest logits half precision has, and a tiny top-p."""
    logits = torch.tensor([65504.0, -65504.0, 65000.0, 0.0])
    assert set(draws(logits, temperature=temperature, top_p=top_p)) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
        ({"top_k": 0}, "--top-k"),
        ({"min_p": 1.0}, "--min-p"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
    ],
)
def test_impossible_settings_name_their_flag(settings: dict[str, Any], flag: str) -> None:
    """B25: negative or nan is a usage error."""
    with pytest.raises(ConfigError, match=flag) as caught:
        SamplingParams(**settings)
    assert "\n" not in str(caught.value)


def test_a_seed_gives_the_same_ids_and_another_seed_others() -> None:
    """B40: same seed, same answer."""
    logits = torch.randn(500)
    assert draws(logits, seed=7) == draws(logits, seed=7)
    assert draws(logits, seed=7) != draws(logits, seed=8)


def test_without_a_seed_fresh_ones_are_drawn_and_reported_whatever_torch_was_seeded_with() -> None:
    """B40: no seed, another answer, which the reported seed repeats."""
    seeds = []
    for _ in range(5):
        torch.manual_seed(0)
        seeds.append(Sampler(SamplingParams(temperature=1.0)).seed)
    assert len(set(seeds)) == 5
    assert Sampler(SamplingParams(seed=seeds[0])).seed == seeds[0]


def test_drawing_leaves_torchs_own_random_state_alone() -> None:
    logits = torch.randn(100)
    before = torch.random.get_rng_state()
    draws(logits)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_seeded_row_is_the_same_alone_and_beside_greedy_and_sampled_neighbours() -> None:
    """B40: inside a batch of three, one of them greedy."""
    rows = [torch.randn(300) for _ in range(20)]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    alone = Sampler(params)
    expected = [alone.choose(row, 300).token_id for row in rows]
    others = (SamplingParams(), params, SamplingParams(temperature=1.5, seed=9))
    samplers = [Sampler(p) for p in others]
    for row, token_id in zip(rows, expected, strict=True):
        logits = torch.stack((row.flip(0), row, -row))
        choices = sample(logits, samplers, 300)
        assert choices[0].token_id == int(row.flip(0).argmax())
        assert choices[1].token_id == token_id


def test_rounding_that_swaps_the_ranks_of_two_near_equal_tokens_does_not_change_the_draw() -> None:
    logits = torch.zeros(400)
    logits[::2] += 1e-6
    swapped = torch.zeros(400)
    swapped[1::2] += 1e-6
    assert draws(logits, top_p=0.999) == draws(swapped, top_p=0.999)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    count = 4000
    found = Counter(draws(logits, count, temperature=0.7))
    expected = torch.softmax(logits / 0.7, 0)
    for token_id, prob in enumerate(expected.tolist()):
        # Five standard deviations of a binomial count.
        assert abs(found[token_id] - count * prob) <= 5 * (count * prob * (1 - prob)) ** 0.5 + 1


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (None, 1.0, 0.0),
        (5, 1.0, 0.0),
        (None, 0.5, 0.0),
        (None, 0.95, 0.0),
        (None, 1.0, 0.2),
        (20, 0.8, 0.0),
        (20, 0.8, 0.3),
        (9000, 0.9, 0.01),
    ],
)
def test_the_filters_keep_what_plain_sorting_keeps(
    spread: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = (spread * torch.randn(3000)).round(decimals=1)  # with many ties
    sampler = Sampler(
        SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    )
    found, _weights = sampler._candidates((logits - logits.max()) / 0.9)
    ids = torch.arange(3000) if found is None else found
    expected = naive_candidates(logits, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    # Sums in another order may put the border of top-p one token further on.
    assert len(expected.symmetric_difference(ids.tolist())) <= (1 if top_p < 1 else 0)
    assert set(draws(logits, 50, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)) <= {
        *ids.tolist()
    }


def test_top_k_one_and_a_tiny_top_p_are_greedy_even_on_a_tie() -> None:
    logits = torch.zeros(2000)
    logits[[1500, 40]] = 5.0
    assert set(draws(logits, top_k=1)) == {40}
    assert set(draws(logits, top_p=1e-9)) == {40}


def test_the_largest_are_ranked_with_the_lower_id_first_on_a_tie() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])
    assert largest(scores, 3).tolist() == [1, 3, 2]
    assert largest(scores, 9).tolist() == [1, 3, 2, 4, 0]


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([4.0, 3.0, -1.0, -1.5])
    greedy = SamplingParams(repetition_penalty=2.0)
    assert Sampler(greedy, prompt_ids=[0]).choose(logits, 4).token_id == 1
    assert Sampler(greedy, prompt_ids=[0, 0]).choose(logits, 4).token_id == 1
    assert Sampler(greedy, prompt_ids=[2]).choose(logits - 4, 4).token_id == 0
    negative = torch.tensor([-1.0, -1.9])
    assert Sampler(greedy, prompt_ids=[0]).choose(negative, 2).token_id == 1


def test_the_repetition_penalty_counts_what_was_generated() -> None:
    logits = torch.tensor([4.0, 3.0, 2.5, 0.0])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert [sampler.choose(logits, 4).token_id for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0}])
def test_output_rows_without_a_token_are_never_chosen(settings: dict[str, Any]) -> None:
    """B26: eight more embedding rows than the tokenizer has pieces."""
    logits = torch.randn(1, 108)
    logits[0, 100:] = 50.0
    sampler = Sampler(SamplingParams(**settings))
    for _ in range(50):
        assert sample(logits, [sampler], 100)[0].token_id < 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_an_error_in_one_line(
    temperature: float, bad: float
) -> None:
    logits = torch.zeros(2, 10)
    if bad < 0:
        logits[1] = bad
    else:
        logits[1, 3] = bad
    samplers = [Sampler(SamplingParams(temperature=temperature)) for _ in range(2)]
    with pytest.raises(OffloadLlamaError, match=r"not finite.*--dtype"):
        sample(logits, samplers, 10)


def test_the_logprob_is_the_models_own_whatever_the_settings() -> None:
    logits = torch.randn(1, 64)
    sampler = Sampler(
        SamplingParams(temperature=2.0, top_k=3, repetition_penalty=1.5, seed=5),
        prompt_ids=[1, 2],
        logprobs=True,
    )
    [choice] = sample(logits, [sampler], 60)
    expected = torch.log_softmax(logits[0], 0)[choice.token_id]
    assert choice.logprob == pytest.approx(float(expected), abs=1e-6)
    [greedy] = sample(logits, [Sampler(SamplingParams())], 60)
    assert greedy.logprob is None


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.5)])
def test_one_copy_to_the_host_serves_the_whole_batch(
    temperatures: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    real = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(tensor.shape))
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    samplers = [Sampler(SamplingParams(temperature=t)) for t in temperatures]
    sample(torch.randn(3, 40), samplers, 40)
    assert copied == [(3,) if max(temperatures) == 0 else (3, 40)]
