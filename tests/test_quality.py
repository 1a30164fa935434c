"""How the quality of packed weights is measured, and what it is on the real model."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_quality.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_figures_are_those_of_their_definitions(script: dict[str, Any]) -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    sums = script["Sums"]()
    # In two pieces, as passes come; logits may be off by a constant.
    for i in range(2):
        sums.add(ours[i : i + 1].log() + 3, exact[i : i + 1].log(), torch.tensor([i]))
    found = sums.result()
    assert found["perplexity"] == pytest.approx(math.exp(-(math.log(0.25) + math.log(0.8)) / 2))
    assert found["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found["top1"] == 0.5


def test_the_text_is_prose_that_anyone_may_keep() -> None:
    text = (Path(__file__).parent / "data" / "alice29.txt").read_text("ascii")
    assert "Alice was beginning to get very tired of sitting by her sister" in text


@pytest.mark.slow
def test_8_bits_and_4_in_the_model_s_own_groups_lose_less_than_1_percent(
    script: dict[str, Any],
) -> None:
    """The default model's matrices were 4-bit in groups of 32; groups of 64 lose a lot there."""
    text = script["TEXT"].read_text("ascii")
    names = ["int8", "int4", "int4-g32"]
    found = script["measure"]("smollm2-135m", names, text, 3, 32)["weights"]
    assert found["fp32"]["kl"] == 0 and 20 < found["fp32"]["perplexity"] < 30
    assert abs(found["int8"]["loss"]) < 0.01 and found["int8"]["kl"] < 0.01
    assert abs(found["int4-g32"]["loss"]) < 0.01 and found["int4-g32"]["kl"] < 0.005
    assert 0.1 < found["int4"]["loss"] < 0.4
