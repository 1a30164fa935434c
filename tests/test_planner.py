"""Plans: what fits, what leaves the card, and that the automatic choice is the best one."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from offload_llama.cost import Setup, decode_seconds
from offload_llama.errors import ConfigError
from offload_llama.hardware import card
from offload_llama.planner import (
    Budget,
    auto,
    budget_of,
    max_batch,
    plan_for,
    spread,
)
from offload_llama.policy import max_context, plan
from tests.helpers_model import tiny_config
from tests.helpers_plan import LLAMA_8B, SMOLLM2_1_7B, ShapeRun, setup_for

GIB = 1 << 30


@pytest.fixture(scope="module")
def plan_fuzz() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "plan_fuzz.py"
    spec = importlib.util.spec_from_file_location("plan_fuzz", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_fuzz"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("decade", range(4))
def test_forty_random_plans_hold_when_they_are_carried_out(
    plan_fuzz: ModuleType, decade: int
) -> None:
    """B19: what is said to fit runs; weights, cache, ring, activations: nothing is forgotten."""
    results = []
    for number in range(10 * decade, 10 * decade + 10):
        case = plan_fuzz.draw(number, 0, True)
        results.append(plan_fuzz.check(case, forced=True))
        assert results[-1]["wrong"] == "", case
    assert any(result["fits"] for result in results)


def test_a_wrong_plan_would_be_noticed(plan_fuzz: ModuleType) -> None:
    numbers = range(100)
    case = next(
        c for c in (plan_fuzz.draw(n, 0, True) for n in numbers)
        if c.model == "tiny" and plan_fuzz.planned(c).fits
    )  # fmt: skip
    real = plan_fuzz.carry_out(case, plan_fuzz.planned(case))
    assert real is not None
    lying = {**real, "peak_bytes": plan_fuzz.planned(case).peak_bytes + 512}
    plan_fuzz.carry_out, kept = (lambda *_: lying), plan_fuzz.carry_out
    try:
        assert "above the plan" in plan_fuzz.check(case, forced=False)["wrong"]
    finally:
        plan_fuzz.carry_out = kept


def random_case(seed: int) -> tuple[Setup, Budget, str]:
    """Return a setup that fits its card only if some layers leave it."""
    rng = random.Random(seed)
    config = rng.choice([SMOLLM2_1_7B, LLAMA_8B])
    name = rng.choice(["rtx-3060-12gb", "rtx-4060", "rtx-5070"])
    setup = setup_for(config, ctx=rng.choice([2000, 4096, 9000]))
    roomy, n_layers = card(name + "?vram=64GiB"), config.n_layers
    whole = plan_for(setup, roomy, budget_of(card(name)), spread(n_layers, 0))
    least = plan_for(setup, roomy, whole.budget, spread(n_layers, n_layers))
    share = rng.uniform(0.1, 0.95)
    vram = round(least.needed_bytes + share * (whole.needed_bytes - least.needed_bytes))
    return setup, Budget(available_bytes=vram, reserve_bytes=whole.budget.reserve_bytes), name


@pytest.mark.parametrize("seed", range(20))
def test_auto_is_as_fast_as_the_best_manual_number_of_layers(seed: int) -> None:
    setup, budget, name = random_case(seed)
    profile = card(name + "?vram=64GiB")
    n_layers = setup.config.n_layers
    found = auto(setup, profile, budget)
    manual = [
        candidate
        for candidate in (
            plan_for(setup, profile, budget, spread(n_layers, n)) for n in range(n_layers + 1)
        )
        if candidate.fits
    ]
    assert found.fits == bool(manual)
    if not manual:
        return
    best = min(manual, key=lambda p: decode_seconds(setup, profile, p.hosts, setup.ctx))
    seconds = []
    for candidate in (found, best):
        run = ShapeRun(setup, f"{name}?vram=64GiB", candidate.hosts)
        run.fill(0, setup.ctx - 8)
        run.decode(2)
        seconds.append(run.decode(3))
    assert seconds[0] <= 1.03 * seconds[1]


def test_auto_keeps_every_layer_on_a_card_that_holds_them_and_costs_nothing() -> None:
    setup = setup_for(SMOLLM2_1_7B, ctx=4096)
    profile = card("rtx-3060-12gb")
    found, placements = plan("auto", setup, profile, budget_of(profile))
    by_hand, _ = plan("gpu", setup, profile, budget_of(profile))
    assert found.fits and found.n_host == 0 and found.kv_budget_bytes is None
    assert found.device_bytes == by_hand.device_bytes
    assert found.predicted == by_hand.predicted
    assert {placement.store for placement in placements} == {"resident"}


def test_what_leaves_the_card_is_spread_and_each_state_contains_the_one_before() -> None:
    for n_layers in (4, 24, 30, 32):
        states = [spread(n_layers, n) for n in range(n_layers + 1)]
        for n, (state, following) in enumerate(itertools.pairwise(states)):
            assert sum(state) == n
            assert all(b for a, b in zip(state, following, strict=True) if a)
        half = states[n_layers // 2]
        assert max(sum(half[i : i + 3]) for i in range(n_layers - 2)) <= 2


def test_a_budget_policy_bounds_what_the_cache_takes_of_the_card() -> None:
    setup, profile = setup_for(SMOLLM2_1_7B, ctx=8192), card("rtx-3060-12gb")
    found, placements = plan("budget:0.5GiB", setup, profile, budget_of(profile))
    terms = found.device_bytes
    assert terms["kv_resident"] + terms["tails"] <= GIB // 2 == found.kv_budget_bytes
    fewer = plan_for(setup, profile, found.budget, spread(24, found.n_host - 1)).device_bytes
    assert fewer["kv_resident"] + fewer["tails"] > GIB // 2
    assert sum(p.store == "host" for p in placements) == found.n_host


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    setup = Setup(config=LLAMA_8B, ctx=2048, weights="int4")
    profile = card("rtx-4060")
    budget = replace(budget_of(profile), ram_bytes=8 * GIB)
    longest = max_context(setup, profile, budget)
    assert longest is not None and longest.fits and longest.host_fits
    longer = auto(replace(setup, ctx=longest.setup.ctx + 256), profile, budget)
    assert not (longer.fits and longer.host_fits)
    fast = max_context(setup, profile, budget, min_tps=15)
    assert fast is not None and fast.setup.ctx < longest.setup.ctx
    assert fast.predicted.decode_s <= 1 / 15
    assert max_context(setup, profile, budget, min_tps=1e6) is None


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    setup, profile = setup_for(SMOLLM2_1_7B, ctx=2048), card("rtx-4060")
    budget = replace(budget_of(profile), ram_bytes=8 * GIB)
    n = max_batch(setup, profile, budget)
    assert auto(replace(setup, batch=n), profile, budget).fits
    beyond = auto(replace(setup, batch=n + 1), profile, budget)
    assert not (beyond.fits and beyond.host_fits)
    too_large = replace(setup, config=replace(LLAMA_8B, n_layers=80))
    assert max_batch(too_large, profile, budget) == 0


def test_weights_that_exceed_the_card_do_not_fit_whatever_leaves_it() -> None:
    """B19: a plan of weights alone would have said yes."""
    setup, profile = setup_for(LLAMA_8B, ctx=16384), card("rtx-3060-12gb?vram=15.6GiB")
    found, _ = plan("auto", setup, profile, budget_of(profile))
    assert found.device_bytes["weights"] < found.available_bytes
    assert not found.fits and found.n_host == 32


def test_half_the_context_is_timed_with_the_layers_it_would_have_there() -> None:
    setup, profile = setup_for(SMOLLM2_1_7B, ctx=32768), card("rtx-4060")
    found, _ = plan("auto", setup, profile, budget_of(profile))
    assert 0 < found.n_host < 24
    half = found._hosts_at(16384)
    assert sum(half) < found.n_host
    speed = found.predicted
    assert speed.decode_half_s < decode_seconds(setup, profile, found.hosts, 16384)
    assert speed.decode_half_s < speed.decode_s < speed.ttft_s


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reserve 9 GiB leaves nothing of the 8 GiB"):
        budget_of(card("rtx-4060"), reserve_bytes=9 * GIB)


def test_a_tiny_context_can_be_planned() -> None:
    setup = setup_for(tiny_config(), "float32", ctx=2, batch=1, prefill_chunk=1)
    profile = card("rtx-4060")
    assert plan("auto", setup, profile, budget_of(profile))[0].fits
    assert plan("offload", setup, profile, budget_of(profile))[0].predicted.ttft_s > 0
