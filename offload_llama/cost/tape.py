"""What one forward pass allocates and how long its kernels take, operation by operation.

This mirrors `model.py` and `attention.py` in the order in which they allocate and let go, with the
sizes that follow from the shapes. It knows the card's figures and nothing of any device: the
simulated card, which sizes and times real operands, must agree with it.
"""

from __future__ import annotations

from offload_llama.cost.packing import (
    OUTPUT_WEIGHTS,
    PORTABLE,
    TINYGEMM,
    bits_of,
    block_rows,
    card_kernel,
    group_of,
    tensor_sizes,
)
from offload_llama.cost.setup import Setup, capability, matrix_tensors, packs, rounded
from offload_llama.hardware import HardwareProfile

FLASH_CAPABILITY = (8, 0)
# The memory-efficient kernel pads its log-sum-exp to this many queries.
LSE_ALIGNMENT = 32


class Tape:
    """Bytes held, their peak, seconds of the card and launches of the host, so far.

    `marks` are the seconds and launches as each cached part had been attended.
    """

    def __init__(self, setup: Setup, profile: HardwareProfile) -> None:
        self.setup, self.config, self.profile = setup, setup.config, profile
        self.live_bytes = self.peak_bytes = 0
        self.seconds = 0.0
        self.launches = 0
        self.marks: list[tuple[float, int]] = []
        item = setup.item_bytes
        self.item = item
        self._flops_per_s = profile.fp16_flops if item == 2 else profile.fp32_flops
        capability = profile.capability or FLASH_CAPABILITY
        self.flash = item == 2 and capability >= FLASH_CAPABILITY and profile.flash_attention

    # Memory

    def new(self, n_bytes: int) -> int:
        """Take a tensor of this size and return what it occupies."""
        block = rounded(n_bytes)
        self.live_bytes += block
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def drop(self, *blocks: int) -> None:
        """Let tensors go."""
        self.live_bytes -= sum(blocks)

    # Time

    def run(self, moved_bytes: float, flops: float = 0.0, times: int = 1) -> None:
        """Count a kernel that reads and writes this much, `times` times over."""
        seconds = max(moved_bytes / self.profile.mem_bytes_per_s, flops / self._flops_per_s)
        self.seconds += times * (self.profile.kernel_s + seconds)
        self.launches += times

    # The operations

    def linear(self, n: int, rows: int, columns: int, weights: str | None = None) -> int:
        """y (n, rows) = x (n, columns) Wᵀ; return the output's block.

        Args:
            weights: what the matrix is in, where the other matrices are packed otherwise.
        """
        setup = self.setup
        if not packs(setup, columns):
            weight = sum(matrix_tensors(setup, rows, columns, self.profile))
            return self._product(n, rows, columns, weight)
        weights = weights or setup.weights
        kernel = card_kernel(weights, capability(self.profile), rows, columns)
        if kernel == PORTABLE:
            return self._by_blocks(n, rows, columns, weights)
        return self._tinygemm(n, rows, columns, weights)

    def _product(self, n: int, rows: int, columns: int, weight: int) -> int:
        out = n * rows * self.item
        self.run(n * columns * self.item + weight + out, 2.0 * n * rows * columns)
        return self.new(out)

    def _tinygemm(self, n: int, rows: int, columns: int, weights: str) -> int:
        """A product by the 4-bit kernel, whose activations are bfloat16."""
        tensors = sum(tensor_sizes(weights, TINYGEMM, rows, columns))
        x, out, cast = n * columns * 2, n * rows * 2, self.setup.dtype != "bfloat16"
        narrow = 0
        if cast:
            narrow = self.new(x)
            self.run(x + n * columns * self.item)
        # Codes of 8 bits are two matrices of 4: half of the tensors each, the halves added.
        halves = bits_of(weights) // 4
        products = []
        for _ in range(halves):
            products.append(self.new(out))
            seconds = 2.0 * n * rows * columns / self.profile.fp16_flops
            self.run(x + tensors // halves + out, seconds * self._flops_per_s)
        if halves == 2:
            self.run(3 * out)
            self.drop(products.pop())
        [product] = products
        if cast:
            wide = self.new(n * rows * self.item)
            self.run(out + n * rows * self.item)
            self.drop(product, narrow)
            product = wide
        return product

    def _by_blocks(self, n: int, rows: int, columns: int, weights: str) -> int:
        """A product with rows that are decoded a block at a time."""
        step = block_rows(columns)
        if rows <= step:
            return self._by_block(n, rows, columns, weights)
        whole = self.new(n * rows * self.item)
        for start in range(0, rows, step):
            block = min(step, rows - start)
            part = self._by_block(n, block, columns, weights)
            self.run(2 * n * block * self.item)
            self.drop(part)
        return whole

    def _by_block(self, n: int, rows: int, columns: int, weights: str) -> int:
        decoded = self.decoded(weights, rows, columns)
        out = self._product(n, rows, columns, rows * columns * self.item)
        self.drop(decoded)
        return out

    def decoded(self, weights: str, rows: int, columns: int) -> int:
        """Rows of codes as numbers to compute with; return their block."""
        numbers, wide = rows * columns, rows * columns * self.item
        per_group = rows * (columns // group_of(weights, columns))
        n_scales = 1
        codes = 0
        if bits_of(weights) == 4:
            n_scales = 2
            halves = self.new(numbers // 2), self.new(numbers // 2)
            self.run(numbers, times=2)
            codes = self.new(numbers)
            self.run(2 * numbers)
            self.drop(*halves)
            self.run(2 * numbers)
        grouped = self.new(wide)
        self.run(numbers + wide)
        self.drop(codes)
        scales = []
        if self.setup.dtype != "bfloat16":
            scales = [self.new(per_group * self.item) for _ in range(n_scales)]
            self.run(per_group * (2 + self.item), times=n_scales)
        if n_scales == 1:
            self.run(2 * wide + per_group * self.item)
            self.drop(*scales)
            return grouped
        out = self.new(wide)
        self.run(2 * wide + 2 * per_group * self.item)
        self.drop(grouped, *scales)
        return out

    def embedding(self, n: int) -> int:
        """Rows of the embedding, (n, dim); return their block."""
        config = self.config
        if not packs(self.setup, config.dim):
            size = n * config.dim * self.item
            self.run(2 * size + 8 * n)
            return self.new(size)
        looked_up = self.new(n * config.dim), self.new(2 * n)
        self.run(2 * n * config.dim + 8 * n)
        self.run(12 * n)
        out = self.decoded(OUTPUT_WEIGHTS, n, config.dim)
        self.drop(*looked_up)
        return out

    def norm(self, n: int) -> int:
        """RMSNorm over (n, dim) and its temporaries in float32; return the output's block."""
        size, wide = n * self.config.dim * self.item, n * self.config.dim * 4
        up = 0
        if self.item < 4:
            up = self.new(wide)
            self.run(size + wide)
        square, mean = self.new(wide), self.new(4 * n)
        self.run(2 * wide)
        self.run(wide)
        self.run(8 * n, times=2)
        root = self.new(4 * n)
        self.drop(mean, square)
        scaled, out = self.new(wide), self.new(wide)
        self.run(2 * wide)
        self.run(2 * wide + self.config.dim * self.item)
        self.drop(scaled)
        if self.item < 4:
            self.drop(up)
            narrow = self.new(size)
            self.run(wide + size)
            self.drop(out)
            out = narrow
        self.drop(root)
        return out

    def rotary(self, n: int, heads: int, given: int) -> int:
        """Rotate (n, heads, D), whose block is `given`; return the output's, the same in float32.

        Another input is still held.
        """
        numbers = n * heads * self.config.head_dim
        size, wide, angles = numbers * self.item, numbers * 4, n * self.config.head_dim * 4
        if self.item == 4:
            self.run(2 * wide + angles)
            return given
        up = self.new(wide)
        self.run(size + wide)
        self.run(2 * wide + angles)
        out = self.new(size)
        self.run(wide + size)
        self.drop(up)
        return out

    def kernel(self, n: int, n_keys: int, *, cached: bool) -> tuple[int, int]:
        """Attention of n tokens over n_keys: return the blocks of output and log-sum-exp."""
        config = self.config
        width = config.n_heads * config.head_dim
        # Over cached rows the query heads of a KV head are folded into the query axis.
        heads, queries = config.n_heads, n
        if cached:
            heads, queries = config.n_kv_heads, n * config.n_groups
        if not self.flash:
            queries = -(-queries // LSE_ALIGNMENT) * LSE_ALIGNMENT
        lse = 4 * heads * queries
        out = n * width * self.item
        row = config.n_kv_heads * config.head_dim * self.item
        keys = 2 * n_keys * (self.setup.kv_row_bytes if cached else row)
        self.run(2 * out + keys + lse, 4.0 * n * width * n_keys)
        return self.new(out), self.new(lse)

    def merge(self, n: int, left_is_wide: bool) -> tuple[int, int]:
        """Merge two partial results; return the blocks of the merged output and log-sum-exp."""
        rows = n * self.config.n_heads
        wide, size, lse = rows * self.config.head_dim * 4, rows * self.config.head_dim, 4 * rows
        size *= self.item
        merged_lse = self.new(lse)
        weights = self.new(lse), self.new(lse)
        self.run(3 * lse, times=3)
        self.run(2 * lse, times=2)
        left = 0
        if not left_is_wide and self.item < 4:
            left = self.new(wide)
            self.run(wide + size)
        product = self.new(wide)
        self.run(2 * wide + lse)
        self.drop(left)
        right = 0
        if self.item < 4:
            right = self.new(wide)
            self.run(wide + size)
        out = self.new(wide)
        self.run(3 * wide + lse)
        self.drop(product, right, *weights)
        return out, merged_lse

    def attend(self, n: int, parts: list[int], own: bool) -> int:
        """Attention of one sequence over its cached parts, then itself; return the output's block.

        Args:
            n: its new tokens.
            parts: cached tokens of each part.
            own: whether the new tokens are attended as a causal square of their own.
        """
        size = n * self.config.n_heads * self.config.head_dim * self.item
        queries = 0
        if n > 1:
            queries = self.new(size)
            self.run(2 * size)
        merged: tuple[int, int] | None = None
        last: tuple[int, int] = (0, 0)
        wide = False
        for n_keys in parts:
            partial = self.kernel(n, n_keys, cached=True)
            self.drop(*last)
            last = (0, 0)
            if merged is None:
                merged = partial
            else:
                joined = self.merge(n, wide)
                self.drop(*merged)
                merged, last, wide = joined, partial, True
            self.marks.append((self.seconds, self.launches))
        if own:
            partial = self.kernel(n, n, cached=False)
            if merged is None:
                merged = partial
            else:
                joined = self.merge(n, wide)
                self.drop(*merged, *partial)
                merged, wide = joined, True
        assert merged is not None
        out, lse = merged
        if wide and self.item < 4:
            narrow = self.new(size)
            self.run(3 * size)
            self.drop(out)
            out = narrow
        if n > 1 and not self.flash:
            copied = self.new(size)
            self.run(2 * size)
            self.drop(out)
            out = copied
        self.drop(lse, queries, *last)
        return out

    def feed_forward(self, n: int) -> int:
        """SwiGLU; return the output's block."""
        config = self.config
        hidden = n * config.hidden_dim * self.item
        gate = self.linear(n, config.hidden_dim, config.dim)
        up = self.linear(n, config.hidden_dim, config.dim)
        self.run(2 * hidden)
        self.run(3 * hidden)
        self.drop(up)
        out = self.linear(n, config.dim, config.hidden_dim)
        self.drop(gate)
        return out

    def head(self, n_wanted: int) -> int:
        """Logits of the wanted rows in float32; return their block."""
        config = self.config
        normed = self.norm(n_wanted)
        logits = self.linear(n_wanted, config.vocab_size, config.dim, OUTPUT_WEIGHTS)
        self.drop(normed)
        wide = n_wanted * config.vocab_size * 4
        if self.item < 4:
            narrow, logits = logits, self.new(wide)
            self.run(wide + n_wanted * config.vocab_size * self.item)
            self.drop(narrow)
        return logits

    def sample(self, n_wanted: int) -> None:
        """Choose greedily: one pass over the logits and a few tiny kernels."""
        self.run(n_wanted * self.config.vocab_size * 4)
        self.run(0, times=6)
