"""What is to be run, as the planner sees it, and the bytes that follow from the shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload_llama.config import DTYPES, ModelConfig
from offload_llama.cost.packing import (
    OUTPUT_WEIGHTS,
    PACKED,
    TINYGEMM_CAPABILITY,
    can_pack,
    card_kernel,
    embedding_sizes,
    tensor_sizes,
)
from offload_llama.errors import ConfigError
from offload_llama.geometry import Geometry, choose_geometry
from offload_llama.hardware import HardwareProfile

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    # The codes, and what the card's kernel keeps beside them: see `packing`.
    "int8": 8.25,
    "int4": 4.5,
    "int4-g32": 5.0,
    # Source: ggml's block layouts: block bytes * 8 / weights of a block.
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k": 5.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_k": 4.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "q3_k": 3.4375,
    "q2_k": 2.625,
}
"""Bits of one weight, with its share of the scales."""

KV_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    # A 16-bit scale for 64 values, and for int4 a 16-bit offset too.
    # Source: columns kv_int8_g64_sym_B and kv_int4_g64_asym_B of data/kv_bytes.csv.
    "int8": 8.25,
    "int4": 4.5,
}
"""Bits of one cached number, with its share of the scales."""

RUNNABLE_WEIGHTS = ("fp32", "bf16", "fp16", *PACKED)
RUNNABLE_KV = ("fp32", "bf16", "fp16")
LOSSY = ("int8", "int4")
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# The CUDA caching allocator hands out multiples of this.
# Source: c10/cuda/CUDACachingAllocator, kMinBlockSize.
BLOCK_BYTES = 512


def rounded(n_bytes: int) -> int:
    """Return what a tensor of this size takes on the card."""
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, how much of it runs at once, and in which numbers.

    `ctx` are the most tokens of one sequence, `batch` the sequences that run together, `dtype` the
    numbers that are computed with. `weights` and `kv_dtype` name what is stored.

    Raises:
        ConfigError: a size is not positive, the context exceeds the model's, or a name is unknown.
    """

    config: ModelConfig
    ctx: int
    batch: int = 1
    weights: str = "fp16"
    kv_dtype: str = "fp16"
    dtype: str = "float16"
    prefill_chunk: int = 512
    part_tokens: int | None = None
    flush_tokens: int | None = None
    ring_slots: int | None = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-batch-size", self.batch),
            ("--prefill-chunk", self.prefill_chunk),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be 1 or more, got {value}")
        if not 2 <= self.ctx <= self.config.max_seq_len:
            raise ConfigError(
                f"--ctx {self.ctx} is not possible: this model allows 2 to "
                f"{self.config.max_seq_len} tokens"
            )
        for flag, name, known in (
            ("--weights", self.weights, WEIGHT_BITS),
            ("--kv-dtype", self.kv_dtype, KV_BITS),
        ):
            if name not in known:
                raise ConfigError(f"unknown {flag} {name!r}; use {', '.join(known)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown --dtype {self.dtype!r}; use {', '.join(DTYPES)}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of the activations."""
        return ITEM_BYTES[self.dtype]

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one token's keys (or its values) in one layer, with their scales."""
        config = self.config
        return round(config.n_kv_heads * config.head_dim * KV_BITS[self.kv_dtype] / 8)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the cache: keys and values of all layers."""
        return 2 * self.config.n_layers * self.kv_row_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache, every sequence at full context."""
        return self.kv_bytes_per_token * self.ctx * self.batch

    @property
    def geometry(self) -> Geometry:
        """How the engine cuts this cache."""
        item_bytes = max(1, round(KV_BITS[self.kv_dtype] / 8))
        return choose_geometry(
            self.config,
            item_bytes,
            part_tokens=self.part_tokens,
            flush_tokens=self.flush_tokens,
        )

    @property
    def runnable(self) -> bool:
        """Whether the engine runs this today; what it cannot run yet is planned all the same."""
        return self.weights in RUNNABLE_WEIGHTS and self.kv_dtype in RUNNABLE_KV

    @property
    def lossy(self) -> bool:
        """Whether the cache is kept in fewer bits than it is computed in."""
        return self.kv_dtype in LOSSY


def matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield (name, rows, columns) of the weight matrices of one layer."""
    query, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "wq", query, config.dim
    yield "wk", kv, config.dim
    yield "wv", kv, config.dim
    yield "wo", config.dim, query
    yield "w1", config.hidden_dim, config.dim
    yield "w3", config.hidden_dim, config.dim
    yield "w2", config.dim, config.hidden_dim


def n_parameters(config: ModelConfig) -> int:
    """Return how many weights the model has."""
    layer = sum(rows * columns for _, rows, columns in matrices(config)) + 2 * config.dim
    heads = config.vocab_size * config.dim * (1 if config.tied_output else 2)
    return config.n_layers * layer + config.dim + heads


def matrix_tensors(
    setup: Setup, rows: int, columns: int, profile: HardwareProfile | None = None
) -> tuple[int, ...]:
    """Return the bytes of each tensor that one weight matrix is kept in on a card.

    Packed ones lie as the card's kernel wants them; without a profile a recent card is meant.
    """
    if packs(setup, columns):
        kernel = card_kernel(setup.weights, capability(profile), rows, columns)
        return tensor_sizes(setup.weights, kernel, rows, columns)
    return (round(rows * columns * WEIGHT_BITS[setup.weights] / 8),)


def packs(setup: Setup, columns: int) -> bool:
    """Whether matrices with this many columns are kept in codes of our own."""
    return setup.weights in PACKED and can_pack(setup.weights, columns)


def capability(profile: HardwareProfile | None) -> tuple[int, int]:
    """Return a card's compute capability; one that CUDA does not drive counts as a recent one."""
    found = None if profile is None else profile.capability
    return found or TINYGEMM_CAPABILITY


def weight_tensors(setup: Setup, profile: HardwareProfile | None = None) -> Iterator[int]:
    """Yield the bytes of every tensor of the weights; the norms' scales stay as computed with."""
    config = setup.config
    for _ in range(config.n_layers):
        for _, rows, columns in matrices(config):
            yield from matrix_tensors(setup, rows, columns, profile)
        yield config.dim * setup.item_bytes
        yield config.dim * setup.item_bytes
    yield config.dim * setup.item_bytes
    yield from _embedding_and_output(setup, profile)
    yield config.head_dim // 2 * 4  # the rotary frequencies


def _embedding_and_output(setup: Setup, profile: HardwareProfile | None) -> Iterator[int]:
    """Yield the bytes of the tensors of embedding and output; beside packed ones rows are int8."""
    config = setup.config
    rows, columns = config.vocab_size, config.dim
    if packs(setup, columns):
        kernel = card_kernel(OUTPUT_WEIGHTS, capability(profile), rows, columns)
        yield from embedding_sizes(kernel, rows, columns, tied=config.tied_output)
    else:
        output = matrix_tensors(setup, rows, columns, profile)
        yield from output * (1 if config.tied_output else 2)


def weights_bytes(setup: Setup, profile: HardwareProfile | None = None) -> int:
    """Return what the weights take on the card."""
    return sum(rounded(n_bytes) for n_bytes in weight_tensors(setup, profile))
