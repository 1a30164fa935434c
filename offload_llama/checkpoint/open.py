"""From what the user typed to an open checkpoint."""

from __future__ import annotations

from pathlib import Path

from offload_llama.checkpoint.api import Checkpoint
from offload_llama.checkpoint.damage import bad_file, check_is_data
from offload_llama.checkpoint.gguf_file import open_gguf
from offload_llama.checkpoint.gguf_header import MAGIC
from offload_llama.checkpoint.hf import open_hf
from offload_llama.checkpoint.hub import is_repo_name, repo_model
from offload_llama.checkpoint.meta import open_meta
from offload_llama.checkpoint.packaged import PACKAGED, packaged_model
from offload_llama.checkpoint.packed import SETTINGS, open_packed
from offload_llama.errors import CheckpointError

_LOOKED_FOR = (
    "config.json with *.safetensors, params.json with consolidated.*.pth, or one *.gguf file"
)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model; its tensors stay on disk until they are asked for.

    Args:
        model: a folder, a file, a short name (`smollm2-135m`), a repository id (`org/name`), or
            a GGUF file in a repository (`org/name/file.gguf`). A path that exists comes first.

    Raises:
        CheckpointError: there is no such model, or it is damaged or not supported.
    """
    path = Path(model).expanduser()
    if not path.exists():
        path = _resolve_name(str(model))
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _resolve_name(name: str) -> Path:
    if name in PACKAGED:
        return packaged_model(name)
    path_like = name.startswith((".", "/", "~")) or "\\" in name
    if path_like or not is_repo_name(name):
        raise CheckpointError(
            f"no such model: {name} is neither a file or folder here, nor a repository id "
            f"(org/name), nor a short name ({', '.join(PACKAGED)})"
        )
    return repo_model(name)


def _open_file(path: Path) -> Checkpoint:
    size_bytes = check_is_data(path)
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    if is_gguf or path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix in (".safetensors", ".pth", ".json"):
        # One file of a folder was named; the model is all of them.
        return _open_folder(path.parent)
    raise bad_file(path, size_bytes, "not a model file; give a .gguf file or a model's folder")


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / SETTINGS).is_file():
        return open_packed(folder)
    if (folder / "config.json").is_file():
        return open_hf(folder)
    if (folder / "params.json").is_file():
        return open_meta(folder)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return open_gguf(gguf_files[0])
    if gguf_files:
        names = ", ".join(path.name for path in gguf_files)
        raise CheckpointError(f"{folder}: {len(gguf_files)} GGUF files, name one of them: {names}")
    if (folder / "original" / "params.json").is_file():
        return open_meta(folder / "original")
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise CheckpointError(f"{folder}: no model in it; looked for {_LOOKED_FOR}; found {found}")
