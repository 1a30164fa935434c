"""What every checkpoint reader gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from offload_llama.config import ModelConfig


class TensorSource(Protocol):
    """One tensor that still lies on disk, read some rows at a time.

    `shape` is the whole tensor's; a row is one index of its first axis. `n_bytes` is what it
    takes on disk. `dtype` is what `rows` gives: the file's floating dtype, or float32 where the
    file is quantised.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def n_bytes(self) -> int: ...

    @property
    def row_step(self) -> int:
        """Rows are asked for from multiples of this (a head's rows move as one)."""
        ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) on the CPU, in memory of their own.

        Raises:
            CheckpointError: the file is damaged.
        """
        ...


class Checkpoint(Protocol):
    """One model on disk.

    Tensor names are Meta's: `tok_embeddings.weight`, `layers.N.attention.{wq,wk,wv,wo}.weight`,
    `layers.N.feed_forward.{w1,w2,w3}.weight`, `layers.N.{attention_norm,ffn_norm}.weight`,
    `norm.weight`, and `output.weight` unless `config.tied_output`. Rows of wq and wk are in
    Meta's order (rotary pairs interleaved). Matrices are (out_features, in_features).

    `path` is the folder or the .gguf file, `format` is "meta", "hf" or "gguf". `sources` holds
    the tensors in file order, unread. `stop_token_ids` are what the model's own files say ends a
    text (generation config, metadata); they may be empty. `weights` is what the matrices were
    saved in by `quantize_checkpoint` ("int4"), else None, and `format` is then "packed".
    """

    path: Path
    format: str
    config: ModelConfig
    stop_token_ids: tuple[int, ...]
    sources: Mapping[str, TensorSource]
    weights: str | None

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        ...

    def n_bytes(self) -> int:
        """Return the bytes of all tensors as they lie on disk (for progress bars)."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield (name, tensor, bytes on disk), one at a time, in file order.

        Each tensor is on the CPU, in its source's dtype and in memory of its own. The loader
        reads `sources` by rows instead, which never holds a whole tensor twice.

        Raises:
            CheckpointError: a file is damaged.
        """
        ...

    def close(self) -> None:
        """Release the files; `sources` is empty from then on."""
        ...
