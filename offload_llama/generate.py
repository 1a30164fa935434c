"""Chunked prefill, the decode loop and stopping: requests in, steps of tokens out.

A `Run` takes up to `max_batch_size` requests through the model together. Each prompt is filled in
alone, chunk by chunk; then one packed step per token carries every sequence that is not done.
Sequences end at different times, and their cache rows are free from that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from offload_llama.cache import KVCache
from offload_llama.config import SamplingParams
from offload_llama.device.api import Device
from offload_llama.errors import RequestError
from offload_llama.model import Transformer
from offload_llama.policy import Placement
from offload_llama.sampling import Choice, Sampler, sample
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.stream import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a run works with. `prefill_chunk` is the most prompt tokens in one forward pass."""

    model: Transformer
    cache: KVCache
    device: Device
    tokenizer: Tokenizer
    prefill_chunk: int

    def close_cache(self) -> None:
        """Give the cache's memory back."""
        with self.device.scope():
            self.cache.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, at least one token and shorter than the context, and how to go on from it.

    `continues_text` says that the answer goes on from the prompt's text, so that a space between
    the two belongs to it; a chat's reply is a text of its own. `logprobs` asks for the
    log-probability of each generated token, `prompt_logprobs` for that of each prompt token after
    the first. Both are the model's own: before penalty, temperature and filters.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    continues_text: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """What one sequence cost.

    Times are those of the model's own work on the device's clock, without what the caller does
    between steps. `ttft_s` runs from the start of the batch to this sequence's first token,
    `prefill_s` is its own prompt, `decode_s` all steps after the batch's prompts, to its end.
    Bytes are those of the whole batch: KV bytes and peak as this sequence ended, copies since the
    batch began, `_per_step` over the decode steps alone.
    """

    prompt_tokens: int
    generated_tokens: int
    ttft_s: float
    prefill_s: float
    decode_s: float
    peak_device_bytes: int
    host_kv_bytes: int
    device_kv_bytes: int
    pinned_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    h2d_bytes_per_step: int
    d2h_bytes_per_step: int
    simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request.

    `finish_reason`: "eos" (the model ended it), "stop" (a stop string or id the caller gave),
    "length" (`max_tokens`), "context" (prompt and answer fill the context) or "interrupted".
    `text` ends before a stop string. `token_ids` are all generated ids but an id that ended the
    text; with `ignore_eos` end-of-text ids are ordinary and stay in. `logprobs` is parallel to
    `token_ids`, `prompt_logprobs` to all but the first of `prompt_token_ids`.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    stats: RunStats
    logprobs: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None

    def as_dict(self, placements: Sequence[Placement] = ()) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": asdict(self.stats),
            "placements": [asdict(placement) for placement in placements],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token of one request.

    `text` is what may be shown now: it can be empty (half a character, or what may become a stop
    string) and can bring along what was held back before. The last token of a request carries
    `finish_reason` and `completion`; if an id ended the text, `token_id` is that id.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None = None
    completion: Completion | None = None


class _Sequence:
    """One request while it runs: its row in the cache, its tokens so far, its times."""

    def __init__(self, index: int, row: int, request: Request, engine: Engine) -> None:
        params, tokenizer = request.params, engine.tokenizer
        self.index, self.row, self.request = index, row, request
        self.sampler = Sampler(params, prompt_ids=request.prompt_ids, logprobs=request.logprobs)
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_ids=request.prompt_ids if request.continues_text else (),
            stop=params.stop,
        )
        self.eos_ids = frozenset[int]() if params.ignore_eos else tokenizer.stop_ids
        spelled = (tokenizer.control_ids.get(stop) for stop in params.stop)
        self.stop_ids = {*params.stop_token_ids, *(i for i in spelled if i is not None)}
        room = engine.cache.max_seq_len - len(request.prompt_ids)
        if params.max_tokens is not None and params.max_tokens <= room:
            self.limit_tokens, self.limit_reason = params.max_tokens, "length"
        else:
            self.limit_tokens, self.limit_reason = room, "context"
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.prefill_s = self.ttft_s = 0.0
        self.decode_steps = 0

    def accept(self, token_id: int, logprob: float | None) -> str:
        """Append a sampled token and return the text to show; sets `finish_reason` at the end."""
        text = ""
        if token_id in self.eos_ids:
            self.finish_reason = "eos"
        elif token_id in self.stop_ids:
            self.finish_reason = "stop"
        else:
            self.token_ids.append(token_id)
            if logprob is not None:
                self.logprobs.append(logprob)
            text = self.detokenizer.push(token_id)
            if self.detokenizer.stopped:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.limit_tokens:
                self.finish_reason = self.limit_reason
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
        return text


class Run:
    """One batch of requests on its way through the model: `step` until `done`, then `close`.

    Attributes:
        completions: the finished requests by index; after `close` all that had begun.

    Args:
        requests: at most as many as the cache has rows, already checked.
        first_index: number of the first request, where they are a slice of a longer list.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], *, first_index: int = 0
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self._engine = engine
        self._waiting = deque(
            _Sequence(first_index + row, row, request, engine)
            for row, request in enumerate(requests)
        )
        self._active: list[_Sequence] = []
        self._worked_s = 0.0
        self._work_began_s = 0.0
        self._prompts_end_s = 0.0
        self._prompts_h2d_bytes = self._prompts_d2h_bytes = 0
        with self._work():
            engine.device.synchronize()
            engine.device.reset_peak()
            engine.cache.reset_counters()

    @property
    def done(self) -> bool:
        """Whether every request is finished, or the run was closed."""
        return not (self._waiting or self._active)

    def step(self) -> list[Token]:
        """Return the next tokens: one prompt's first one, or one more of each active request.

        Whatever is raised in here, or interrupts it, leaves the run to be closed.

        Raises:
            RequestError: the run is done or closed.
        """
        if self.done:
            raise RequestError("this generation is over; start another one")
        with self._work():
            if self._waiting:
                sequence = self._waiting.popleft()
                self._active.append(sequence)
                return self._emit([sequence], [self._prefill(sequence)])
            return self._emit(self._active, self._decode())

    def close(self, *, interrupted: bool = True) -> None:
        """Free the run's rows in the cache; a second call changes nothing.

        Args:
            interrupted: give each unfinished request a completion of what it has so far, with the
                reason "interrupted". Leave it off where the device may be in trouble.
        """
        unfinished, self._active = self._active, []
        self._waiting.clear()
        if not unfinished:
            return
        with self._work():
            try:
                if interrupted:
                    for sequence in unfinished:
                        sequence.detokenizer.finish()
                        sequence.finish_reason = "interrupted"
                    self._complete(unfinished)
            finally:
                for sequence in unfinished:
                    self._engine.cache.free(sequence.row)

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Let tensors be touched inside, and count the time."""
        with self._engine.device.scope(), torch.no_grad():
            self._work_began_s = self._engine.device.clock()
            try:
                yield
            finally:
                self._worked_s = self._now_s()

    def _now_s(self) -> float:
        """Return the time worked so far; only inside `_work`."""
        return self._worked_s + self._engine.device.clock() - self._work_began_s

    def _prefill(self, sequence: _Sequence) -> Choice:
        """Run one prompt through the model, chunk by chunk, and return its first token."""
        engine, ids, row = self._engine, sequence.request.prompt_ids, sequence.row
        began_s = self._now_s()
        for start in range(0, len(ids), engine.prefill_chunk):
            chunk = ids[start : start + engine.prefill_chunk]
            end = start + len(chunk)
            wanted = "last" if end == len(ids) else "none"
            if sequence.request.prompt_logprobs:
                wanted = "all"
            with engine.cache.step([row], [start], [len(chunk)], logits=wanted) as step:
                logits = engine.model(step.upload(list(chunk)), step)
            if sequence.request.prompt_logprobs:
                assert logits is not None
                following = ids[start + 1 : end + 1]
                sequence.prompt_logprobs += _logprobs_of(logits[: len(following)], following)
        assert logits is not None
        [choice] = sample(logits[-1:], [sequence.sampler], engine.tokenizer.n_ids)
        engine.device.synchronize()
        sequence.ttft_s = self._prompts_end_s = self._now_s()
        sequence.prefill_s = sequence.ttft_s - began_s
        copied = engine.cache.stats()
        self._prompts_h2d_bytes, self._prompts_d2h_bytes = copied.h2d_bytes, copied.d2h_bytes
        return choice

    def _decode(self) -> list[Choice]:
        """Run the newest token of every active sequence through the model; return the next."""
        engine, active = self._engine, self._active
        rows = [s.row for s in active]
        starts = [len(s.request.prompt_ids) + len(s.token_ids) - 1 for s in active]
        newest = [s.token_ids[-1] for s in active]
        with engine.cache.step(rows, starts, [1] * len(active), logits="last") as step:
            logits = engine.model(step.upload(newest), step)
        for sequence in active:
            sequence.decode_steps += 1
        assert logits is not None
        return sample(logits, [s.sampler for s in active], engine.tokenizer.n_ids)

    def _emit(self, sequences: list[_Sequence], choices: list[Choice]) -> list[Token]:
        """Append the choices, complete and free what ends with them, and return the tokens."""
        sequences = list(sequences)
        texts = [s.accept(*choice) for s, choice in zip(sequences, choices, strict=True)]
        finished = [s for s in sequences if s.finish_reason is not None]
        if finished:
            self._complete(finished)
            self._active = [s for s in self._active if s.finish_reason is None]
            for sequence in finished:
                self._engine.cache.free(sequence.row)
        return [
            Token(
                index=s.index,
                token_id=choice.token_id,
                text=text,
                finish_reason=s.finish_reason,
                completion=self.completions.get(s.index),
            )
            for s, choice, text in zip(sequences, choices, texts, strict=True)
        ]

    def _complete(self, sequences: list[_Sequence]) -> None:
        """Put the completions of ended sequences down, while their rows are still there."""
        device, cache = self._engine.device, self._engine.cache
        device.synchronize()
        now_s, held, peak_bytes = self._now_s(), cache.stats(), device.memory().peak_bytes
        for sequence in sequences:
            request, steps = sequence.request, sequence.decode_steps
            h2d_bytes = held.h2d_bytes - self._prompts_h2d_bytes
            d2h_bytes = held.d2h_bytes - self._prompts_d2h_bytes
            stats = RunStats(
                prompt_tokens=len(request.prompt_ids),
                generated_tokens=len(sequence.token_ids),
                ttft_s=sequence.ttft_s,
                prefill_s=sequence.prefill_s,
                decode_s=now_s - self._prompts_end_s if steps else 0.0,
                peak_device_bytes=peak_bytes,
                host_kv_bytes=held.host_kv_bytes,
                device_kv_bytes=held.device_kv_bytes,
                pinned_bytes=held.pinned_bytes,
                h2d_bytes=held.h2d_bytes,
                d2h_bytes=held.d2h_bytes,
                h2d_bytes_per_step=round(h2d_bytes / steps) if steps else 0,
                d2h_bytes_per_step=round(d2h_bytes / steps) if steps else 0,
                simulated=device.simulated,
            )
            assert sequence.finish_reason is not None
            self.completions[sequence.index] = Completion(
                text=sequence.detokenizer.text,
                token_ids=tuple(sequence.token_ids),
                prompt_token_ids=request.prompt_ids,
                finish_reason=sequence.finish_reason,
                seed=sequence.sampler.seed,
                stats=stats,
                logprobs=tuple(sequence.logprobs) if request.logprobs else None,
                prompt_logprobs=(
                    tuple(sequence.prompt_logprobs) if request.prompt_logprobs else None
                ),
            )


def _logprobs_of(logits: torch.Tensor, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of ids[i] under logits[i]: (n, V) on the device, n ids."""
    if not ids:
        return []
    chosen = torch.tensor(ids).to(logits.device)
    picked = logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1)
    values: list[float] = picked.cpu().tolist()
    return values
