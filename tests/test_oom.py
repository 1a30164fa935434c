"""Memory that runs out: a layer moves, a sequence waits, or one line says who holds it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload_llama import SamplingParams
from offload_llama.device import DeviceMemory
from offload_llama.device.sim.device import SimulatedDevice, simulated
from offload_llama.errors import OffloadLlamaError, OutOfMemory
from offload_llama.generate import Engine, Request, Run
from offload_llama.oom import Setup, asked_bytes, attempt, out_of_memory
from offload_llama.policy import place, spill_order
from tests.helpers_generate import (
    FIRST_BYTE,
    VOCAB_SIZE,
    ByteTokenizer,
    FakeCache,
    engine,
    request,
    run,
)
from tests.helpers_model import make_cache, random_model, tiny_config

MIB, GIB = 1 << 20, 1 << 30
LAYERS = 6


def full(mib: float = 64) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {mib:.2f} MiB. GPU 0 has")


class Card:
    """A model on a simulated card, the engine around it, and what is said."""

    def __init__(self, order: str = "inorder", **options: Any) -> None:
        self.device: SimulatedDevice = simulated("rtx-3060-12gb", order=order)
        self.said: list[str] = []
        with self.device.scope():
            config = tiny_config(n_layers=LAYERS, vocab_size=VOCAB_SIZE)
            self.model = random_model(config, self.device)
            self.cache = make_cache(
                self.model, self.device, "gpu",
                on_move=lambda layers: self.said.append(f"moved {layers}"),
                part_tokens=256, max_seq_len=1024,
            )  # fmt: skip
        self.engine = Engine(
            model=self.model, cache=self.cache, device=self.device, tokenizer=ByteTokenizer(),
            prefill_chunk=32, notify=self.said.append, **options,
        )  # fmt: skip

    def leave(self, nbytes: int) -> None:
        """Let another program take all of the card's memory but this."""
        self.device.card.take_memory(0)
        self.device.card.take_memory(self.device.memory().free_bytes - nbytes)


def asked(n_prompt: int, n_new: int, seed: int = 0, **settings: Any) -> Request:
    draw = random.Random(seed)
    return Request(
        prompt_ids=tuple(FIRST_BYTE + draw.randrange(256) for _ in range(n_prompt)),
        params=SamplingParams(max_tokens=n_new, ignore_eos=True, **settings),
    )


@pytest.mark.parametrize("order", ["inorder", "copy_last", "copy_first"])
def test_memory_that_others_take_moves_a_layer_and_changes_no_id(order: str) -> None:
    """Free memory goes while the run decodes; the same step is taken again."""
    wanted = asked(100, 50)
    [expected] = run(Card().engine, [wanted])
    card = Card(order)
    batch = Run(card.engine, [wanted])
    for _ in range(10):
        batch.step()
    assert card.said == []
    card.leave(100 << 10)  # the buffers of 128 tokens cannot all double at the 129th
    while not batch.done:
        batch.step()
    assert batch.completions[0].token_ids == expected.token_ids
    assert card.device.card.errors == []
    assert card.said == [f"moved {(layer,)}" for layer in spill_order(LAYERS)[: len(card.said)]]
    assert 1 <= len(card.said) < LAYERS


def test_one_failed_allocation_moves_one_layer_and_says_one_line() -> None:
    card, wanted = Card(), asked(40, 30)
    [expected] = run(Card().engine, [wanted])
    batch = Run(card.engine, [wanted])
    for _ in range(5):
        batch.step()
    layer, calls = card.model.layers[3].feed_forward, []
    forward = layer.forward
    with pytest.MonkeyPatch.context() as patch:

        def fails_once(x: torch.Tensor) -> torch.Tensor:
            calls.append(card.device.memory().allocated_bytes)
            if len(calls) == 1:
                raise full()
            return forward(x)

        patch.setattr(layer, "forward", fails_once)
        batch.step()
    while not batch.done:
        batch.step()
    assert card.said == [f"moved {(spill_order(LAYERS)[0],)}"] and len(calls) == 2
    assert not any(store.is_host for store in card.cache.stores[:4])
    ring, rows = card.cache.stats().ring_bytes, 64 * 2 * card.cache.geometry.row_bytes
    assert calls[1] == calls[0] - rows + ring, "the failed pass still holds memory of the card"
    assert batch.completions[0].token_ids == expected.token_ids


