"""Models in Hugging Face's layout: a folder with `config.json` and safetensors files.

Source: the layout transformers' `save_pretrained` writes for Llama models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from offload_llama.checkpoint.api import TensorSource
from offload_llama.checkpoint.damage import read_json
from offload_llama.checkpoint.hf_config import hf_config, hf_stop_ids
from offload_llama.checkpoint.safetensors_file import read_safetensors
from offload_llama.checkpoint.sources import (
    DataFile,
    FileCheckpoint,
    InterleavedRows,
    PlainRows,
    same_values,
)
from offload_llama.config import ModelConfig
from offload_llama.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_TOP_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_RECOMPUTED = ".rotary_emb.inv_freq"
_ROTATED = (".attention.wq.weight", ".attention.wk.weight")


def meta_name(hf_name: str) -> str:
    """Return Meta's name of a Hugging Face tensor; a name without one comes back as it is."""
    if hf_name in _TOP_NAMES:
        return _TOP_NAMES[hf_name]
    layer, _, leaf = hf_name.removeprefix("model.layers.").partition(".")
    if hf_name.startswith("model.layers.") and layer.isdecimal() and leaf in _LAYER_NAMES:
        return f"layers.{layer}.{_LAYER_NAMES[leaf]}"
    return hf_name


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder.

    Raises:
        CheckpointError: there are none, or the index names files that are not there.
    """
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{folder / INDEX}: no weight_map in it; fetch it again")
        names = sorted(set(map(str, table.values())))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} files named in {INDEX} are missing: "
                f"{', '.join(missing)}"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if list(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: the weights are in pytorch_model.bin files, which are not read; save them "
            "as safetensors (transformers: save_pretrained) or get the repository's safetensors"
        )
    raise CheckpointError(f"{folder}: no weights; looked for {SINGLE} and {INDEX}")


def open_hf(folder: Path) -> FileCheckpoint:
    """Open a model in Hugging Face's layout; no tensor is read yet.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
    """
    settings = read_json(folder / "config.json")
    config = hf_config(folder / "config.json", settings)
    stop_ids = hf_stop_ids(folder, settings)
    files: list[DataFile] = []
    try:
        raw: dict[str, PlainRows] = {}
        for path in weight_files(folder):
            file, tensors = read_safetensors(path)
            files.append(file)
            raw |= tensors
        sources = {
            meta_name(name): source
            for name, source in raw.items()
            if not name.endswith(_RECOMPUTED)
        }
        config = _settle_tie(folder, config, sources)
        return FileCheckpoint(
            folder,
            "hf",
            config,
            stop_ids,
            {name: _in_meta_order(name, source, config) for name, source in sources.items()},
            [file.close for file in files],
        )
    except BaseException:
        for file in files:
            file.close()
        raise


def _in_meta_order(name: str, source: PlainRows, config: ModelConfig) -> TensorSource:
    if not name.endswith(_ROTATED) or source.shape[0] % config.head_dim:
        return source
    return InterleavedRows(source, config.head_dim)


def _settle_tie(folder: Path, config: ModelConfig, sources: dict[str, Any]) -> ModelConfig:
    """Return the config with `tied_output` as the files really have it.

    A file that brings both matrices although they are to be tied is untied if they differ (as
    in transformers 5), and keeps one of them if not.
    """
    embedding, output = sources.get("tok_embeddings.weight"), sources.get("output.weight")
    if not config.tied_output:
        if output is None:
            raise CheckpointError(
                f"{folder}: tensor lm_head.weight (output.weight) is missing, and config.json "
                "does not set tie_word_embeddings"
            )
        return config
    if output is None or embedding is None:
        return config
    if same_values(embedding, output):
        del sources["output.weight"]
        return config
    return replace(config, tied_output=False)
