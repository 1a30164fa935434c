"""What one forward pass allocates and how long its kernels take, operation by operation.

This mirrors `model.py` and `attention.py` in the order in which they allocate and let go, with the
sizes that follow from the shapes. It knows the card's figures and nothing of any device: the
simulated card, which sizes and times real operands, must agree with it.
"""

from __future__ import annotations

from offload_llama.cost.setup import Setup, matrix_bytes, rounded
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

    def linear(self, n: int, rows: int, columns: int) -> int:
        """y (n, rows) = x (n, columns) Wᵀ; return the output's block."""
        out = n * rows * self.item
        weight = matrix_bytes(self.setup, rows, columns)
        self.run(n * columns * self.item + weight + out, 2.0 * n * rows * columns)
        return self.new(out)

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

    def rotary(self, n: int, heads: int) -> int:
        """Rotate (n, heads, D); return the output's block. The input is still held."""
        size, half = n * heads * self.config.head_dim * self.item, n * heads * self.config.head_dim
        half *= 2  # float32, half of the head
        angles = n * self.config.head_dim * 2
        up = 0
        if self.item < 4:
            up = self.new(2 * half)
            self.run(size + 2 * half)
        turned = []
        for _ in range(2):
            products = self.new(half), self.new(half)
            self.run(2 * half + angles, times=2)
            turned.append(self.new(half))
            self.run(3 * half)
            self.drop(*products)
        out = self.new(2 * half)
        self.run(4 * half)
        self.drop(*turned)
        if self.item < 4:
            narrow = self.new(size)
            self.run(2 * half + size)
            self.drop(out, up)
            out = narrow
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
        gated = self.new(hidden)
        self.run(2 * hidden)
        self.drop(gate)
        up = self.linear(n, config.hidden_dim, config.dim)
        self.run(3 * hidden)
        self.drop(up)
        out = self.linear(n, config.dim, config.hidden_dim)
        self.drop(gated)
        return out

    def head(self, n_wanted: int) -> int:
        """Logits of the wanted rows in float32; return their block."""
        config = self.config
        normed = self.norm(n_wanted)
        logits = self.linear(n_wanted, config.vocab_size, config.dim)
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
