"""A model's own settings (JSON or GGUF metadata), checked for type when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_llama.config import ModelConfig, RopeScaling
from offload_llama.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by key, where null counts as absent.

    `path` and `prefix` are for messages and lookups: a GGUF file's keys begin with "llama.".

    Raises:
        CheckpointError: from every method, if a value is missing or of the wrong type.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str) -> Any:
        """Return the value, or None."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a truth value, False if it is absent."""
        value = self._required(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Let a setting pass if it is absent or has one of these values.

        For settings under which a plain Llama would compute other numbers than the model.
        """
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.error(key, f"= {value!r} is not supported")

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return the error for one key."""
        return CheckpointError(f"{self.path}: {self.prefix}{key} {problem}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        return value


def model_config(path: Path, **fields: Any) -> ModelConfig:
    """Return a ModelConfig of what a model's files say.

    Raises:
        CheckpointError: the values do not make a model; the message names the file.
    """
    try:
        return ModelConfig(**fields)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def rope_scaling(path: Path, **fields: Any) -> RopeScaling:
    """Return a RopeScaling of what a model's files say.

    Raises:
        CheckpointError: the values are not possible; the message names the file.
    """
    try:
        return RopeScaling(**fields)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
