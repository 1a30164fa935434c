"""Models by name: repositories of the Hugging Face Hub.

The Hub's own client downloads and caches; this module chooses the files and turns the client's
many exceptions into one line each. What is in the cache is used as it is, without asking the Hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from offload_llama.checkpoint.hf import weight_files
from offload_llama.errors import CheckpointError

_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?")
_FOLDER_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_TIMEOUT_S = 20.0


def is_repo_name(name: str) -> bool:
    """Whether a name could be a repository id, or a GGUF file in one."""
    return _REPO.fullmatch(name) is not None


def repo_model(name: str) -> Path:
    """Return the local folder or GGUF file of `org/repo` or `org/repo/file.gguf`.

    Raises:
        CheckpointError: no such repository, no access, no network and not in the cache, or no
            single choice of files.
    """
    match = _REPO.fullmatch(name)
    assert match is not None, "callers ask is_repo_name first"
    repo_id, filename = match[1], match[2]
    from huggingface_hub import errors

    local: Path | None = None
    try:
        local = _cached(repo_id, filename)
        if local is not None and (local.is_file() or _has_tokenizer(local)):
            return local
        return _download(repo_id, filename)
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id} is gated: accept its licence on its page, then run `hf auth login` or set "
            "HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no such model: {name} is no path here and no repository of the Hub (if it is a "
            "private one, run `hf auth login`)"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name} is neither a path nor a repository id") from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"{repo_id}: the Hub refused ({_first_line(error)})") from error
    except Exception as error:
        # Which transport errors the client lets through differs between its versions.
        if local is not None:
            return local
        raise CheckpointError(
            f"{repo_id} is not in the Hub's cache here, and the Hub cannot be reached "
            f"({_first_line(error)}); connect to the network or give the path of a local model"
        ) from error


def _has_tokenizer(folder: Path) -> bool:
    """Whether a vocabulary was cached too; another program may have asked for weights only."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _cached(repo_id: str, filename: str | None) -> Path | None:
    """Return what the client's cache holds of a model, if it is all there."""
    import huggingface_hub
    from huggingface_hub import errors

    if filename is not None:
        path = huggingface_hub.try_to_load_from_cache(repo_id, filename)
        return Path(path) if isinstance(path, str) else None
    try:
        # Completeness is judged below: the client would ask for files that are of no use here.
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=["config.json"], local_files_only=True
            )
        )
    except errors.LocalEntryNotFoundError:
        return None
    if (folder / "config.json").exists():
        try:
            weight_files(folder)
        except CheckpointError:
            return None
        return folder
    gguf_files = list(folder.glob("*.gguf"))
    return gguf_files[0] if len(gguf_files) == 1 else None


def _download(repo_id: str, filename: str | None) -> Path:
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(repo_id, timeout=_TIMEOUT_S)
    names = [file.rfilename for file in info.siblings or []]
    if filename is None and any(name.endswith(".safetensors") for name in names):
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=_FOLDER_FILES, ignore_patterns=["original/*"]
            )
        )
    if filename is not None and filename not in names:
        raise CheckpointError(
            f"{repo_id}: no file {filename} in it; {_gguf_choice(repo_id, names)}"
        )
    if filename is None:
        files = [name for name in names if name.endswith(".gguf")]
        if len(files) != 1:
            raise CheckpointError(
                f"{repo_id}: no safetensors in it; {_gguf_choice(repo_id, names)}"
            )
        filename = files[0]
    return Path(huggingface_hub.hf_hub_download(repo_id, filename))


def _gguf_choice(repo_id: str, names: list[str]) -> str:
    files = [f"{repo_id}/{name}" for name in names if name.endswith(".gguf")]
    return f"name one of its GGUF files: {', '.join(files)}" if files else "and no GGUF file either"
