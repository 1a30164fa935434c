"""Runs of shape-only models on simulated cards, for comparison with their plans."""

from __future__ import annotations

from typing import Any

import torch

from offload_llama.cache import KVCache
from offload_llama.checkpoint.shapes import empty_weights
from offload_llama.config import ModelConfig
from offload_llama.cost import SHORT_NAMES, Setup
from offload_llama.cost.packing import PACKED
from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.model import Transformer
from offload_llama.policy import Placement

SMOLLM2_1_7B = ModelConfig(
    dim=2048, n_layers=24, n_heads=32, n_kv_heads=32, head_dim=64, hidden_dim=8192,
    vocab_size=49152, max_seq_len=65536, tied_output=True,
)  # fmt: skip
LLAMA_8B = ModelConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336,
    vocab_size=128256, max_seq_len=131072,
)  # fmt: skip


def setup_for(
    config: ModelConfig, dtype: str = "float16", *, weights: str | None = None, **sizes: Any
) -> Setup:
    """Return a setup whose cache, and weights unless told, are in the dtype computed with."""
    name = SHORT_NAMES[dtype]
    return Setup(config=config, weights=weights or name, kv_dtype=name, dtype=dtype, **sizes)


class ShapeRun:
    """A model and its cache on a card that keeps shapes only."""

    def __init__(self, setup: Setup, card: str, hosts: Any, **options: Any) -> None:
        self.device: SimulatedDevice = simulated(card, values=False)
        self.setup = setup
        dtype = getattr(torch, setup.dtype)
        with self.device.scope():
            self.model = Transformer(setup.config)
            packed = setup.weights if setup.weights in PACKED else None
            empty_weights(self.model, device=self.device, dtype=dtype, weights=packed)
            placements = [
                Placement(layer=layer, store="host" if host else "resident", reason="test")
                for layer, host in enumerate(hosts)
            ]
            self.cache = KVCache(
                setup.config, self.device, placements, dtype=dtype, max_batch_size=setup.batch,
                max_seq_len=setup.ctx, **options,
            )  # fmt: skip

    def fill(self, row: int, n_tokens: int) -> None:
        """Bring a row to this many tokens in one pass that computes no logits."""
        have = self.cache.lengths[row]
        new = n_tokens - have
        with (
            self.device.scope(),
            torch.no_grad(),
            self.cache.step([row], [have], [new], "none") as step,
        ):
            self.model(step.upload([0] * new), step)

    def decode(self, times: int = 1) -> float:
        """Decode tokens of all rows and return the seconds of one step."""
        rows = list(range(self.setup.batch))
        with self.device.scope(), torch.no_grad():
            began_s = self.device.clock()
            for _ in range(times):
                with self.cache.step(rows, list(self.cache.lengths), [1] * len(rows)) as step:
                    logits = self.model(step.upload([0] * len(rows)), step)
                assert logits is not None
                best, ids = logits.max(dim=-1)
                torch.where(best.isfinite(), ids, -1).cpu().tolist()
            return (self.device.clock() - began_s) / times
