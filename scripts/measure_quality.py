"""What packed weights cost in quality: perplexity, KL divergence and agreement beside float32.

    python scripts/measure_quality.py [--model smollm2-135m] [--weights int8,int4,int4-g32]
        [--windows 8] [--chunk 32] [--text tests/data/alice29.txt]

The text is cut into windows of 512 tokens, and each is read from its beginning by the model in
float32 and by the same model with packed weights. Perplexity is e to the mean loss of the next
token; KL is the mean divergence of the packed model's distribution from float32's, in nats; top-1
is how often both hold the same token for the likeliest. With `--chunk` below 64 the kernels that
decode are measured; above, a prompt's. A table, then one JSON object as the last line. The exit
code is 0 only if int8 is within 1 % of float32's perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from offload_llama import LLM
from offload_llama.cost.packing import PACKED

WINDOW = 512
TEXT = Path(__file__).parent.parent / "tests" / "data" / "alice29.txt"
MOST_INT8_LOSS = 0.01


class Sums:
    """Loss, divergence and agreement, summed over tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.loss = self.divergence = self.agreed = 0.0

    def add(self, logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> None:
        """Count the predictions of `targets` (n,) by logits and by float32's, each (n, vocab)."""
        ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
        self.tokens += len(targets)
        self.loss += F.nll_loss(ours, targets, reduction="sum").item()
        self.divergence += F.kl_div(ours, theirs, reduction="sum", log_target=True).item()
        self.agreed += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()

    def result(self) -> dict[str, float]:
        """Return the means."""
        return {
            "perplexity": math.exp(self.loss / self.tokens),
            "kl": self.divergence / self.tokens,
            "top1": self.agreed / self.tokens,
        }


def logits_of(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Return the logits behind each of the new tokens, (n, vocab); the first ones empty the row."""
    cache = llm.cache
    with cache.step([0], [cache.lengths[0]], [len(ids)], "all") as step:
        logits = llm.model(step.upload(ids), step)
    assert isinstance(logits, torch.Tensor)
    return logits


def measure(model: str, names: list[str], text: str, n_windows: int, chunk: int) -> dict[str, Any]:
    """Return the figures by name of the weights, float32's first."""
    engines = {
        name: LLM.load(model, device="cpu", dtype="float32", weights=name, ctx=WINDOW)
        for name in ("fp32", *names)
    }
    ids = engines["fp32"].encode(text)
    sums = {name: Sums() for name in engines}
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][:n_windows]
    for window in windows:
        for llm in engines.values():
            llm.cache.free(0)
        for start in range(0, WINDOW - 1, chunk):
            new = window[start : min(start + chunk, WINDOW - 1)]
            targets = torch.tensor(window[start + 1 : start + 1 + len(new)])
            exact = logits_of(engines["fp32"], new)
            for name, llm in engines.items():
                logits = exact if name == "fp32" else logits_of(llm, new)
                sums[name].add(logits, exact, targets)
    figures: dict[str, Any] = {name: found.result() for name, found in sums.items()}
    best = figures["fp32"]["perplexity"]
    for name, llm in engines.items():
        figures[name]["loss"] = figures[name]["perplexity"] / best - 1
        buffers = llm.model.buffers()
        figures[name]["weights_bytes"] = sum(b.numel() * b.element_size() for b in buffers)
        llm.close()
    return {"model": model, "tokens": sums["fp32"].tokens, "chunk": chunk, "weights": figures}


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="as offload-llama takes it")
    parser.add_argument("--weights", default=",".join(PACKED), help="by commas")
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens")
    parser.add_argument("--chunk", type=int, default=32, help="tokens in one pass")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file of plain text")
    parser.add_argument("--threads", type=int, help="torch's threads; its own choice if left out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    names = options.weights.split(",")
    if not set(names) <= set(PACKED):
        parser.error(f"--weights takes {', '.join(PACKED)}, got {options.weights}")
    text = options.text.read_text("utf-8")
    with torch.no_grad():
        result = measure(options.model, names, text, options.windows, options.chunk)
    print(f"{options.model}, {result['tokens']:,} tokens of {options.text.name}")
    print(f"{'weights':<10}{'MB':>7}{'perplexity':>12}{'loss':>9}{'KL':>9}{'top-1':>8}")
    for name, found in result["weights"].items():
        print(
            f"{name:<10}{found['weights_bytes'] / 1e6:>7.0f}{found['perplexity']:>12.3f}"
            f"{found['loss']:>9.2%}{found['kl']:>9.4f}{found['top1']:>8.1%}"
        )
    print(json.dumps(result))
    if result["weights"].get("int8", {"loss": 0.0})["loss"] > MOST_INT8_LOSS:
        raise SystemExit("error: int8 loses more than 1 % of perplexity")


if __name__ == "__main__":
    main()
