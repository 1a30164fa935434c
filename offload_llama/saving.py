"""The `quantize` command: a model into a folder, in fewer bits."""

from __future__ import annotations

from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.quantize import quantize_checkpoint
from offload_llama.console import Console
from offload_llama.hardware import format_bytes


def save_packed(source: str, target: str, *, weights: str, console: Console) -> int:
    """Save a model with packed weights, say what it takes now, and return the exit code.

    Raises:
        CheckpointError: the model cannot be read, or the folder not written.
        ConfigError: the model's weights cannot be packed so.
    """
    folder = quantize_checkpoint(source, target, weights=weights, progress=console.shows_progress)
    checkpoint = open_checkpoint(folder)
    size = format_bytes(checkpoint.n_bytes())
    checkpoint.close()
    console.say(
        f"{folder}: weights in {weights}, {size}; run it with "
        f"offload-llama generate --model {folder}"
    )
    return 0
