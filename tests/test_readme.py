"""What the README says of cards is what its commands print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_llama.cli import run_command

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("| ").split(" | "))
    for line in README.splitlines()
    if line.endswith("` |") and "`offload-llama plan " in line
]


def test_the_table_of_cards_is_found() -> None:
    assert len(ROWS) >= 8


@pytest.mark.parametrize("row", ROWS, ids=[row[-1] for row in ROWS])
def test_a_row_is_what_its_command_prints(
    row: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    card, model, weights, ctx, on_host, decode_ms, half_ms, quoted = row
    command = quoted.strip("`").removeprefix("offload-llama ")
    assert command.endswith(f"--weights {weights} --ctx {ctx}")
    assert run_command([*command.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    stores = [placement["store"] for placement in plan["placements"]]
    assert (plan["card"], plan["model_name"], plan["fits"]) == (card, model, True)
    assert f"{stores.count('host')} of {len(stores)}" == on_host
    assert f"{plan['predicted']['decode_ms']:.1f}" == decode_ms
    assert f"{plan['predicted']['decode_ms_half']:.1f}" == half_ms
