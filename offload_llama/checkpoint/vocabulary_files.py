"""A model's vocabulary beside weights that are saved anew."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from offload_llama.checkpoint.gguf_header import MAGIC, read_header

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "config.json", "params.json",
)  # fmt: skip
GGUF_VOCABULARY = "vocabulary.gguf"


def copy_vocabulary(model: Path, folder: Path) -> None:
    """Copy what a tokenizer is made of; from a GGUF file its metadata, without tensors.

    Raises:
        OSError: a file cannot be read or written.
    """
    if model.is_file():
        _copy_gguf_metadata(model, folder / GGUF_VOCABULARY)
        return
    for name in _FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    for path in model.glob("*.gguf"):  # a model that was saved like this before
        shutil.copyfile(path, folder / path.name)
    # Meta's layout has one vocabulary beside the folders of all sizes, or above `original`.
    for place in ("original/tokenizer.model", "../tokenizer.model"):
        if not (folder / "tokenizer.model").exists() and (model / place).is_file():
            if place.startswith("..") and not (model / "params.json").is_file():
                continue
            shutil.copyfile(model / place, folder / "tokenizer.model")


def _copy_gguf_metadata(source: Path, target: Path) -> None:
    header = read_header(source)
    with source.open("rb") as file:
        head = file.read(header.metadata_end)
    version, _, n_keys = struct.unpack_from("<IQQ", head, len(MAGIC))
    start = MAGIC + struct.pack("<IQQ", version, 0, n_keys)
    target.write_bytes(start + head[len(start) :])
