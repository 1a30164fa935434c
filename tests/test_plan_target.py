"""Which card a plan is for, in which numbers, and what a run on it teaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offload_llama.machine
from offload_llama import profiles
from offload_llama.console import Console
from offload_llama.errors import ConfigError, DeviceError
from offload_llama.hardware import card
from offload_llama.machine import CardFacts, Facts
from offload_llama.options.kinds import mixed
from offload_llama.report.learn import beyond_plan, learn
from offload_llama.report.question import numbers, tokens_word
from offload_llama.report.target import find_target, plain_size

GIB = 2**30
RTX_3060 = CardFacts(
    title="NVIDIA GeForce RTX 3060",
    vendor="NVIDIA",
    total_bytes=12 * GIB,
    used_bytes=GIB,
)
ARC = CardFacts(title="Intel(R) Arc(TM) B580 Graphics", vendor="Intel", total_bytes=12 * GIB)

Cards = Callable[..., None]


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """A function that puts cards into this computer."""

    def install(*found: CardFacts) -> None:
        facts = Facts(system="Linux", cards=found)
        monkeypatch.setattr(offload_llama.machine, "gather", lambda: facts)

    return install


def test_the_card_in_this_computer_is_taken_with_what_others_left_free(cards: Cards) -> None:
    cards(RTX_3060)
    target = find_target(gpu=None, vram_bytes=None, ram_bytes=None)
    assert target.profile == card("rtx-3060-12gb")
    assert target.free_bytes == 11 * GIB and target.options == ()
    assert target.ram_bytes is not None and target.ram_bytes > 0
    assert target.note is not None and "others hold 1 GiB" in target.note
    assert target.key == profiles.key_of(RTX_3060.title)


def test_what_was_measured_on_the_card_here_goes_before_its_preset(cards: Cards) -> None:
    cards(RTX_3060)
    measured = profiles.measured_now({"h2d_bytes_per_s": 9e9})
    profiles.save_measured(profiles.key_of(RTX_3060.title), measured)
    target = find_target(gpu=None, vram_bytes=None, ram_bytes=None)
    assert target.profile.h2d_bytes_per_s == 9e9
    assert target.note is not None and "with figures measured here" in target.note


@pytest.mark.parametrize(
    ("device", "chip"),
    [("auto", "GA106"), ("cuda", "GA106"), ("cuda:0", "GA106"), ("xpu", "BMG-G21")],
)
def test_the_device_says_which_card_of_several(device: str, chip: str, cards: Cards) -> None:
    cards(RTX_3060, ARC)
    target = find_target(gpu=None, device=device, vram_bytes=None, ram_bytes=None)
    assert target.profile.chip == chip


@pytest.mark.parametrize("device", ["cuda:1", "xpu:1", "cuda"])
def test_a_card_that_is_not_here_is_refused(device: str, cards: Cards) -> None:
    cards(*([] if device == "cuda" else [RTX_3060, ARC]))
    with pytest.raises(DeviceError, match=f"no card for --device {device} in this computer; --gpu"):
        find_target(gpu=None, device=device, vram_bytes=None, ram_bytes=None)


def test_less_may_be_used_of_the_card_here_and_of_the_host(cards: Cards) -> None:
    cards(RTX_3060)
    target = find_target(gpu=None, device="cuda", vram_bytes=8 * GIB, ram_bytes=4 * GIB)
    assert (target.free_bytes, target.ram_bytes) == (8 * GIB, 4 * GIB)
    assert target.options == ("--device", "cuda", "--vram", "8GiB")
    almost = find_target(gpu=None, device="cuda", vram_bytes=12 * GIB, ram_bytes=None)
    assert almost.free_bytes == 11 * GIB  # no more than is there
    with pytest.raises(ConfigError, match="leave --vram out, or name a larger card"):
        find_target(gpu=None, device="cuda", vram_bytes=16 * GIB, ram_bytes=None)


@pytest.mark.parametrize(
    ("vram", "slug"),
    [
        (6 * GIB, "rtx-2060"),
        (8 * 10**9, "rtx-4060"),
        (10 * GIB, "rtx-3080"),
        (12 * GIB, "rtx-3060-12gb"),
    ],
)
def test_a_size_alone_gets_the_speed_of_a_common_card(vram: int, slug: str) -> None:
    target = find_target(gpu=None, vram_bytes=vram, ram_bytes=None)
    assert target.profile.slug == slug and target.free_bytes == vram
    assert target.note is not None and "--gpu NAME names the card" in target.note
    assert target.options == ("--vram", plain_size(vram))


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(8 * GIB, "8GiB"), (8 * 10**9, "8GB"), (512 * 2**20, "512MiB"), (12345, "12345")],
)
def test_a_size_is_written_so_that_it_is_read_back_exactly(n_bytes: int, text: str) -> None:
    from offload_llama.hardware import parse_bytes

    assert plain_size(n_bytes) == text and parse_bytes(text) == n_bytes


def test_tokens_are_written_as_they_are_typed() -> None:
    assert [tokens_word(n) for n in (32768, 1024, 1000, 1025)] == ["32k", "1k", "1000", "1025"]


@pytest.mark.parametrize(
    ("asked", "settled"),
    [
        (("auto", "auto", "auto"), ("bf16", "bf16", "bfloat16")),
        (("fp16", "auto", "auto"), ("fp16", "fp16", "float16")),
        (("auto", "fp32", "auto"), ("fp32", "fp32", "float32")),
        (("int4", "auto", "auto"), ("int4", "bf16", "bfloat16")),
        (("int4", "int8", "float16"), ("int4", "int8", "float16")),
        (("q4_k", "fp16", "auto"), ("q4_k", "fp16", "float16")),
    ],
)
def test_what_is_not_said_follows_what_is(
    asked: tuple[str, str, str], settled: tuple[str, str, str]
) -> None:
    assert numbers(*asked, card("rtx-4060")) == settled


def test_a_card_without_bf16_is_planned_in_fp16() -> None:
    assert numbers("auto", "auto", "auto", card("rtx-2060")) == ("fp16", "fp16", "float16")
    assert mixed("fp16", "auto", "bf16") == "--weights fp16 with --dtype bf16"


# What a run teaches


def fake_device(**settings: Any) -> Any:
    memory = SimpleNamespace(peak_bytes=3 * GIB, free_bytes=6 * GIB)
    return SimpleNamespace(memory=lambda: memory, close=lambda: None, **settings)


PLAN = SimpleNamespace(available_bytes=10 * GIB, device_bytes={"overhead": GIB // 2})


def test_what_a_run_took_beyond_its_plan_leaves_out_the_tensors() -> None:
    # 4 GiB are gone, 3 of them tensors at most; half of the last one was planned.
    assert beyond_plan(PLAN, fake_device()) == GIB // 2  # type: ignore[arg-type]


def test_learning_keeps_what_the_runtime_took_for_later_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cards: Cards
) -> None:
    import offload_llama.device
    import offload_llama.device.figures

    device = fake_device(offloads=True, simulated=False)
    prompts = []

    class FakeLLM:
        plan = PLAN
        cache = SimpleNamespace(max_seq_len=100)

        def __init__(self) -> None:
            self.device = device

        def generate(self, given: list[list[int]], params: Any) -> None:
            prompts.extend(given)
            assert (params.max_tokens, params.ignore_eos) == (8, True)

        def __enter__(self) -> FakeLLM:
            return self

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(offload_llama.device, "open_device", lambda name: device)
    monkeypatch.setattr(offload_llama.device.figures, "card_title", lambda _: RTX_3060.title)
    assert learn(FakeLLM, "cuda", Console()) == 0  # type: ignore[arg-type]
    assert [len(prompt) for prompt in prompts] == [92]
    assert "took 1 GiB beside the tensors, 512 MiB were planned" in capsys.readouterr().out
    cards(RTX_3060)
    target = find_target(gpu=None, vram_bytes=None, ram_bytes=None)
    assert target.profile.learnt_bytes == GIB // 2


@pytest.mark.parametrize("kind", [{"offloads": False}, {"simulated": True}])
def test_only_a_real_card_teaches(kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    import offload_llama.device

    device = fake_device(**{"offloads": True, "simulated": False, **kind})
    monkeypatch.setattr(offload_llama.device, "open_device", lambda name: device)

    def load() -> Any:
        raise AssertionError("no model is loaded for it")

    with pytest.raises(ConfigError, match="--learn measures a real card"):
        learn(load, "auto", Console())
