"""Small stand-ins for the model, the cache and the vocabulary, and a tiny real checkpoint.

The stand-ins test the loop around them. Their vocabulary is bytes behind three control tokens, and
both models look only at what the cache holds for a row, so that a wrong row, position or
truncation changes the answer.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from offload_llama.config import SamplingParams
from offload_llama.device.cpu import CpuDevice
from offload_llama.generate import Completion, Engine, Request, Run, Token

BOS, EOS, EOT = 0, 1, 2
FIRST_BYTE = 3
N_IDS = FIRST_BYTE + 256
VOCAB_SIZE = N_IDS + 5  # five rows of the output matrix stand for nothing


class ByteTokenizer:
    """One id per byte, and `<s>`, `</s>`, `<|eot|>`."""

    n_ids = N_IDS
    bos_id: int | None = BOS
    eos_id: int | None = EOS
    stop_ids = frozenset({EOS, EOT})
    control_ids: Mapping[str, int] = {"<s>": BOS, "</s>": EOS, "<|eot|>": EOT}
    adds_bos = True
    drops_first_space = False
    chat_template: str | None = None

    def encode(
        self, text: str, *, bos: bool = False, special: bool = False, guard: str = ""
    ) -> list[int]:
        ids = [FIRST_BYTE + byte for byte in text.encode()]
        return [BOS, *ids] if bos and self.adds_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i >= FIRST_BYTE).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < FIRST_BYTE:
            return self.token(token_id).encode()
        return bytes([token_id - FIRST_BYTE]) if token_id < N_IDS else b""

    def token(self, token_id: int) -> str:
        return {i: spelling for spelling, i in self.control_ids.items()}[token_id]


def ids_of(text: str) -> list[int]:
    """Return the ids of a text, without a begin token."""
    return ByteTokenizer().encode(text)


@dataclass
class FakeCache:
    """Rows as plain lists of ids, with the rules of a step: start, rollback, capacity.

    Counts 10 bytes up for each new token and 3 down for each cached one.
    """

    max_batch_size: int = 4
    max_seq_len: int = 64
    rows: list[list[int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    placements: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.max_batch_size)]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    @contextmanager
    def step(
        self, rows: list[int], start: list[int], n_new: list[int], logits: str = "last"
    ) -> Iterator[Any]:
        assert len(set(rows)) == len(rows) == len(start) == len(n_new) > 0
        before = {row: list(self.rows[row]) for row in rows}
        for row, first, count in zip(rows, start, n_new, strict=True):
            assert first <= len(self.rows[row]), "a step starts behind its row's end"
            assert first + count <= self.max_seq_len, "a row outgrew the context"
            del self.rows[row][first:]
            self.h2d_bytes += 3 * first
        try:
            yield SimpleNamespace(
                cache=self, rows=rows, start=start, n_new=n_new, logits=logits, upload=torch.tensor
            )
        except BaseException:
            for row, content in before.items():
                self.rows[row] = content
            raise
        self.d2h_bytes += 10 * sum(n_new)

    def truncate(self, row: int, length: int) -> None:
        assert length <= len(self.rows[row])
        del self.rows[row][length:]

    def free(self, row: int) -> None:
        self.rows[row] = []
        self.freed.append(row)

    def relieve(self) -> tuple[int, ...]:
        return ()

    def reset_counters(self) -> None:
        self.h2d_bytes = self.d2h_bytes = 0

    def stats(self) -> Any:
        return SimpleNamespace(
            host_kv_bytes=sum(self.lengths),
            device_kv_bytes=2 * sum(self.lengths),
            ring_bytes=0,
            pinned_bytes=4096,
            h2d_bytes=self.h2d_bytes,
            d2h_bytes=self.d2h_bytes,
        )

    def close(self) -> None:
        self.rows = []


@dataclass
class FakeModel:
    """Appends the new tokens to their rows and asks `logits_of` about each position's history.

    Attributes:
        steps: (rows, n_new, logits) of every forward pass.
        fail_at: number of the pass that raises `error` once, counted from 0.
    """

    logits_of: Callable[[tuple[int, ...]], torch.Tensor]
    steps: list[tuple[tuple[int, ...], tuple[int, ...], str]] = field(default_factory=list)
    fail_at: int | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("the model broke"))

    def buffers(self) -> Iterator[torch.Tensor]:
        return iter(())

    def __call__(self, tokens: torch.Tensor, step: Any) -> torch.Tensor | None:
        self.steps.append((tuple(step.rows), tuple(step.n_new), step.logits))
        new, out = tokens.tolist(), []
        assert len(new) == sum(step.n_new)
        for row, count in zip(step.rows, step.n_new, strict=True):
            cached = step.cache.rows[row]
            for number in range(count):
                cached.append(new.pop(0))
                if step.logits == "all" or (step.logits == "last" and number == count - 1):
                    out.append(self.logits_of(tuple(cached)))
        if self.fail_at == len(self.steps) - 1:
            self.fail_at = None
            raise self.error
        return torch.stack(out) if out else None


def hashed_logits(history: tuple[int, ...]) -> torch.Tensor:
    """Return logits that any change of the history changes; control tokens are unlikely."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(history).encode()))
    logits = 3 * torch.randn(VOCAB_SIZE, generator=generator)
    logits[:FIRST_BYTE] -= 30
    logits[N_IDS:] += 50
    return logits


