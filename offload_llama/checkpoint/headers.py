"""A model's shape without its weights: from a preset, or from the heads of its files.

Presets, GGUF files, `config.json` and complete `params.json` files need no torch; a `params.json`
that leaves sizes to the tensors does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload_llama.checkpoint.packaged import PACKAGED, packaged_model
from offload_llama.config import ModelConfig
from offload_llama.errors import CheckpointError
from offload_llama.models import closest, find_preset

# The readers of files are imported where they are needed: a preset is there at once without them.


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan knows of a model.

    `label` is how reports call it. `file_bytes` is what its weights take on disk, None where no
    file was looked at.
    """

    config: ModelConfig
    label: str
    file_bytes: int | None = None


def model_shape(model: str) -> ModelShape:
    """Return the shape of a model; no tensor is read, and nothing is downloaded.

    Args:
        model: a folder, a file, the short name of an installed model, a preset, or a repository
            id that is in the Hub's cache here or belongs to a preset. A path that exists comes
            first, then an installed model.

    Raises:
        CheckpointError: there is no such model, or its files are damaged or not supported.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _of_folder(path) if path.is_dir() else _of_file(path)
    if model in PACKAGED:
        try:
            return _of_gguf(packaged_model(model), label=model)
        except CheckpointError:
            if find_preset(model) is None:
                raise
    preset = find_preset(model)
    cached = _in_hub_cache(model)
    if cached is not None:
        return _of_folder(cached) if cached.is_dir() else _of_file(cached)
    if preset is not None:
        return ModelShape(preset.config, preset.name)
    raise CheckpointError(_unknown(model))


def _unknown(model: str) -> str:
    near = closest(model)
    hint = f"did you mean {' or '.join(near)}?" if len(near) <= 3 else f"known: {', '.join(near)}"
    what = "neither a file or folder here nor a model whose shape is known"
    if "/" in model and not model.startswith((".", "/", "~")):
        what += ", and not in the Hub's cache here"
        hint += " (or give the folder of a downloaded model)"
    return f"no shape for {model}: it is {what}; {hint}"


def _in_hub_cache(model: str) -> Path | None:
    """Return the folder or GGUF file of a repository that was downloaded before, or None."""
    organisation, slash, rest = model.partition("/")
    if not slash or not organisation or model.startswith((".", "~")) or "\\" in model:
        return None
    import huggingface_hub
    from huggingface_hub import errors

    name, _, file_name = rest.partition("/")
    try:
        found = huggingface_hub.try_to_load_from_cache(
            f"{organisation}/{name}", file_name or "config.json"
        )
    except errors.HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    return Path(found) if file_name else Path(found).parent


def _of_file(path: Path) -> ModelShape:
    from offload_llama.checkpoint.damage import check_is_data
    from offload_llama.checkpoint.gguf_header import MAGIC

    size_bytes = check_is_data(path)
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    if is_gguf or path.suffix == ".gguf":
        return _of_gguf(path, label=path.name)
    if path.suffix in (".safetensors", ".pth", ".json"):
        return _of_folder(path.parent)
    raise CheckpointError(
        f"{path} ({size_bytes:,} bytes): not a model file; give a .gguf file or a model's folder"
    )


def _of_folder(folder: Path) -> ModelShape:
    if (folder / "offload_llama.json").is_file():
        from offload_llama.checkpoint.packed import packed_config

        return ModelShape(packed_config(folder), folder.name, _size(folder, "*.safetensors"))
    if (folder / "config.json").is_file():
        from offload_llama.checkpoint.damage import read_json
        from offload_llama.checkpoint.hf_config import hf_config

        config = hf_config(folder / "config.json", read_json(folder / "config.json"))
        return ModelShape(config, folder.name, _size(folder, "*.safetensors"))
    for place in (folder, folder / "original"):
        if (place / "params.json").is_file():
            return ModelShape(_of_params(place), folder.name, _size(place, "consolidated.*.pth"))
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _of_gguf(gguf_files[0], label=gguf_files[0].name)
    found = "several GGUF files, name one of them" if gguf_files else "none of these"
    raise CheckpointError(
        f"{folder}: no model in it; looked for config.json, params.json and one *.gguf file; "
        f"found {found}"
    )


def _size(folder: Path, pattern: str) -> int | None:
    return sum(path.stat().st_size for path in folder.glob(pattern)) or None


def _of_gguf(path: Path, *, label: str) -> ModelShape:
    from offload_llama.checkpoint.gguf_config import check_kind, gguf_config, meta_name
    from offload_llama.checkpoint.gguf_header import read_header

    header = read_header(path)
    check_kind(path, header)
    shapes = {meta_name(entry.name): entry.shape for entry in header.tensors}
    config = gguf_config(path, header.metadata, shapes)
    return ModelShape(config, label, header.size_bytes)


def _of_params(folder: Path) -> ModelConfig:
    """Return Meta's config; shapes that the file leaves out are looked up in the shards."""
    from offload_llama.checkpoint.damage import read_json
    from offload_llama.checkpoint.meta_config import feed_forward_width, meta_config

    path = folder / "params.json"
    params = read_json(path)
    dim, vocab_size = params.get("dim"), params.get("vocab_size", -1)
    multiple_of, width = params.get("multiple_of"), params.get("hidden_dim")
    if not width and isinstance(dim, int) and isinstance(multiple_of, int) and multiple_of > 0:
        width = feed_forward_width(dim, multiple_of, params.get("ffn_dim_multiplier") or 1.0)
    if isinstance(vocab_size, int) and vocab_size > 0 and isinstance(width, int):
        shapes = {
            "tok_embeddings.weight": (vocab_size, 0),
            "layers.0.feed_forward.w1.weight": (width, 0),
        }
        return meta_config(path, params, shapes)
    from offload_llama.checkpoint.meta import open_meta

    checkpoint = open_meta(folder)
    try:
        return checkpoint.config
    finally:
        checkpoint.close()
