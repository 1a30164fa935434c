"""Host memory while loading: what a model adds at its peak, and the warning beforehand."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch

from offload_llama.checkpoint import load as load_module
from offload_llama.checkpoint.load import check_host_memory
from offload_llama.config import ModelConfig
from offload_llama.errors import DoesNotFit
from offload_llama.machine import host_memory_available
from offload_llama.model import Transformer
from tests.helpers_checkpoint import State, gguf_name, hf_name, save_as_gguf, save_as_meta

# 2 layers of width 1024 and a vocabulary of 24,000: 75 M values, the largest tensor 24.6 M.
BIG = ModelConfig(
    dim=1024, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=128, hidden_dim=4096, vocab_size=24000
)
SHAPES = Transformer(BIG).expected_tensors()
N_VALUES = sum(math.prod(shape) for shape in SHAPES.values())
LARGEST_VALUES = 24000 * 1024
MIB = 2**20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The same sizes in each format: 150 MB of bfloat16, or 80 MB of Q8_0."""
    folder = tmp_path_factory.mktemp("big")
    yield {"meta": _big_meta(folder), "hf": _big_hf(folder), "gguf": _big_gguf(folder)}
    shutil.rmtree(folder)


def _big_state() -> State:
    return {n: torch.full(s, 0.5, dtype=torch.bfloat16) for n, s in SHAPES.items()}


def _big_meta(folder: Path) -> Path:
    return save_as_meta(_big_state(), BIG, folder / "meta", 2)


