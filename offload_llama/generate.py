"""Chunked prefill, the decode loop and stopping: requests in, steps of tokens out.

A `Run` takes up to `max_batch_size` requests through the model together. Each prompt is filled in
alone, chunk by chunk; then one packed step per token carries every sequence that is not done.
Sequences end at different times, and their cache rows are free from that moment.

When the card's memory runs out, layers move to the host and the same step runs again. If none is
left, the youngest sequence gives its row back and is filled in again once another has finished.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from offload_llama.device.api import DeviceMemory
from offload_llama.engine import Engine
from offload_llama.errors import OutOfMemory, RequestError
from offload_llama.forecast import Expected, Extent, expected
from offload_llama.oom import attempt, out_of_memory
from offload_llama.request import Completion, Progress, Request, RunStats, Token
from offload_llama.sampling import Choice, logprobs_of, sample

__all__ = ["Completion", "Engine", "Request", "Run", "RunStats", "Token"]

Result = TypeVar("Result")


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
            Progress(first_index + row, row, request, engine.tokenizer, engine.cache.max_seq_len)
            for row, request in enumerate(requests)
        )
        self._rows = len(requests)
        self._longest_prompt = max((len(r.prompt_ids) for r in requests), default=0)
        self._active: list[Progress] = []
        self._crowded = False
        self._worked_s = 0.0
        self._work_began_s = 0.0
        self._prompts_end_s = 0.0
        self._prompts_h2d_bytes = self._prompts_d2h_bytes = 0
        with self._work():
            engine.device.synchronize()
            engine.device.reset_peak()
            engine.cache.reset_counters()
            self._take_over()

    @property
    def done(self) -> bool:
        """Whether every request is finished, or the run was closed."""
        return not (self._waiting or self._active)

    def step(self) -> list[Token]:
        """Return the next tokens: one prompt's first one, or one more of each active request.

        Whatever is raised in here, or interrupts it, leaves the run to be closed.

        Raises:
            RequestError: the run is done or closed.
            OutOfMemory: the card has no memory for one sequence alone, or nothing may give way.
        """
        if self.done:
            raise RequestError("this generation is over; start another one")
        with self._work():
            if self._waiting and not (self._crowded and self._active):
                sequence = self._waiting.popleft()
                self._active.append(sequence)
                choice = self._prefill(sequence)
                if choice is not None:
                    return self._emit([sequence], [choice])
            choices = self._decode()
            return self._emit(self._active, choices)

    def close(self, *, interrupted: bool = True) -> None:
        """Free the run's rows in the cache; a second call changes nothing.

        Args:
            interrupted: give each unfinished request a completion of what it has so far, with the
                reason "interrupted". Leave it off where the device may be in trouble.
        """
        waiting, self._waiting = self._waiting, deque()
        begun, self._active = [*self._active, *(s for s in waiting if s.token_ids)], []
        held = [s for s in waiting if s.cached_tokens and not s.token_ids]
        if not (begun or held):
            return
        with self._work():
            try:
                if interrupted:
                    for sequence in begun:
                        sequence.detokenizer.finish()
                        sequence.finish_reason = "interrupted"
                    self._complete(begun)
            finally:
                for sequence in (*begun, *held):
                    self._leave(sequence, keep=interrupted)

    def _take_over(self) -> None:
        """Go on from kept sequences where a prompt of this run begins alike; free the others."""
        engine, asking = self._engine, {s.row: s for s in self._waiting if s.request.keep}
        for row, ids in engine.kept.items():
            if row in asking:
                prompt = asking[row].request.prompt_ids
                # The last token of a prompt is computed in any case: the answer begins there.
                alike = itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(ids, prompt[:-1], strict=False)
                )
                asking[row].cached_tokens = sum(1 for _ in alike)
                engine.cache.truncate(row, asking[row].cached_tokens)
            else:
                engine.cache.free(row)
        engine.kept.clear()

    def _leave(self, sequence: Progress, *, keep: bool = True) -> None:
        """Free the row of an ended sequence, unless it is to be kept and may be."""
        cache, row = self._engine.cache, sequence.row
        if keep and sequence.request.keep:
            ids = (*sequence.request.prompt_ids, *sequence.token_ids)
            self._engine.kept[row] = ids[: cache.lengths[row]]
        else:
            cache.free(row)

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

    def _prefill(self, sequence: Progress) -> Choice | None:
        """Run one prompt, and what was answered so far, through the model, chunk by chunk.

        Returns the next token; None if there was no room beside the others, and it waits again.
        """
        engine, resumed = self._engine, bool(sequence.token_ids)
        ids = (*sequence.request.prompt_ids, *sequence.token_ids)
        scored = sequence.request.prompt_logprobs and not resumed
        if scored:
            sequence.prompt_logprobs = []
            sequence.cached_tokens = 0
        began_s = self._now_s()
        try:
            size = engine.prefill_chunk
            starts = [s for s in range(0, len(ids), size) if s + size > sequence.cached_tokens]
            for start in (max(first, sequence.cached_tokens) for first in starts):
                end = min(start - start % size + size, len(ids))
                chunk = ids[start:end]
                wanted = "all" if scored else "last" if end == len(ids) else "none"
                logits = self._forward("prefill", [sequence.row], [start], [chunk], wanted)
                if scored:
                    assert logits is not None
                    following = ids[start + 1 : end + 1]
                    score = partial(logprobs_of, logits[: len(following)], following)
                    sequence.prompt_logprobs += self._attempt("prefill", score)
            assert logits is not None
            [choice] = self._sample("prefill", logits[-1:], [sequence])
        except OutOfMemory:
            if not self._set_aside():
                raise
            return None
        if resumed:
            sequence.decode_steps += 1
            return choice
        engine.device.synchronize()
        sequence.ttft_s = self._prompts_end_s = self._now_s()
        sequence.prefill_s = sequence.ttft_s - began_s
        copied = engine.cache.stats()
        self._prompts_h2d_bytes, self._prompts_d2h_bytes = copied.h2d_bytes, copied.d2h_bytes
        return choice

    def _decode(self) -> list[Choice]:
        """Run the newest token of every active sequence through the model; return the next.

        Those that had to give way are no longer active afterwards.
        """
        while True:
            active = list(self._active)
            starts = [len(s.request.prompt_ids) + len(s.token_ids) - 1 for s in active]
            newest = [s.token_ids[-1:] for s in active]
            try:
                logits = self._forward("decode", [s.row for s in active], starts, newest, "last")
                assert logits is not None
                choices = self._sample("decode", logits, active)
            except OutOfMemory:
                if not self._set_aside():
                    raise
                continue
            for sequence in active:
                sequence.decode_steps += 1
            return choices

    def _forward(
        self,
        phase: str,
        rows: Sequence[int],
        starts: Sequence[int],
        new: Sequence[Sequence[int]],
        wanted: str,
    ) -> torch.Tensor | None:
        """Run new tokens of some rows through the model and return the logits that are wanted."""
        engine = self._engine

        def once() -> torch.Tensor | None:
            with engine.cache.step(rows, starts, [len(ids) for ids in new], logits=wanted) as step:
                logits: torch.Tensor | None = engine.model(
                    step.upload([i for ids in new for i in ids]), step
                )
                return logits

        return self._attempt(phase, once)

    def _sample(
        self, phase: str, logits: torch.Tensor, sequences: Sequence[Progress]
    ) -> list[Choice]:
        samplers = [sequence.sampler for sequence in sequences]
        return self._attempt(phase, partial(sample, logits, samplers, self._engine.tokenizer.n_ids))

    def _attempt(self, phase: str, action: Callable[[], Result]) -> Result:
        """Return `action()`, moving layers to the host for as long as memory runs out.

        Raises:
            OutOfMemory: no layer is left to move, or none may.
        """
        engine = self._engine

        def relieve() -> tuple[int, ...]:
            return engine.cache.relieve() if engine.fallback else ()

        def report(said: str, memory: DeviceMemory) -> OutOfMemory:
            return out_of_memory(phase, said, memory, engine.setup, engine.cache)

        return attempt(action, relieve, engine.device, report)

    def _set_aside(self) -> bool:
        """Let the youngest sequence wait until another has finished; return whether one can."""
        engine = self._engine
        if len(self._active) < 2 or not (engine.fallback and engine.preempt):
            return False
        sequence = self._active.pop()
        engine.cache.free(sequence.row)
        sequence.cached_tokens = 0
        self._waiting.appendleft(sequence)
        self._crowded = True
        engine.notify(
            f"prompt {sequence.index + 1} waits until another has finished: the card's memory "
            "holds no more sequences"
        )
        return True

    def _emit(self, sequences: list[Progress], choices: list[Choice]) -> list[Token]:
        """Append the choices, complete and free what ends with them, and return the tokens."""
        sequences = list(sequences)
        texts = [s.accept(*choice) for s, choice in zip(sequences, choices, strict=True)]
        finished = [s for s in sequences if s.finish_reason is not None]
        if finished:
            self._complete(finished)
            self._crowded = False
            self._active = [s for s in self._active if s.finish_reason is None]
            for sequence in finished:
                self._leave(sequence)
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

    def _planned(self, sequences: Sequence[Progress]) -> Expected | None:
        """Return what was to be expected of the batch as it stands."""
        engine = self._engine
        if engine.plan is None:
            return None
        lengths = [len(s.request.prompt_ids) + len(s.token_ids) for s in sequences]
        hosts = [placement.store == "host" for placement in engine.cache.placements]
        return expected(
            engine.plan,
            hosts,
            Extent(
                rows=self._rows, prompt_tokens=self._longest_prompt, tokens=max(lengths, default=1)
            ),
        )

    def _complete(self, sequences: list[Progress]) -> None:
        """Put the completions of ended sequences down, while their rows are still there."""
        device, cache = self._engine.device, self._engine.cache
        device.synchronize()
        now_s, held, peak_bytes = self._now_s(), cache.stats(), device.memory().peak_bytes
        planned = self._planned(sequences)
        for sequence in sequences:
            request, steps = sequence.request, sequence.decode_steps
            h2d_bytes = held.h2d_bytes - self._prompts_h2d_bytes
            d2h_bytes = held.d2h_bytes - self._prompts_d2h_bytes
            stats = RunStats(
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=sequence.cached_tokens,
                generated_tokens=len(sequence.token_ids),
                ttft_s=sequence.ttft_s,
                prefill_s=sequence.prefill_s,
                decode_s=now_s - self._prompts_end_s if steps else 0.0,
                decode_ms=1e3 * (now_s - self._prompts_end_s) / steps if steps else None,
                planned_decode_ms=1e3 * planned.decode_s if planned and steps else None,
                peak_device_bytes=peak_bytes,
                planned_peak_device_bytes=planned.peak_device_bytes if planned else None,
                host_kv_bytes=held.host_kv_bytes,
                planned_host_kv_bytes=planned.host_kv_bytes if planned else None,
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