def test_without_fallback_the_first_failure_is_reported_and_nothing_moves() -> None:
    card = Card(fallback=False)
    batch = Run(card.engine, [asked(100, 50), asked(90, 50)])
    for _ in range(5):
        batch.step()
    card.leave(20 << 10)
    with pytest.raises(OutOfMemory) as caught:
        while not batch.done:
            batch.step()
    card.device.card.take_memory(0)
    batch.close()
    assert card.said == [] and not any(store.is_host for store in card.cache.stores)
    error = caught.value
    assert (error.phase, error.exit_code) == ("decode", 5) and isinstance(error, OffloadLlamaError)
    assert error.needed_bytes > error.free_bytes
    assert "leaving out --no-fallback" in error.suggestions
    assert batch.completions[0].finish_reason == "interrupted"


def test_one_sequence_that_cannot_go_on_fails_and_the_next_run_works() -> None:
    card, wanted = Card(), asked(60, 20)
    [expected] = run(card.engine, [wanted])
    card.leave(0)
    batch = Run(card.engine, [wanted])
    with pytest.raises(OutOfMemory) as caught:
        batch.step()
    assert caught.value.phase == "prefill"
    assert all(store.is_host for store in card.cache.stores), "layers were left on the card"
    batch.close()
    card.device.card.take_memory(0)
    [again] = run(card.engine, [wanted])
    assert again.token_ids == expected.token_ids
    assert not any(store.is_host for store in card.cache.stores)


class Crowded(FakeCache):
    """A cache that holds so many tokens and cannot be relieved."""

    room: int = 40

    def step(self, rows: Any, start: Any, n_new: Any, logits: str = "last") -> Any:
        kept = sum(n for row, n in enumerate(self.lengths) if row not in rows)
        if kept + sum(start) + sum(n_new) > self.room:
            raise full()
        return super().step(rows, start, n_new, logits)


def crowded(room: int, **changes: Any) -> tuple[Engine, list[str]]:
    said: list[str] = []
    cache = Crowded()
    cache.room = room
    return replace(engine(), cache=cache, notify=said.append, prefill_chunk=8, **changes), said


@pytest.mark.parametrize("room", [24, 30, 41, 55])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}])
def test_sequences_that_have_to_wait_give_the_same_results_in_order(
    room: int, settings: dict[str, Any]
) -> None:
    """Greedy and drawn; each token is yielded once, logprobs are there once."""
    wanted = [
        request(prompt, max_tokens=n, logprobs=True, prompt_logprobs=True, **settings)
        for prompt, n in (("first", 12), ("the second", 9), ("a third one", 11), ("4", 15))
    ]
    expected = run(engine(), wanted)
    parts, said = crowded(room)
    batch, tokens = Run(parts, wanted), {i: [] for i in range(4)}
    while not batch.done:
        for token in batch.step():
            tokens[token.index].append(token)
    batch.close()
    for index, whole in enumerate(expected):
        found = batch.completions[index]
        assert found.token_ids == whole.token_ids and found.text == whole.text
        assert found.finish_reason == whole.finish_reason
        assert found.logprobs == pytest.approx(whole.logprobs)
        assert found.prompt_logprobs == pytest.approx(whole.prompt_logprobs)
        assert tuple(token.token_id for token in tokens[index]) == whole.token_ids
        assert "".join(token.text for token in tokens[index]) == whole.text
        assert found.stats.generated_tokens == len(whole.token_ids)
    assert said and all("waits until another has finished" in line for line in said)
    assert parts.cache.lengths == [0, 0, 0, 0]


def test_a_sequence_that_waits_is_interrupted_with_what_it_has() -> None:
    parts, said = crowded(30)
    batch = Run(parts, [request("first", max_tokens=12), request("the second", max_tokens=12)])
    while not said:
        batch.step()
    batch.close()
    assert [batch.completions[i].finish_reason for i in range(2)] == ["interrupted"] * 2
    assert len(batch.completions[1].token_ids) > 0 and parts.cache.lengths == [0, 0, 0, 0]