def _big_hf(folder: Path) -> Path:
    """Four safetensors files, written by hand: names are all that must be right."""
    target = folder / "hf"
    target.mkdir()
    settings = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": BIG.dim,
        "num_hidden_layers": BIG.n_layers, "num_attention_heads": BIG.n_heads,
        "num_key_value_heads": BIG.n_kv_heads, "intermediate_size": BIG.hidden_dim,
        "vocab_size": BIG.vocab_size,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(settings))
    weight_map = {}
    names = list(SHAPES)
    for index in range(4):
        file = f"model-{index}.safetensors"
        header, at = {}, 0
        for name in names[index::4]:
            n_bytes = 2 * math.prod(SHAPES[name])
            header[hf_name(name)] = {
                "dtype": "BF16", "shape": SHAPES[name], "data_offsets": [at, at + n_bytes]
            }  # fmt: skip
            weight_map[hf_name(name)] = file
            at += n_bytes
        text = json.dumps(header).encode()
        with (target / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _ in range(0, at, 2 * MIB):
                out.write(b"\x00\x3f" * MIB)
            out.truncate(8 + len(text) + at)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def _big_gguf(folder: Path) -> Path:
    path = folder / "big.gguf"
    state = {n: torch.full(s, 0.5) for n, s in SHAPES.items() if len(s) == 1}
    original = gguf.GGUFWriter.write_header_to_file

    def add_then_write(writer: Any, *args: Any) -> None:
        for name, shape in SHAPES.items():
            if len(shape) == 2:
                blocks = np.full((shape[0], shape[1] // 32 * 34), 0x30, np.uint8)
                writer.add_tensor(gguf_name(name), blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        original(writer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_then_write)
        return save_as_gguf(state, BIG, path)


MEASURE = """
import contextlib, re, sys
import torch
from offload_llama.checkpoint.load import load_weights
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.device import DeviceMemory
from offload_llama.device import PinRefused, open_device
from offload_llama.model import Transformer

path, where, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
weights = None if sys.argv[4] == "plain" else sys.argv[4]


class Card:
    # Its tensors take no host memory, so what is measured is the loader's own.
    torch_device, offloads, simulated = torch.device("meta"), True, False
    scope = staticmethod(contextlib.nullcontext)

    name = "a card with room"

    @staticmethod
    def memory():
        return DeviceMemory(0, 0, 1 << 40, 1 << 40)

    @staticmethod
    def pinned_empty(shape, dtype):
        return torch.empty(shape, dtype=dtype)


def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024


device = open_device("cpu") if where == "cpu" else Card()
torch.ones(8, 64) @ torch.ones(64, 8)
checkpoint = open_checkpoint(path)
model = Transformer(checkpoint.config)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts again from VmRSS
before = memory("VmRSS")
load_weights(
    model, checkpoint, device=device, dtype=dtype, progress=False, weights=weights
)
print(memory("VmHWM") - before, sum(b.numel() * b.element_size() for b in model.buffers()))
"""


def peak_and_final_bytes(path: Path, where: str, dtype: str, weights: str) -> tuple[int, int]:
    """Return the resident bytes that loading added at its peak, and those of the weights.

    In a process of its own.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), where, dtype, weights],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, final = map(int, done.stdout.split())
    return peak, final


def peak_bytes(path: Path, where: str, dtype: str) -> int:
    """Return the resident bytes that loading plain weights added at its peak."""
    return peak_and_final_bytes(path, where, dtype, "plain")[0]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's VmHWM")
@pytest.mark.parametrize("layout", ["meta", "hf", "gguf"])
class TestHostMemory:
    """B38, at a reduced size: the model's bytes are held once, or not at all."""

    def test_loading_to_a_card_holds_a_few_pieces(self, layout: str, big: dict[str, Path]) -> None:
        """Far below the bound of one tensor and 256 MiB, and below the weights."""
        peak = peak_bytes(big[layout], "card", "float16")
        assert peak <= 112 * MIB < 2 * N_VALUES

    def test_loading_to_the_cpu_holds_the_weights_once(
        self, layout: str, big: dict[str, Path]
    ) -> None:
        """bfloat16 or Q8_0 on disk to float16 in memory."""
        weights_bytes = 2 * N_VALUES
        peak = peak_bytes(big[layout], "cpu", "float16")
        assert 0.9 * weights_bytes <= peak <= 1.1 * weights_bytes + 2 * LARGEST_VALUES

    @pytest.mark.parametrize("weights", ["int8", "int4"])
    def test_packing_while_loading_adds_no_more_than_the_largest_tensor(
        self, weights: str, layout: str, big: dict[str, Path]
    ) -> None:
        """At most 1.3 times the packed weights, and the largest tensor as it lies in the file."""
        peak, final = peak_and_final_bytes(big[layout], "cpu", "float32", weights)
        assert final < 1.1 * N_VALUES
        assert 0.9 * final <= peak <= 1.3 * final + 2 * LARGEST_VALUES


def test_preflight_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """B38: refused with numbers, instead of being killed."""
    monkeypatch.setattr(load_module, "host_memory_available", lambda: 3 * 2**30)
    check_host_memory(3 * 2**30)
    with pytest.raises(DoesNotFit, match=r"5\.00 GiB.*3\.00 GiB.*--dtype") as caught:
        check_host_memory(5 * 2**30)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5 * 2**30, 3 * 2**30)


def test_available_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B38: a container's limit counts, its cached file pages do not."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    group = tmp_path / "sys/fs/cgroup/user/app"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user/app\n")
    assert host_memory_available(tmp_path) == 10**12
    for folder, limit, usage in ((group, "max", 5000), (group.parent, "9000", 7000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 1500\n")
    assert host_memory_available(tmp_path) == 9000 - 7000 + 1500
    (group / "memory.max").write_text("5100\n")
    assert host_memory_available(tmp_path) == 5100 - 5000 + 1500


def test_available_memory_knows_the_older_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    group = tmp_path / "sys/fs/cgroup/memory/app"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/app\n3:memory:/app\n")
    (group / "memory.limit_in_bytes").write_text("4000\n")
    (group / "memory.usage_in_bytes").write_text("1000\n")
    (group / "memory.stat").write_text("total_inactive_file 200\n")
    assert host_memory_available(tmp_path) == 3200


def test_available_memory_respects_an_address_space_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B38."""
    resource = pytest.importorskip("resource")
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 50 * MIB, 0))
    assert 0 <= host_memory_available(tmp_path) <= 60 * MIB
