"""Sizes of the cache's units, chosen from the model and never from the budget. Integers only.

Two caches of one model cut their sequences in the same places, wherever the rows live: that is
what makes a streamed layer equal a resident one bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_llama.config import ModelConfig
from offload_llama.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20

PART_BYTES = 16 * MIB
"""Keys and values of one part: a copy of 8 MiB runs at the link's full rate."""
FLUSH_HALF_BYTES = 128 * KIB
"""Keys (or values) of one flush."""
PAGE_HALF_BYTES = 2 * MIB
"""Keys (or values) of the largest page: copies of 2 MiB run at 97 % of the link."""
FIRST_BUFFER_TOKENS = 64
"""Rows of a resident part's first buffer."""
MIN_PAGE_TOKENS = 16
FIRST_SLAB_BYTES = 4 * MIB
MAX_SLAB_BYTES = 64 * MIB
FLUSHES_IN_FLIGHT = 2
"""Layers of a prefill chunk whose keys and values may be on their way out at once."""
MIN_RING_SLOTS = 3
MAX_RING_SLOTS = 9
LINK_SHARE = 13
"""Bytes a card reads from its own memory while one crosses the link: 672 GB/s over 50 GB/s on an
RTX 5070, 15 on an RTX 3060, 22 on an RTX 4060. Source: data/gpu_presets.csv."""


def floor_power(n: int) -> int:
    """Return the largest power of two that is at most n (n > 0)."""
    return 1 << (n.bit_length() - 1)


def ceil_power(n: int) -> int:
    """Return the smallest power of two that is at least n (n > 0)."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What one token takes, and how many tokens make a part, a flush and a page.

    `row_bytes` are one token's keys (or values) in one layer. A part is the fixed token range
    `[k * part_tokens, (k + 1) * part_tokens)`.

    Raises:
        ConfigError: part or flush size is not a power of two, or does not divide.
    """

    n_kv_heads: int
    head_dim: int
    itemsize: int
    part_tokens: int
    flush_tokens: int
    max_page_tokens: int

    def __post_init__(self) -> None:
        for name in ("part_tokens", "flush_tokens", "max_page_tokens"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ConfigError(f"{name} must be a power of two, got {value}")

    @property
    def row_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * self.itemsize

    def page_tokens(self, have: int, need: int) -> int:
        """Return the size of the next page of a sequence that has `have` tokens of pages.

        Pages start small and grow with the sequence, at most 1/32 of it beyond what is needed, so
        that many short sequences pin little and a long one wastes little.
        """
        wanted = max(have // 32, need, MIN_PAGE_TOKENS)
        return max(MIN_PAGE_TOKENS, min(self.max_page_tokens, floor_power(wanted)))


def choose_geometry(
    config: ModelConfig,
    itemsize: int,
    *,
    part_tokens: int | None = None,
    flush_tokens: int | None = None,
) -> Geometry:
    """Return the geometry of this model's cache; the two sizes can be set by hand."""
    row_bytes = config.kv_row_bytes(itemsize)
    part = floor_power(max(1, PART_BYTES // (2 * row_bytes)))
    flush = min(512, max(16, floor_power(max(1, FLUSH_HALF_BYTES // row_bytes))))
    return Geometry(
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        itemsize=itemsize,
        part_tokens=part if part_tokens is None else part_tokens,
        flush_tokens=flush if flush_tokens is None else flush_tokens,
        max_page_tokens=floor_power(max(MIN_PAGE_TOKENS, PAGE_HALF_BYTES // row_bytes)),
    )


def choose_ring_slots(config: ModelConfig, itemsize: int, n_host: int, parts_per_layer: int) -> int:
    """Return how many part-sized slots the ring gets.

    While the gap of resident layers between two streamed ones computes, the link should fill the
    ring: `bandwidth * min(x, gap * c)` bytes for copies of x seconds and layers of c, plus the
    slot that is being read. In decode a resident layer takes the time of reading its weights and,
    at full context, its `parts_per_layer`; on the cards of our tables memory is `LINK_SHARE` times
    as fast as the link, or faster.
    """
    attention = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim * config.dim
    layer_bytes = (attention + 3 * config.dim * config.hidden_dim) * itemsize
    layer_bytes += parts_per_layer * PART_BYTES
    gap_bytes = -(-config.n_layers // max(1, n_host)) * layer_bytes // LINK_SHARE
    gap_parts = -(-gap_bytes // PART_BYTES)
    return min(MAX_RING_SLOTS, max(MIN_RING_SLOTS, min(gap_parts, parts_per_layer) + 1))


def resident_rows(geometry: Geometry, n_tokens: int) -> list[int]:
    """Return the rows of each part's buffer of a resident sequence of n_tokens tokens.

    Only the last part's buffer grows, doubling.
    """
    full, rest = divmod(n_tokens, geometry.part_tokens)
    rows = [geometry.part_tokens] * full
    if rest:
        rows.append(min(geometry.part_tokens, max(FIRST_BUFFER_TOKENS, ceil_power(rest))))
    return rows
