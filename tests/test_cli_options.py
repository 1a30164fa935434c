"""What the options say of a model and of memory, on its way from the command line to the loader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from offload_llama.cli import run_command
from tests.helpers_cli import StubLLM


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OFFLOAD_LLAMA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the loader was given; a stand-in answers."""
    import offload_llama.llm

    settings: dict[str, Any] = {}

    def load(model: str, **others: Any) -> StubLLM:
        settings.update(others, model=model)
        return StubLLM()

    monkeypatch.setattr(offload_llama.llm.LLM, "load", load)
    return settings


def test_model_options_reach_the_loader(given: dict[str, Any]) -> None:
    """B31: --no-pin forces pageable memory."""
    line = "generate hi -q --model a/b --device sim:rtx-3060-12gb --dtype bf16 --kv-policy offload"
    line += " --ctx 99 --max-batch-size 3 --prefill-chunk 7 --chat-template llama-3 --no-pin"
    line += " --reserve 1MiB --ram 2GB --vram 3GiB --no-fallback --weights auto --kv-dtype bf16"
    assert run_command(line.split()) == 0
    notify = given.pop("notify")
    assert callable(notify)
    assert given == {
        "model": "a/b",
        "device": "sim:rtx-3060-12gb",
        "weights": "auto",
        "kv_dtype": "bf16",
        "dtype": "bfloat16",
        "kv_policy": "offload",
        "ctx": 99,
        "max_batch_size": 3,
        "prefill_chunk": 7,
        "reserve_bytes": 2**20,
        "ram_bytes": 2 * 10**9,
        "vram_bytes": 3 * 2**30,
        "fallback": False,
        "plan": None,
        "chat_template": "llama-3",
        "pin": False,
        "progress": False,
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--weights q4_0", "--weights q4_0 is not yet runnable; use fp32, bf16, fp16, int8, int4"),
        ("--weights q4_k", "offload-llama plan smollm2-135m --weights q4_k"),
        ("--kv-dtype int8", "offload-llama plan smollm2-135m --kv-dtype int8"),
        ("--weights fp16 --dtype bf16", "--weights fp16 with --dtype bf16 is not yet runnable"),
        ("--weights fp16 --kv-dtype fp32", "give --dtype alone"),
        ("--plan no-such-file", "save one with: offload-llama plan MODEL --json > plan.json"),
    ],
)
def test_what_cannot_run_yet_is_refused_before_torch_is_needed(
    line: str, words: str, capsys: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    assert run_command(["generate", "hi", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1
    assert given == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"weights": "auto", "dtype": "auto", "kv_policy": "auto", "ctx": None}),
        ("--weights fp16", {"weights": "fp16", "dtype": "float16"}),
        ("--kv-dtype FP32", {"kv_dtype": "fp32", "dtype": "float32"}),
        ("--dtype bfloat16 --weights bf16", {"weights": "bf16", "dtype": "bfloat16"}),
        ("--ctx 4k", {"ctx": 4096}),
        ("--ctx max", {"ctx": None}),
        ("--batch auto", {"max_batch_size": "auto"}),
        ("--batch 3", {"max_batch_size": 3}),
        ("--vram 8GB", {"vram_bytes": 8 * 10**9}),
        ("--vram 8GiB", {"vram_bytes": 8 * 2**30}),
    ],
)
def test_what_options_say_reaches_the_loader_in_plain_values(
    line: str, expected: dict[str, Any], given: dict[str, Any]
) -> None:
    assert run_command(["generate", "hi", "-q", *line.split()]) == 0
    assert {name: given[name] for name in expected} == expected


def saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the name of a file with a plan for the default model."""
    line = ["plan", "smollm2-135m", "--gpu", "rtx-2060", "--ctx", "2k", *options, "--json"]
    assert run_command(line) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    return str(path)


def test_a_saved_plan_settles_what_a_run_is_loaded_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    options = "--weights fp16 --batch 2 --prefill-chunk 64 --kv-policy gpu-layers:20"
    name = saved_plan(tmp_path, capsys, *options.split())
    assert run_command(["generate", "-q", "hi", "--plan", name]) == 0
    expected = {
        "model": "smollm2-135m",
        "ctx": 2048,
        "max_batch_size": 2,
        "prefill_chunk": 64,
        "weights": "fp16",
        "kv_dtype": "fp16",
        "dtype": "float16",
        "kv_policy": "gpu-layers:20",
    }
    assert {key: given[key] for key in expected} == expected
    assert given["plan"] == json.loads(Path(name).read_text())
    same = "--ctx 2k --batch 2 --weights fp16 --dtype float16 --model smollm2-135m"
    assert run_command(["generate", "-q", "hi", "--plan", name, *same.split()]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--ctx 4k", "--ctx 4096 contradicts the plan in"),
        ("--ctx max", "--ctx max contradicts the plan in"),
        ("--batch 2", "--max-batch-size 2 contradicts the plan in"),
        ("--weights fp32", "which has fp16; leave --weights out, or plan again with it"),
        ("--dtype bf16", "--dtype bf16 contradicts"),
        ("--kv-policy offload", "--kv-policy offload contradicts"),
        ("--prefill-chunk 9", "--prefill-chunk 9 contradicts"),
        ("--model llama-3.2-1b", "is for smollm2-135m (dim 576), not for llama-3.2-1b (dim 2048)"),
    ],
)
def test_an_option_that_contradicts_a_saved_plan_is_refused(
    options: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
) -> None:
    name = saved_plan(tmp_path, capsys)
    assert run_command(["generate", "hi", "--plan", name, *options.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and given == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "is no JSON"),
        ([], "is no plan of this version"),
        ({"format": "other"}, "is no plan of this version"),
        ({"ctx": "2048"}, "ctx is missing or damaged"),
        ({"ctx": True}, "ctx is missing or damaged"),
        ({"placements": None}, "placements is missing or damaged"),
        ({"shape": {}}, "its model or dtype is damaged"),
        ({"dtype": "fp8"}, "its model or dtype is damaged"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(
    change: Any,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
) -> None:
    name = saved_plan(tmp_path, capsys)
    data = json.loads(Path(name).read_text())
    if isinstance(change, dict):
        change = data | change
    Path(name).write_text("{" if change is None else json.dumps(change))
    assert run_command(["generate", "hi", "--plan", name]) == 2
    err = capsys.readouterr().err
    assert words in err and "plan MODEL --json > plan.json" in err
    assert err.count("\n") == 1 and given == {}


def test_what_only_a_plan_can_offer_is_no_option_of_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing lossy runs yet, so the flag would change nothing there."""
    assert run_command(["generate", "hi", "--allow-lossy"]) == 2
    assert "No such option" in capsys.readouterr().err
    assert run_command(["plan", "llama-3.2-1b", "--gpu", "rtx-4060", "--allow-lossy"]) == 0
