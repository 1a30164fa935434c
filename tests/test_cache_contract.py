"""What every store promises, on the CPU and on the simulated card, wherever its rows live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_llama.device import Device, open_device
from offload_llama.device.sim.device import simulated
from offload_llama.errors import CacheError, CapacityError, ConfigError
from offload_llama.model import Transformer
from tests.helpers_model import greedy, make_cache, prefill, random_model, run_step, tiny_config
from tests.reference import reference_greedy, reference_logits

POLICIES = ["gpu", "offload", "gpu-layers:2"]
# float32 sums in another order; random weights amplify them over the layers. Logits reach 5.
TOLERANCE = 1e-4


def ids(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def oracle() -> Transformer:
    return random_model(tiny_config(), open_device("cpu"))


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cpu":
        yield open_device("cpu")
        return
    card = simulated("rtx-3060-12gb", order="copy_last")
    yield card
    assert card.card.errors == []


@pytest.fixture
def model(device: Device) -> Iterator[Transformer]:
    with device.scope():
        yield random_model(tiny_config(), device)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_reference_s_tokens(oracle, device, model, policy):
    prompt = ids(70)
    cache = make_cache(model, device, policy)
    assert greedy(model, cache, 0, prompt, 12) == reference_greedy(oracle, prompt, 12)
    cache.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 128, 299, 300, 4096])
def test_the_chunk_size_of_prefill_changes_nothing_beyond_rounding(oracle, policy, chunk):
    """B01: logits agree with one pass without a cache for every chunk size."""
    device, prompt = open_device("cpu"), ids(300)
    cache = make_cache(oracle, device, policy)
    out = prefill(oracle, cache, 0, prompt, chunk)
    assert (out - reference_logits(oracle, prompt)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [16, 64, 512, 4096])
def test_streamed_equals_resident_bit_for_bit(dtype, part):
    """Every logit of a chunked prefill, decode steps, and a ragged batch, over part sizes."""
    device = simulated("rtx-3060-12gb")
    with device.scope():
        model = random_model(tiny_config(), device, dtype)
        results = []
        for policy in POLICIES:
            cache = make_cache(model, device, policy, part_tokens=part, max_seq_len=256)
            out = [prefill(model, cache, row, ids(n, n), 50) for row, n in enumerate((3, 117, 40))]
            for i in range(10):
                out.append(run_step(model, cache, {2: [i], 0: [i + 1], 1: [i + 2]}))
            results.append(torch.cat([o.view(-1, 97) for o in out]))
            cache.close()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0].isfinite().all()
    assert device.card.errors == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ragged_batch_gives_each_row_its_single_run(oracle, device, model, policy):
    """B04: rows of 3, 40 and 117 tokens, decoded together, in any order of rows."""
    prompts = {0: ids(3, 3), 1: ids(40, 4), 2: ids(117, 5)}
    alone = {row: reference_greedy(oracle, p, 6) for row, p in prompts.items()}
    for order in ([0, 1, 2], [2, 0, 1]):
        cache = make_cache(model, device, policy)
        new = {row: [int(prefill(model, cache, row, prompts[row]).argmax())] for row in order}
        for _ in range(5):
            out = run_step(model, cache, {row: [new[row][-1]] for row in order})
            for row, logits in zip(order, out, strict=True):
                new[row].append(int(logits.argmax()))
        assert new == alone
        cache.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_and_decode_of_different_rows_share_a_step(oracle, device, model, policy):
    cache = make_cache(model, device, policy)
    prefill(model, cache, 0, ids(33))
    out = run_step(model, cache, {1: ids(20, 2), 0: [5], 2: ids(1, 3)})
    expected = [ids(20, 2), [*ids(33), 5], ids(1, 3)]
    for logits, sequence in zip(out, expected, strict=True):
        assert (logits - reference_logits(oracle, sequence)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [0, 1, 37, 64, 69, 74])
def test_truncate_and_continue_equals_a_fresh_run(device, model, policy, length):
    cache = make_cache(model, device, policy)
    prompt = ids(70)
    prefill(model, cache, 0, prompt)
    for i in range(5):
        run_step(model, cache, {0: [i]})
    whole = [*prompt, 0, 1, 2, 3, 4]
    cache.truncate(0, length)
    more = ids(30, 9)
    again = prefill(model, cache, 0, more)
    fresh = make_cache(model, device, policy)
    expected = prefill(model, fresh, 0, whole[:length] + more)
    assert (again - expected).abs().max() < TOLERANCE
    assert int(again.argmax()) == int(expected.argmax())


def test_a_start_below_the_length_overwrites_from_there(oracle):
    cache = make_cache(oracle, open_device("cpu"), "offload")
    prefill(oracle, cache, 0, ids(50))
    out = run_step(oracle, cache, {0: [7, 8]}, start={0: 20})
    expected = reference_logits(oracle, [*ids(50)[:20], 7, 8])[-1]
    assert cache.lengths[0] == 22 and (out[0] - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copied_row_and_its_source_go_separate_ways(oracle, device, model, policy):
    cache = make_cache(model, device, policy)
    prefill(model, cache, 0, ids(70))
    for i in range(3):
        run_step(model, cache, {0: [i]})
    start = [*ids(70), 0, 1, 2]
    prefill(model, cache, 2, ids(5, 8))
    cache.copy_row(0, 2)
    branches: dict[int, list[int]] = {0: list(start), 2: list(start)}
    for i in range(20):
        new = {0: [i + 10], 2: [i + 40]}
        out = run_step(model, cache, new)
        for row in new:
            branches[row] += new[row]
    for row, logits in zip((0, 2), out, strict=True):
        expected = reference_logits(oracle, branches[row])[-1]
        assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing_layer", [0, 3])
def test_a_step_that_fails_leaves_the_cache_as_it_was(device, model, policy, failing_layer):
    """B28: a call after one that raised is as good as new; the eighth token would flush."""
    prompt = ids(40)
    cache, untouched = (make_cache(model, device, policy) for _ in range(2))
    for each in (cache, untouched):
        prefill(model, each, 0, prompt)
        for i in range(7):
            run_step(model, each, {0: [i]})
    layer = model.layers[failing_layer].feed_forward
    for new in ([7], ids(30, 6)):
        with pytest.raises(RuntimeError, match="power cut"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                layer, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("power cut"))
            )
            run_step(model, cache, {0: new})
        assert cache.lengths[0] == 47
    for i in range(12):
        a, b = (run_step(model, each, {0: [i]}) for each in (cache, untouched))
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_call_equals_the_first(device, model, policy):
    """B28: long, short, long again on one cache, and rows freed in between."""
    cache = make_cache(model, device, policy)
    first = greedy(model, cache, 0, ids(150), 5)
    cache.free(0)
    short = greedy(model, cache, 1, ids(5), 5)
    cache.free(1)
    assert greedy(model, cache, 0, ids(150), 5) == first
    assert greedy(model, make_cache(model, device, policy), 0, ids(5), 5) == short


@pytest.mark.parametrize("policy", POLICIES)
def test_cache_k_and_cache_v_equal_what_a_recompute_holds(device, model, policy):
    """B35: per layer, after many small steps, against one pass over the same tokens."""
    cache = make_cache(model, device, policy)
    tokens = ids(60)
    for first in range(0, 40, 10):
        prefill(model, cache, 1, tokens[first : first + 10])
    for token in tokens[40:]:
        run_step(model, cache, {1: [token]})
    once = make_cache(model, device, "gpu")
    prefill(model, once, 1, tokens, chunk=60)
    model.use_cache(cache)
    attention = model.layers[0].attention
    assert tuple(attention.cache_k.shape) == (3, 512, 2, 8)
    assert attention.cache_v.nbytes == 3 * 512 * 2 * 8 * 4
    for store, other in zip(cache.stores, once.stores, strict=True):
        for view, expected in ((store.cache_k, other.cache_k), (store.cache_v, other.cache_v)):
            assert (view.tensor() - expected.tensor()).abs().max() < TOLERANCE
            assert view[1, :60].abs().min(-1).values.max() > 0 and view[0].abs().max() == 0


def test_logits_are_made_only_for_the_tokens_that_were_asked_for(oracle):
    """B13: the head runs on one row per sequence unless all are wanted."""
    cache = make_cache(oracle, open_device("cpu"))
    assert run_step(oracle, cache, {0: ids(9), 1: ids(4)}).shape == (2, 97)
    assert run_step(oracle, cache, {0: ids(9), 1: ids(4)}, "all").shape == (13, 97)
    assert run_step(oracle, cache, {0: ids(9)}, "none").numel() == 0
    assert cache.lengths == [27, 8, 0]


def test_the_context_is_used_to_the_last_token_and_not_one_further(oracle):
    """B47: prefill 200, decode to 256 exactly, then the documented error."""
    cache = make_cache(oracle, open_device("cpu"), "offload", max_seq_len=256)
    prefill(oracle, cache, 0, ids(200))
    for i in range(56):
        out = run_step(oracle, cache, {0: [i]})
    expected = reference_logits(oracle, [*ids(200), *range(56)])[-1]
    assert (out[0] - expected).abs().max() < TOLERANCE
    with pytest.raises(CapacityError, match=r"257 tokens do not fit the context of 256; raise"):
        run_step(oracle, cache, {0: [1]})
    assert cache.lengths[0] == 256


def test_steps_that_make_no_sense_are_refused_by_name(oracle):
    cache = make_cache(oracle, open_device("cpu"))
    for rows, start, n_new, says in (
        ([], [], [], "needs rows"),
        ([3], [0], [1], "rows 0-2, asked for 3"),
        ([0, 0], [0, 0], [1, 1], "twice"),
        ([0], [5], [1], "cannot append 1 at 5"),
        ([0], [0], [0], "cannot append 0 at 0"),
    ):
        with pytest.raises(CacheError, match=says):
            cache.step(rows, start, n_new)
    with pytest.raises(CacheError, match="must be one of"):
        cache.step([0], [0], [1], logits="some")
    with pytest.raises(CacheError, match="cannot truncate"):
        cache.truncate(0, 1)
    with pytest.raises(CacheError, match="to itself"):
        cache.copy_row(1, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        make_cache(oracle, open_device("cpu"), max_batch_size=0)
    with pytest.raises(ConfigError, match="2 slots"):
        make_cache(oracle, open_device("cpu"), "offload", ring_slots=1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_with_little_to_see_never_becomes_nan(policy, dtype):
    """B23: one token beside 64, chunk 16, half precision; the short row equals its single run."""
    device = simulated("rtx-3060-12gb", order="copy_first")
    with device.scope():
        model = random_model(tiny_config(), device, dtype)
        cache = make_cache(model, device, policy)
        prefill(model, cache, 0, ids(64), 16)
        first = run_step(model, cache, {1: [11]})
        both = run_step(model, cache, {0: [1], 1: [2]})
        alone = make_cache(model, device, policy)
        assert torch.equal(run_step(model, alone, {0: [11]}), first)
        run_step(model, alone, {0: [2]})
    assert both.isfinite().all() and first.isfinite().all()
