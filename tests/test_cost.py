"""The cost model against the simulated card, which sizes and times its own operands."""

from __future__ import annotations

import ast
import csv
import itertools
from pathlib import Path

import pytest

import offload_llama
from offload_llama.cost import Setup, decode_seconds, n_parameters
from offload_llama.cost.memory import device_terms, tensor_bytes
from offload_llama.cost.packing import PACKED
from offload_llama.cost.setup import weights_bytes
from offload_llama.errors import ConfigError
from offload_llama.geometry import choose_geometry, resident_rows
from offload_llama.planner import spread
from tests.helpers_model import tiny_config
from tests.helpers_plan import LLAMA_8B, SMOLLM2_1_7B, ShapeRun, setup_for

PACKAGE = Path(offload_llama.__file__).parent
CONTEXTS = (512, 2048, 6000, 12000)


def test_the_simulated_card_uses_neither_cost_nor_planner() -> None:
    for path in (PACKAGE / "device").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith(("offload_llama.cost", "offload_llama.planner")), path


@pytest.mark.parametrize("card", ["rtx-3060-12gb", "rtx-4060", "rtx-5070"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_decode_step_takes_what_was_predicted_within_5_percent(card: str, share: float) -> None:
    setup = setup_for(SMOLLM2_1_7B, ctx=CONTEXTS[-1] + 64, prefill_chunk=4096)
    hosts = spread(24, round(24 * share))
    run = ShapeRun(setup, f"{card}?vram=64GiB", hosts)
    for context in CONTEXTS:
        run.fill(0, context)
        run.decode(2)
        measured_s = run.decode(4)
        predicted_s = decode_seconds(setup, run.device.card.profile, hosts, context + 4)
        assert predicted_s == pytest.approx(measured_s, rel=0.05), context


@pytest.mark.parametrize(("share", "batch"), [(0.25, 1), (1.0, 2)])
def test_grouped_heads_and_batches_are_predicted_too(share: float, batch: int) -> None:
    setup = setup_for(LLAMA_8B, ctx=6000, batch=batch, prefill_chunk=4096)
    hosts = spread(32, round(32 * share))
    run = ShapeRun(setup, "rtx-3060-12gb?vram=64GiB", hosts)
    for context in (700, 5000):
        for row in range(batch):
            run.fill(row, context)
        run.decode(2)
        measured_s = run.decode(3)
        predicted_s = decode_seconds(setup, run.device.card.profile, hosts, context + 4)
        assert predicted_s == pytest.approx(measured_s, rel=0.05), context


@pytest.mark.parametrize(
    ("dtype", "card", "n_host"),
    list(itertools.product(("float32", "float16"), ("rtx-3060-12gb", "rtx-2060-12gb"), (0, 2, 4))),
)
def test_the_peak_of_a_tiny_model_is_planned_to_the_block(
    dtype: str, card: str, n_host: int
) -> None:
    """Every kernel the engine chooses: flash, and the memory-efficient one with its padding."""
    config = tiny_config(n_kv_heads=2, n_heads=4, head_dim=16, dim=64)
    setup = setup_for(config, dtype, ctx=700, batch=2, prefill_chunk=128)
    hosts = spread(4, n_host)
    run = ShapeRun(setup, card, hosts)
    terms, _ = device_terms(setup, run.device.card.profile, n_host)
    assert terms["weights"] == run.device.memory().allocated_bytes - terms["ring"]
    for row in (0, 1):
        fill_in_chunks(run, row, 698)
    run.decode()
    run.cache.truncate(1, 512)
    fill_in_chunks(run, 1, 699)
    run.decode()
    planned, peak = tensor_bytes(terms), run.device.memory().peak_bytes
    assert peak <= planned <= 1.05 * peak


def fill_in_chunks(run: ShapeRun, row: int, n_tokens: int) -> None:
    chunk = run.setup.prefill_chunk
    have = run.cache.lengths[row]
    for stop in (*range(have + chunk, n_tokens, chunk), n_tokens):
        run.fill(row, stop)


def test_weights_are_counted_tensor_by_tensor() -> None:
    run = ShapeRun(setup_for(SMOLLM2_1_7B, ctx=64), "rtx-3060-12gb", [False] * 24)
    held = run.device.memory().allocated_bytes
    assert weights_bytes(run.setup) == held


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("card", ["rtx-3060-12gb", "rtx-2060-12gb"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_counted_to_the_byte(weights: str, card: str, tied: bool) -> None:
    """By the card's own kernel, and by the portable one; also where the output is the embedding."""
    config = tiny_config(dim=192, head_dim=48, hidden_dim=320, vocab_size=1000, tied_output=tied)
    setup = setup_for(config, "float16", weights=weights, ctx=64)
    run = ShapeRun(setup, card, [False] * 4)
    profile = run.device.card.profile
    assert weights_bytes(setup, profile) == run.device.memory().allocated_bytes


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    ("card", "dtype"),
    [("rtx-3060-12gb", "bfloat16"), ("rtx-3060-12gb", "float16"), ("rtx-2060-12gb", "float16")],
)
def test_the_peak_of_a_packed_model_is_planned_with_its_scratch(
    weights: str, card: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable kernel's scratch is a part of it, in several blocks of rows."""
    for module in ("cost.tape", "weights.kernels"):
        monkeypatch.setattr(f"offload_llama.{module}.block_rows", lambda columns: 96)
    config = tiny_config(n_kv_heads=2, n_heads=4, head_dim=16, dim=64)
    setup = setup_for(config, dtype, weights=weights, ctx=700, batch=2, prefill_chunk=128)
    run = ShapeRun(setup, card, spread(4, 2))
    terms, _ = device_terms(setup, run.device.card.profile, 2)
    for row in (0, 1):
        fill_in_chunks(run, row, 698)
    run.decode()
    planned, peak = tensor_bytes(terms), run.device.memory().peak_bytes
    assert peak <= planned <= 1.05 * peak


@pytest.mark.parametrize(("weights", "card", "dtype"), [
    ("int8", "rtx-3060-12gb", "bfloat16"),
    ("int4", "rtx-3060-12gb", "bfloat16"),
    ("int4-g32", "rtx-4060", "float16"),
    ("int4", "rtx-2060-12gb", "float16"),
])  # fmt: skip
def test_a_decode_step_of_packed_weights_is_predicted_within_5_percent(
    weights: str, card: str, dtype: str
) -> None:
    setup = setup_for(LLAMA_8B, dtype, weights=weights, ctx=6000, prefill_chunk=4096)
    hosts = spread(32, 8)
    run = ShapeRun(setup, f"{card}?vram=64GiB", hosts)
    run.fill(0, 4000)
    run.decode(2)
    measured_s = run.decode(3)
    predicted_s = decode_seconds(setup, run.device.card.profile, hosts, 4004)
    assert predicted_s == pytest.approx(measured_s, rel=0.05)


def test_parameters_and_cache_bytes_equal_the_published_figures() -> None:
    rows = list(csv.DictReader((PACKAGE / "data/kv_bytes.csv").read_text("utf-8").splitlines()))
    facts = {row["model"]: row for row in rows}
    for name, config in (("Llama-3.1-8B", LLAMA_8B), ("SmolLM2-1.7B", SMOLLM2_1_7B)):
        row = facts[name]
        assert n_parameters(config) / 1e9 == pytest.approx(float(row["params_b"]), rel=0.01)
        for kv_dtype, column in (
            ("fp16", "kv_fp16_B_per_tok"),
            ("int8", "kv_int8_g64_sym_B"),
            ("int4", "kv_int4_g64_asym_B"),
        ):
            setup = Setup(config=config, ctx=64, kv_dtype=kv_dtype)
            assert setup.kv_bytes_per_token == int(row[column]), (name, kv_dtype)


def test_only_the_last_part_of_a_resident_sequence_grows() -> None:
    geometry = choose_geometry(tiny_config(), 4, part_tokens=256)
    assert resident_rows(geometry, 1) == [64]
    assert resident_rows(geometry, 65) == [128]
    assert resident_rows(geometry, 256) == [256]
    assert resident_rows(geometry, 600) == [256, 256, 128]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ctx": 1}, "--ctx 1 is not possible"),
        ({"ctx": 5000}, "allows 2 to 1024 tokens"),
        ({"ctx": 64, "batch": 0}, "--max-batch-size must be 1 or more"),
        ({"ctx": 64, "prefill_chunk": 0}, "--prefill-chunk must be 1 or more"),
        ({"ctx": 64, "weights": "int5"}, "unknown --weights 'int5'"),
        ({"ctx": 64, "kv_dtype": "fp8"}, "unknown --kv-dtype 'fp8'"),
        ({"ctx": 64, "dtype": "half"}, "unknown --dtype 'half'"),
    ],
)
def test_an_impossible_setup_is_refused(wrong: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Setup(config=tiny_config(), **wrong)