def scripted(answers: Mapping[str, Sequence[int] | str]) -> Callable[..., torch.Tensor]:
    """Return logits that make each prompt (text with a begin token) be answered as written."""
    scripts = {
        (BOS, *ids_of(prompt)): ids_of(answer) if isinstance(answer, str) else list(answer)
        for prompt, answer in answers.items()
    }

    def logits_of(history: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(VOCAB_SIZE)
        for prompt, answer in scripts.items():
            if history[: len(prompt)] == prompt:
                logits[answer[len(history) - len(prompt)]] = 10.0
        return logits

    return logits_of


def engine(
    logits_of: Callable[[tuple[int, ...]], torch.Tensor] = hashed_logits,
    *,
    prefill_chunk: int = 512,
    tokenizer: Any = None,
    **cache: int,
) -> Any:
    """Return an engine of stand-ins on the CPU."""
    return Engine(
        model=FakeModel(logits_of),  # type: ignore[arg-type]  # a stand-in
        cache=FakeCache(**cache),  # type: ignore[arg-type]  # a stand-in
        device=CpuDevice(),
        tokenizer=tokenizer or ByteTokenizer(),
        prefill_chunk=prefill_chunk,
    )


def request(prompt: str, **settings: Any) -> Request:
    """Return a request for a text with a begin token; unknown settings are sampling ones."""
    own = {k: settings.pop(k) for k in ("logprobs", "prompt_logprobs") if k in settings}
    return Request(
        prompt_ids=(BOS, *ids_of(prompt)),
        params=SamplingParams(**settings),
        continues_text=True,
        **own,
    )


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions of one batch."""
    batch = Run(engine, requests)
    while not batch.done:
        batch.step()
    batch.close()
    return [batch.completions[index] for index in range(len(requests))]


def steps_of(engine: Engine, requests: Sequence[Request]) -> list[list[Token]]:
    """Return every step of one batch."""
    batch = Run(engine, requests)
    steps = []
    while not batch.done:
        steps.append(batch.step())
    return steps


TINY_VOCAB_SIZE = 256 + 256  # one rank per byte, and Llama 3's reserved control tokens
TINY_BOS, TINY_EOS, TINY_EOT = 256, 257, 265


def write_tiny_llama3(
    folder: Path, *, n_layers: int = 4, dtype: torch.dtype = torch.float32, max_seq_len: int = 256
) -> Path:
    """Write a random model in Meta's layout, with a Llama-3 tokenizer of single bytes.

    Its weights are drawn wide enough that each token depends on those before it.
    """
    dim, n_heads, n_kv_heads, hidden_dim = 64, 4, 2, 96
    generator = torch.Generator().manual_seed(11)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator) * (2 / columns) ** 0.5
        return weights.to(dtype)

    kv_dim = dim * n_kv_heads // n_heads
    tensors = {"tok_embeddings.weight": matrix(TINY_VOCAB_SIZE, dim) * 4}
    for layer in range(n_layers):
        at = f"layers.{layer}."
        tensors[at + "attention.wq.weight"] = matrix(dim, dim)
        tensors[at + "attention.wk.weight"] = matrix(kv_dim, dim)
        tensors[at + "attention.wv.weight"] = matrix(kv_dim, dim)
        tensors[at + "attention.wo.weight"] = matrix(dim, dim)
        tensors[at + "feed_forward.w1.weight"] = matrix(hidden_dim, dim)
        tensors[at + "feed_forward.w2.weight"] = matrix(dim, hidden_dim)
        tensors[at + "feed_forward.w3.weight"] = matrix(hidden_dim, dim)
        tensors[at + "attention_norm.weight"] = torch.ones(dim, dtype=dtype)
        tensors[at + "ffn_norm.weight"] = torch.ones(dim, dtype=dtype)
    tensors["norm.weight"] = torch.ones(dim, dtype=dtype)
    tensors["output.weight"] = matrix(TINY_VOCAB_SIZE, dim) * 4
    tensors["output.weight"][TINY_BOS:] *= 0.01  # control tokens stay rare
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "consolidated.00.pth")
    params = {
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "hidden_dim": hidden_dim,
        "vocab_size": TINY_VOCAB_SIZE,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_seq_len": max_seq_len,
    }
    (folder / "params.json").write_text(json.dumps(params), "utf-8")
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tokenizer.model").write_text("\n".join(ranks) + "\n", "ascii")
    return folder