@pytest.mark.parametrize("off", ["preempt", "fallback"])
def test_nobody_waits_where_that_is_switched_off(off: str) -> None:
    parts, said = crowded(30, **{off: False})
    with pytest.raises(OutOfMemory):
        run(parts, [request("first", max_tokens=12), request("the second", max_tokens=12)])
    assert said == []


def test_a_sequence_waits_on_a_full_card_and_goes_on_when_there_is_room() -> None:
    """Real rows: the youngest of three is filled in again from its prompt and answer."""
    wanted = [asked(40, 25, 1), asked(50, 12, 2), asked(45, 25, 3)]
    expected = run(Card().engine, wanted)
    card = Card(order="copy_last")
    batch = Run(card.engine, wanted)
    for _ in range(6):
        batch.step()
    failing = card.model.layers[0].feed_forward
    forward = failing.forward
    with pytest.MonkeyPatch.context() as patch:

        def no_room_for_three(x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise full()
            return forward(x)

        patch.setattr(failing, "forward", no_room_for_three)
        while not batch.done:
            batch.step()
    assert [batch.completions[i].token_ids for i in range(3)] == [e.token_ids for e in expected]
    assert card.said[-1].startswith("prompt 3 waits") and len(card.said) == LAYERS + 1
    assert card.device.card.errors == []


@pytest.fixture
def cache() -> Any:
    held = FakeCache()
    held.rows[0] = [1] * 4096
    held.placements = place("gpu", 4)
    return held


def report(
    phase: str, asked_mib: float, *, cache: Any, weights: int, allocated: int, unused: int = 0,
    others: int = 0, itemsize: int = 2, chunk: int = 512, kv: int = 0, fallback: bool = True,
) -> OutOfMemory:  # fmt: skip
    total = 12 * GIB
    memory = DeviceMemory(
        allocated, allocated, total - allocated - unused - others, total, allocated + unused
    )
    cache.stats = lambda: type("Stats", (), {"device_kv_bytes": kv, "ring_bytes": 48 * MIB})
    setup = Setup(
        device="cuda:0", weights_bytes=weights, weights_itemsize=itemsize, prefill_chunk=chunk,
        fallback=fallback,
    )  # fmt: skip
    return out_of_memory(phase, str(full(asked_mib)), memory, setup, cache)


def test_the_size_that_was_asked_for_is_read_from_what_pytorch_says() -> None:
    for text, expected in (
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 2.5 * GIB),
        ("XPU out of memory. Tried to allocate 20.00 MiB. GPU", 20 * MIB),
        ("HIP out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA error: out of memory", 0),
    ):
        assert asked_bytes(text) == expected


def test_weights_that_are_too_large_are_told_apart(cache: Any) -> None:
    """B43 (a): a 13 GB model on a 12 GB card; no word of fragmentation."""
    error = report("weights", 100, cache=cache, weights=26 * GIB, allocated=12 * GIB - 50 * MIB)
    assert error.holders["weights"] == 12 * GIB - 98 * MIB and error.holders["activations"] == 0
    assert error.suggestions == ("--device cpu", "a smaller model", "a card with more memory")
    assert "pieces" not in str(error) and "ALLOC_CONF" not in str(error)
    wide = report(
        "weights", 100, cache=cache, weights=20 * GIB, allocated=12 * GIB - 50 * MIB, itemsize=4
    )
    assert wide.suggestions[0] == "--dtype bfloat16"


