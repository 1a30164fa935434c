"""What a model is, and how a run is asked for: frozen values, checked on creation.

No torch here: `plan`, `--help` and the policy read these in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload_llama.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3's stretch of the rotary frequencies.

    Source: Llama 3.1 reference code, `apply_scaling`; the same four numbers stand in a Hugging
    Face `rope_scaling` block of `rope_type` "llama3".
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        _require(self.factor > 0, f"rope scaling factor must be positive, got {self.factor}")
        _require(
            self.high_freq_factor > self.low_freq_factor > 0,
            "rope scaling needs high_freq_factor > low_freq_factor > 0, got "
            f"{self.high_freq_factor} and {self.low_freq_factor}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family model, in Meta's names.

    `hidden_dim` is the width of the feed-forward layer. `max_seq_len` is the context the model
    was trained for. `rope_freq_factors` (one divisor for each of the head_dim/2 frequencies) is
    what GGUF files carry instead of `rope_scaling`.

    Raises:
        ConfigError: a size is not positive, heads do not group evenly, or head_dim is odd.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = None
    max_seq_len: int = 2048
    tied_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "hidden_dim",
            "vocab_size",
            "max_seq_len",
        ):
            value = getattr(self, name)
            _require(value > 0, f"{name} must be positive, got {value}")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}")
        _require(self.rope_theta > 0, f"rope_theta must be positive, got {self.rope_theta}")
        if self.rope_freq_factors is not None:
            _require(
                len(self.rope_freq_factors) == self.head_dim // 2,
                f"rope_freq_factors needs head_dim/2 = {self.head_dim // 2} values, got "
                f"{len(self.rope_freq_factors)}",
            )

    @property
    def n_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads

    def kv_row_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys (or of its values) in one layer."""
        return self.n_kv_heads * self.head_dim * itemsize

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes one token adds to the cache: keys and values, all layers."""
        return 2 * self.n_layers * self.kv_row_bytes(itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy, and so is anything at or below 0.01. `top_k` None, `top_p` 1,
    `min_p` 0 and `repetition_penalty` 1 switch those steps off. `seed` None draws a fresh one,
    which the result reports. `stop` are strings that end the text (and are not part of it),
    `stop_token_ids` are further ids that do, beside the model's own.

    Raises:
        ConfigError: a value is out of range; the message names it as the flag is spelled.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"--temperature must be 0 or more, got {self.temperature}; 0 is greedy",
        )
        _require(
            self.top_k is None or self.top_k >= 1,
            f"--top-k must be 1 or more, got {self.top_k}; leave it out to keep every token",
        )
        _require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}")
        _require(0 <= self.min_p < 1, f"--min-p must be at least 0 and below 1, got {self.min_p}")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"--repetition-penalty must be positive, got {self.repetition_penalty}",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"--seed must be at least 0 and below 2**63, got {self.seed}",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"--max-tokens must be 1 or more, got {self.max_tokens}",
        )
        _require("" not in self.stop, "--stop must not be an empty string")
