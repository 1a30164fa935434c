"""Decode beside transformers' offloaded cache, on the same simulated card and shapes.

    python scripts/compare_transformers_sim.py [--tokens 4096,16384] [--card rtx-3060-12gb]

SmolLM2-1.7B shapes in fp16, every layer's cache in host memory, shapes only: no weights are needed
and no values are computed. All times and byte counts are *simulated*. Both engines run the fused
attention kernel, timed alike from its operands. A table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch

from offload_llama.cache import KVCache
from offload_llama.config import ModelConfig
from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.model import Transformer
from offload_llama.policy import place

SMOLLM2_1_7B = ModelConfig(
    dim=2048, n_layers=24, n_heads=32, n_kv_heads=32, head_dim=64, hidden_dim=8192,
    vocab_size=49152, max_seq_len=131072, rope_theta=130000.0, tied_output=True,
)  # fmt: skip


def ours(device: SimulatedDevice, n_tokens: int, n_steps: int, policy: str) -> dict[str, float]:
    """Return ms and bytes per decode step of this package at n_tokens of context."""
    config = SMOLLM2_1_7B
    with device.scope():
        model = Transformer(config)
        for name, shape in model.expected_tensors().items():
            weight = torch.empty(shape, dtype=torch.float16, device=device.torch_device)
            model.set_tensor(name, weight)
        model.tie_output()
        cache = KVCache(
            config, device, place(policy, config.n_layers), dtype=torch.float16,
            max_batch_size=1, max_seq_len=n_tokens + n_steps + 1,
        )  # fmt: skip
        for first in range(0, n_tokens, 512):
            n = min(512, n_tokens - first)
            with cache.step([0], [first], [n], "none") as step:
                model(step.upload([0] * n), step)

        def decode() -> None:
            with cache.step([0], [cache.lengths[0]], [1]) as step:
                logits = model(step.upload([0]), step)
            assert logits is not None
            logits.argmax(-1).tolist()

        decode()
        result = measured(device, decode, n_steps)
        result["new_kv_bytes"] = config.kv_bytes_per_token(2)
        result["flushed_bytes"] = cache.stats().d2h_bytes
        cache.close()
    return result


def theirs(device: SimulatedDevice, n_tokens: int, n_steps: int) -> dict[str, float]:
    """Return the same of transformers' `DynamicCache(offloading=True)`."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    shape = SMOLLM2_1_7B
    config = LlamaConfig(
        hidden_size=shape.dim, intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads, vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_seq_len, tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval().to(torch.float16)
    with device.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for module in model.modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                del module._parameters[name]
                module.register_buffer(name, on_card(weight, device))
            for name, buffer in [*module.named_buffers(recurse=False)]:
                module._buffers[name] = on_card(buffer, device)
        model.lm_head.weight = model.model.embed_tokens.weight
        cache = DynamicCache(offloading=True, config=config)
        tokens = torch.zeros(1, 512, dtype=torch.long, device=device.torch_device)
        positions = torch.arange(n_tokens + 1, device=device.torch_device)[None]

        def forward(first: int, n: int) -> Any:
            return model(
                tokens[:, :n], past_key_values=cache, use_cache=True, logits_to_keep=1,
                position_ids=positions[:, first : first + n],
            )  # fmt: skip

        for first in range(0, n_tokens, 512):
            forward(first, min(512, n_tokens - first))

        def decode() -> None:
            forward(n_tokens, 1).logits[:, -1].argmax(-1).tolist()

        decode()
        return measured(device, decode, n_steps)


def on_card(tensor: torch.Tensor, device: SimulatedDevice) -> torch.Tensor:
    """Return an empty tensor like this one on the card; one that is there already stays."""
    if tensor.device.type == "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device.torch_device)


def measured(device: SimulatedDevice, decode: Any, n_steps: int) -> dict[str, float]:
    """Return ms and link bytes per step over n_steps calls of `decode`."""
    device.synchronize()
    device.card.forget()
    start_s = device.clock()
    for _ in range(n_steps):
        decode()
    device.synchronize()
    return {
        "ms_per_token": (device.clock() - start_s) / n_steps * 1e3,
        "h2d_bytes_per_token": device.card.bytes("h2d") / n_steps,
        "d2h_bytes_per_token": device.card.bytes("d2h") / n_steps,
        "peak_device_bytes": device.card.peak_bytes,
    }


def compare(card: str, n_tokens: int, n_steps: int) -> dict[str, Any]:
    """Return both engines' figures at one context, and how many times faster ours is."""

    def fresh() -> SimulatedDevice:
        # Room for every context: this is about time, and both are on the same card.
        return simulated(f"{card}?vram=64GiB", values=False)

    mine = ours(fresh(), n_tokens, n_steps, "offload")
    resident = ours(fresh(), n_tokens, n_steps, "gpu")
    peer = theirs(fresh(), n_tokens, n_steps)
    return {
        "tokens": n_tokens,
        "ours": mine,
        "ours_resident_ms_per_token": resident["ms_per_token"],
        "transformers": peer,
        "times_faster": peer["ms_per_token"] / mine["ms_per_token"],
    }


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="4096,16384", help="contexts, by comma")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to average over")
    parser.add_argument("--card", default="rtx-3060-12gb", help="a card of the presets")
    options = parser.parse_args()
    print(f"simulated {options.card}, SmolLM2-1.7B shapes, fp16, all layers in host memory")
    print(f"{'context':>8} {'engine':<13} {'ms/token':>9} {'h2d MB':>8} {'d2h MB':>8}")
    results = []
    with torch.no_grad():
        for n_tokens in map(int, options.tokens.split(",")):
            result = compare(options.card, n_tokens, options.steps)
            results.append(result)
            for engine in ("ours", "transformers"):
                row = result[engine]
                print(
                    f"{n_tokens:>8} {engine:<13} {row['ms_per_token']:>9.1f} "
                    f"{row['h2d_bytes_per_token'] / 1e6:>8.1f} "
                    f"{row['d2h_bytes_per_token'] / 1e6:>8.2f}"
                )
            print(f"{n_tokens:>8} ours is {result['times_faster']:.2f} times faster (simulated)")
    print(json.dumps({"simulated": True, "card": options.card, "results": results}))


if __name__ == "__main__":
    main()
