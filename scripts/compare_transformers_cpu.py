"""Decode and loading on the CPU beside transformers: same file, dtype and threads.

    python scripts/compare_transformers_cpu.py [--model smollm2-135m] [--threads N]

Both load the GGUF file to float32 and decode greedily after the same prompt, in alternating
rounds; figures are medians. Both must choose the same tokens. Needs `transformers` and
`accelerate`. A table, then one JSON object as the last line, in which `decode_ratio` and
`load_ratio` are theirs over ours (above 1: ours is faster).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from offload_llama import LLM

PROMPT = "Once upon a time, in a small village by the sea,"


class Ours:
    """This package: the engine without text, as in transformers' loop below."""

    def __init__(self, path: Path) -> None:
        self._llm = LLM.load(str(path), device="cpu", dtype="float32")
        self._next: list[int] = []

    def prefill(self, ids: list[int]) -> None:
        self._llm.cache.free(0)
        self._forward(ids)

    def _forward(self, ids: list[int]) -> None:
        cache = self._llm.cache
        with cache.step([0], [cache.lengths[0]], [len(ids)]) as step:
            logits = self._llm.model(step.upload(ids), step)
        self._next = logits.argmax(-1).tolist()

    def decode(self) -> int:
        self._forward(self._next)
        return self._next[0]


class Theirs:
    """transformers with its default cache and attention (sdpa)."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()
        self._cache: Any = None
        self._next = torch.empty(0)

    def prefill(self, ids: list[int]) -> None:
        self._cache = None
        self._forward(torch.tensor([ids]))

    def _forward(self, ids: torch.Tensor) -> None:
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self) -> int:
        self._forward(self._next)
        return int(self._next)


def compare(path: Path, rounds: int, n_tokens: int) -> dict[str, Any]:
    """Return medians and ratios; rounds alternate which engine goes first."""
    load_s: dict[str, list[float]] = {"ours": [], "transformers": []}
    engines: dict[str, Ours | Theirs] = {}
    for name, kind in (("ours", Ours), ("transformers", Theirs), ("ours", Ours)):
        start_s = time.perf_counter()
        engines[name] = kind(path)
        load_s[name].append(time.perf_counter() - start_s)
    with LLM.load(str(path), device="cpu") as llm:
        ids = llm.encode(PROMPT)
    step_s: dict[str, list[float]] = {name: [] for name in engines}
    chosen: dict[str, list[int]] = {}
    for i in range(rounds + 1):
        for name in sorted(engines, reverse=i % 2 == 1):
            engine = engines[name]
            engine.prefill(ids)
            tokens = []
            for _ in range(n_tokens):
                start_s = time.perf_counter()
                tokens.append(engine.decode())
                if i > 0:  # the first round warms up
                    step_s[name].append(time.perf_counter() - start_s)
            chosen[name] = tokens
    if chosen["ours"] != chosen["transformers"]:
        raise SystemExit("error: the two engines chose different tokens")
    decode_ms = {name: statistics.median(times) * 1e3 for name, times in step_s.items()}
    load = {name: min(times) for name, times in load_s.items()}
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "decode_ms": decode_ms,
        "decode_ratio": decode_ms["transformers"] / decode_ms["ours"],
        "load_s": load,
        "load_ratio": load["transformers"] / load["ours"],
        "tokens_agree": True,
    }


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a short name")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--threads", type=int, help="torch's threads; its own choice if left out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    from offload_llama.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(options.model)
    path = checkpoint.path
    checkpoint.close()
    with torch.no_grad():
        result = compare(path, options.rounds, options.tokens)
    print(f"{path.name}, float32, {result['machine']}, torch {result['torch']}")
    print(f"{'':<14}{'ours':>9}{'transformers':>14}{'ratio':>7}")
    for label, key, ratio in (
        ("decode, ms", "decode_ms", "decode_ratio"),
        ("loading, s", "load_s", "load_ratio"),
    ):
        ours, theirs = result[key]["ours"], result[key]["transformers"]
        print(f"{label:<14}{ours:>9.2f}{theirs:>14.2f}{result[ratio]:>7.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
