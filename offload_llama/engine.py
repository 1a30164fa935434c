"""What a run works with: the loaded model, its cache, and how it is to be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from offload_llama.cache import KVCache
from offload_llama.device.api import Device
from offload_llama.model import Transformer
from offload_llama.oom import Setup
from offload_llama.planner import MemoryPlan
from offload_llama.tokenizer.api import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a run works with.

    Attributes:
        prefill_chunk: the most prompt tokens in one forward pass.
        fallback: move layers to the host when the card's memory runs out, rather than fail.
        preempt: where that is not enough, let the youngest of several sequences wait.
        notify: is told in one line when a sequence has to.
        plan: what was planned, to be shown beside what a run came to; None where nothing was.
        kept: the ids of sequences that stay in the cache between two runs, by their row.
    """

    model: Transformer
    cache: KVCache
    device: Device
    tokenizer: Tokenizer
    prefill_chunk: int
    fallback: bool = True
    preempt: bool = True
    notify: Callable[[str], None] = lambda line: None
    plan: MemoryPlan | None = None
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def setup(self) -> Setup:
        """What takes memory of the card, for the report when it runs out."""
        weights = list(self.model.buffers())
        return Setup(
            device=self.device.name,
            weights_bytes=sum(w.numel() * w.element_size() for w in weights),
            weights_itemsize=max(
                (w.element_size() for w in weights if w.is_floating_point()), default=0
            ),
            prefill_chunk=self.prefill_chunk,
            fallback=self.fallback,
        )

    def close_cache(self) -> None:
        """Give the cache's memory back."""
        with self.device.scope():
            self.cache.close()
