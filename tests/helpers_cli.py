"""A stand-in for a loaded model, so that tests of the command line's own logic take milliseconds.

It answers with the prompt in capitals, one character a token. Real models are in
`test_cli_process.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from offload_llama.config import SamplingParams
from offload_llama.errors import PromptTooLong, RequestError, TokenizerError
from offload_llama.generate import Completion, RunStats, Token
from offload_llama.policy import place
from offload_llama.steps import Interrupted

CONTEXT = 40


def a_completion(text: str, prompt: Sequence[int], reason: str, seed: int) -> Completion:
    """Return a completion with figures that a test can recognise."""
    stats = RunStats(
        prompt_tokens=len(prompt),
        cached_tokens=0,
        generated_tokens=len(text),
        ttft_s=0.25,
        prefill_s=0.5,
        decode_s=2.0,
        decode_ms=250.0,
        planned_decode_ms=200.0,
        peak_device_bytes=3 * 2**20,
        planned_peak_device_bytes=4 * 2**20,
        host_kv_bytes=2048,
        planned_host_kv_bytes=2048,
        device_kv_bytes=512,
        pinned_bytes=4096,
        h2d_bytes=9000,
        d2h_bytes=900,
        h2d_bytes_per_step=2048,
        d2h_bytes_per_step=64,
        simulated=False,
    )
    return Completion(
        text=text,
        token_ids=tuple(map(ord, text)),
        prompt_token_ids=tuple(prompt),
        finish_reason=reason,
        seed=seed,
        stats=stats,
    )


class StubStream:
    """What `stream` returns."""

    def __init__(self, tokens: Iterator[Token], partial: Callable[[], Completion | None]) -> None:
        self._tokens, self._partial = tokens, partial
        self.completion: Completion | None = None

    def __iter__(self) -> StubStream:
        return self

    def __next__(self) -> Token:
        token = next(self._tokens)
        self.completion = token.completion
        return token

    def close(self) -> None:
        """End early."""
        self.completion = self.completion or self._partial()


class StubLLM:
    """Has what the command line uses of `LLM`.

    Args:
        interrupt_after: raise KeyboardInterrupt after this many tokens of a stream, or answers of
            a batch.
        fail_with: raise this instead of answering.
    """

    def __init__(
        self,
        *,
        template: str | None = "template",
        interrupt_after: int | None = None,
        fail_with: BaseException | None = None,
        answer: str | None = None,
    ) -> None:
        self.chat_template = template
        self.interrupt_after, self.fail_with, self.fixed_answer = (
            interrupt_after,
            fail_with,
            answer,
        )
        self.cache = SimpleNamespace(max_seq_len=CONTEXT, dtype=torch.float32)
        self.checkpoint = SimpleNamespace(path=Path("stub.gguf"))
        self.device = SimpleNamespace(name="cpu", simulated=False)
        self.placements = place("gpu-layers:1", 2)
        self.seen: list[tuple[str, SamplingParams]] = []

    def __enter__(self) -> StubLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return list(map(ord, prompt)) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template")
        return list(map(ord, "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)))

    def check(self, ids: Sequence[int], *, name: str = "the prompt") -> tuple[int, ...]:
        if not ids:
            raise RequestError(f"{name} is empty")
        if len(ids) >= CONTEXT:
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens", prompt_tokens=len(ids), max_seq_len=CONTEXT
            )
        return tuple(ids)

    def _answer(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        ids = self.check(self.encode(prompt))
        text = "".join(map(chr, ids))
        self.seen.append((text, params))
        answer = text.upper() if self.fixed_answer is None else self.fixed_answer
        limit = params.max_tokens or len(answer)
        reason = "length" if limit < len(answer) else "eos"
        return a_completion(answer[:limit], ids, reason, 77 if params.seed is None else params.seed)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> StubStream:
        whole = self._answer(prompt, params)
        shown: list[str] = []

        def tokens() -> Iterator[Token]:
            if self.fail_with is not None and self.interrupt_after is None:
                raise self.fail_with
            for place_, character in enumerate(whole.text):
                if place_ == self.interrupt_after:
                    raise self.fail_with or KeyboardInterrupt
                shown.append(character)
                last = place_ + 1 == len(whole.text)
                yield Token(
                    index=0,
                    token_id=ord(character),
                    text=character,
                    finish_reason=whole.finish_reason if last else None,
                    completion=whole if last else None,
                )

        def partial() -> Completion | None:
            # One character more than was shown: it was held back.
            text = whole.text[: len(shown) + 1]
            ids = whole.prompt_token_ids
            return a_completion(text, ids, "interrupted", whole.seed) if shown else None

        return StubStream(tokens(), partial)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        on_done: Callable[[int, Completion], None],
    ) -> list[Completion]:
        done = [self._answer(*both) for both in zip(prompts, params, strict=True)]
        if self.interrupt_after is not None:
            for index, completion in enumerate(done[: self.interrupt_after]):
                on_done(index, completion)
            begun = done[self.interrupt_after]
            cut = a_completion(begun.text[:1], begun.prompt_token_ids, "interrupted", begun.seed)
            raise Interrupted([*done[: self.interrupt_after], cut])
        for index in (*range(1, len(done)), 0)[: len(done)]:  # the first one finishes last
            on_done(index, done[index])
        return done


def write_lines(path: Path, *lines: Any, prefix: bytes = b"", end: str = "\n") -> str:
    """Write a batch file and return its name."""
    path.write_bytes(prefix + end.join(map(str, lines)).encode() + end.encode())
    return str(path)
