"""Shapes of well-known models, so that a plan needs no download.

The table is `data/models.csv`; its last column names the file on the model's page that the numbers
were taken from. No torch here.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from offload_llama.config import ModelConfig, RopeScaling

_SUFFIXES = ("-instruct", "-chat", "-hf", "-base", "-it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """One model: its name, its shape, and the repository its numbers stand in."""

    name: str
    slug: str
    config: ModelConfig
    source: str

    @property
    def repository(self) -> str:
        """The repository id, as it is typed to run the model."""
        return self.source.rpartition("/")[0]


def slug(name: str) -> str:
    """Return a model's name as users type it: "Llama-3.1 8B" becomes "llama-3.1-8b"."""
    return re.sub(r"[^a-z0-9.]+", "-", name.strip().lower()).strip("-")


def _config(row: Mapping[str, str]) -> ModelConfig:
    scaling = None
    if row["rope_factor"]:
        scaling = RopeScaling(
            factor=float(row["rope_factor"]),
            low_freq_factor=float(row["rope_low_freq"]),
            high_freq_factor=float(row["rope_high_freq"]),
            original_max_seq_len=int(row["rope_original"]),
        )
    return ModelConfig(
        dim=int(row["dim"]),
        n_layers=int(row["n_layers"]),
        n_heads=int(row["n_heads"]),
        n_kv_heads=int(row["n_kv_heads"]),
        head_dim=int(row["head_dim"]),
        hidden_dim=int(row["hidden_dim"]),
        vocab_size=int(row["vocab_size"]),
        norm_eps=float(row["norm_eps"]),
        rope_theta=float(row["rope_theta"]),
        rope_scaling=scaling,
        max_seq_len=int(row["max_seq_len"]),
        tied_output=row["tied_output"] == "1",
    )


@functools.cache
def presets() -> Mapping[str, ModelPreset]:
    """Return every model whose shape we know, by slug."""
    text = (resources.files("offload_llama") / "data" / "models.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    found = (
        ModelPreset(
            name=row["name"], slug=slug(row["name"]), config=_config(row), source=row["source"]
        )
        for row in rows
    )
    return {preset.slug: preset for preset in found}


def find_preset(name: str) -> ModelPreset | None:
    """Return the preset that a name means, or None.

    A name is a slug, with or without the suffix of a tuned version, or a repository id of it:
    `llama-3.1-8b`, `Llama-3.1-8B-Instruct`, `meta-llama/Llama-3.1-8B-Instruct`.
    """
    known = presets()
    for preset in known.values():
        if name.lower() == preset.repository.lower():
            return preset
    wanted = slug(name.rpartition("/")[2])
    while wanted not in known:
        suffix = next((each for each in _SUFFIXES if wanted.endswith(each)), None)
        if suffix is None:
            return None
        wanted = wanted.removesuffix(suffix)
    preset = known[wanted]
    organisation = name.rpartition("/")[0].lower()
    own = preset.repository.partition("/")[0].lower()
    return preset if organisation in ("", own) else None


def closest(name: str) -> list[str]:
    """Return the slugs that look most like a name, best first; all of them if none does."""
    import difflib

    known = list(presets())
    wanted = slug(name.rpartition("/")[2])
    near = [each for each in known if each.startswith(f"{wanted}-")]
    return near or difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or known