def test_rows_that_grew_too_long_are_told_apart(cache: Any) -> None:
    """B43 (b): keys and values in decode."""
    error = report("decode", 64, cache=cache, weights=7 * GIB, allocated=12 * GIB - 32 * MIB,
                   kv=4 * GIB)  # fmt: skip
    assert error.suggestions[0] == "--kv-policy offload"
    [ctx] = [int(s.split()[1]) for s in error.suggestions if s.startswith("--ctx")]
    assert 4096 - 128 <= ctx < 4096
    assert (error.needed_bytes, error.free_bytes) == (64 * MIB, 32 * MIB)
    assert sum(error.holders.values()) + error.free_bytes == 12 * GIB
    cache.rows[1] = [1] * 4096
    several = report("decode", 64, cache=cache, weights=7 * GIB, allocated=12 * GIB - 32 * MIB,
                     kv=4 * GIB)  # fmt: skip
    assert "--max-batch-size 1" in several.suggestions
    kept = report("decode", 64, cache=cache, weights=7 * GIB, allocated=12 * GIB - 32 * MIB,
                  kv=4 * GIB, fallback=False)  # fmt: skip
    assert kept.suggestions[0] == "leaving out --no-fallback"


def test_a_chunk_that_is_too_large_is_told_apart(cache: Any) -> None:
    """B43 (c): activations of 8192 tokens; the chunk named would have fitted."""
    cache.placements = place("offload", 4)
    error = report("prefill", 2048, cache=cache, weights=7 * GIB, allocated=11 * GIB, chunk=8192)
    assert error.holders["activations"] == 4 * GIB - 48 * MIB
    assert error.suggestions[0] == "--prefill-chunk 4096"
    tight = report("prefill", 2048, cache=cache, weights=11 * GIB, allocated=11 * GIB + 500 * MIB,
                   chunk=8192)  # fmt: skip
    room = 12 * GIB - 11 * GIB - 48 * MIB
    needed = tight.holders["activations"] + 2 * GIB
    chunk = int(tight.suggestions[0].split()[1])
    assert needed * chunk // 8192 <= room < needed * 2 * chunk // 8192


def test_other_programs_are_named_where_closing_them_would_do(cache: Any) -> None:
    cache.placements = place("offload", 4)
    error = report("decode", 64, cache=cache, weights=7 * GIB, allocated=8 * GIB,
                   others=4 * GIB - 10 * MIB)  # fmt: skip
    assert error.holders["other programs"] == 4 * GIB - 10 * MIB
    assert error.suggestions[0].startswith("closing other programs")


@pytest.mark.parametrize(
    ("variable", "value", "platform", "says"),
    [
        (None, "", "linux", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "linux", False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "linux", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", "linux", True),
        (None, "", "win32", False),
    ],
)
def test_fragmentation_is_named_only_as_the_cause_and_with_the_platforms_remedy(
    cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: Any,
    value: str,
    platform: str,
    says: bool,
) -> None:
    """B43: the tip appears where memory lies in pieces, and not where it is set or cannot be."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.platform", platform)
    in_pieces = report("decode", 64, cache=cache, weights=7 * GIB, allocated=11 * GIB,
                       unused=600 * MIB)  # fmt: skip
    assert "in pieces too small" in str(in_pieces)
    assert ("expandable_segments:True" in in_pieces.suggestions[0]) == says
    just_full = report("decode", 64, cache=cache, weights=7 * GIB, allocated=12 * GIB - 90 * MIB,
                       unused=60 * MIB)  # fmt: skip
    assert "pieces" not in str(just_full) and "expandable" not in str(just_full)


def test_every_report_is_one_line_with_three_suggestions(cache: Any) -> None:
    for phase in ("weights", "prefill", "decode"):
        for allocated in (0, 6 * GIB, 12 * GIB):
            error = report(phase, 64, cache=cache, weights=5 * GIB, allocated=allocated)
            assert "\n" not in str(error) and len(error.suggestions) == 3
            assert f"({phase})" in str(error) and "64 MiB more were needed" in str(error)


def test_nothing_of_the_failed_try_is_left_when_it_is_tried_again() -> None:
    """The traceback holds the pass's tensors; it must be gone before memory is freed."""
    alive: list[int] = []

    class Pass:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    tries = []

    def action() -> int:
        held = Pass()
        tries.append(held is not None)
        if len(tries) < 3:
            raise full()
        return len(tries)

    seen: list[int] = []

    def relieve() -> bool:
        return seen.append(len(alive)) is None

    device = simulated("rtx-3060-12gb")
    assert attempt(action, relieve, device, lambda *_: OutOfMemory) == 3  # type: ignore[arg-type]
    assert seen == [0, 0]
