"""A plan saved with `plan --json`, read back to be replayed exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_llama.config import ModelConfig
from offload_llama.cost import SHORT_NAMES
from offload_llama.errors import ConfigError
from offload_llama.hardware import parse_bytes

FORMAT = "offload-llama plan 1"
_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")


def shape_of(config: ModelConfig) -> dict[str, int]:
    """Return the sizes by which a saved plan knows its model."""
    return {name: getattr(config, name) for name in _SHAPE}


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan read back from the file `name`; `data` is all that stood in it."""

    name: str
    data: Mapping[str, Any]

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the plan settles, as fields of the options.

        Args:
            given: the options that the user gave, by field.

        Raises:
            ConfigError: one of them says something else.
        """
        settled = {
            "ctx": ("--ctx", self.data["ctx"]),
            "max_batch_size": ("--max-batch-size", self.data["batch"]),
            "prefill_chunk": ("--prefill-chunk", self.data["prefill_chunk"]),
            "weights": ("--weights", self.data["weights"]),
            "kv_dtype": ("--kv-dtype", self.data["kv_dtype"]),
            "dtype": ("--dtype", _LONG[self.data["dtype"]]),
            "kv_policy": ("--kv-policy", self.data["policy"]),
        }
        for field, (flag, planned) in settled.items():
            asked = given.get(field, planned)
            if asked not in (planned, "auto"):
                typed = "max" if asked is None else SHORT_NAMES.get(asked, asked)
                raise ConfigError(
                    f"{flag} {typed} contradicts the plan in {self.name}, which has "
                    f"{SHORT_NAMES.get(planned, planned)}; leave {flag} out, or plan again with it"
                )
        values = {field: planned for field, (_, planned) in settled.items()}
        if "model" not in given:
            values["model"] = self.data["model"]
        return values

    def target(self) -> dict[str, Any]:
        """Return the card that the plan was made for, as fields of the options."""
        words = self.data.get("target", [])
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        vram = pairs.get("--vram")
        return {
            "gpu": pairs.get("--gpu"),
            "device": pairs.get("--device", "auto"),
            "vram": None if vram is None else parse_bytes(vram),
        }

    def check_model(self, config: ModelConfig, name: str) -> None:
        """Refuse a model of another shape than the plan's.

        Raises:
            ConfigError: a size differs; the message has both.
        """
        for key, value in shape_of(config).items():
            planned = self.data["shape"][key]
            if planned != value:
                raise ConfigError(
                    f"the plan in {self.name} is for {self.data['model_name']} ({key} {planned}), "
                    f"not for {name} ({key} {value}); plan again: offload-llama plan {name} --json"
                )


_LONG = {short: long for long, short in SHORT_NAMES.items()}

_KINDS: dict[str, type] = {
    "model": str,
    "model_name": str,
    "shape": dict,
    "ctx": int,
    "batch": int,
    "prefill_chunk": int,
    "weights": str,
    "kv_dtype": str,
    "dtype": str,
    "policy": str,
    "placements": list,
}


def read_plan(name: str) -> SavedPlan:
    """Return the plan that a file holds.

    Raises:
        ConfigError: the file cannot be read, or is no saved plan.
    """
    again = "save one with: offload-llama plan MODEL --json > plan.json"
    try:
        data = json.loads(Path(name).read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--plan {name}: cannot be read ({error.strerror}); {again}") from error
    except ValueError as error:
        raise ConfigError(f"--plan {name}: is no JSON ({error}); {again}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"--plan {name}: is no plan of this version of the program; {again}")
    for key, kind in _KINDS.items():
        value = data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"--plan {name}: {key} is missing or damaged; {again}")
    sizes = [data["shape"].get(key) for key in _SHAPE]
    if not all(isinstance(size, int) for size in sizes) or data["dtype"] not in _LONG:
        raise ConfigError(f"--plan {name}: its model or dtype is damaged; {again}")
    return SavedPlan(name, data)
