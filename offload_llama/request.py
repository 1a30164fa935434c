"""What is asked of a run, how far it has come, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offload_llama.config import SamplingParams
from offload_llama.policy import Placement
from offload_llama.sampling import Sampler
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.stream import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, at least one token and shorter than the context, and how to go on from it.

    `continues_text` says that the answer goes on from the prompt's text, so that a space between
    the two belongs to it; a chat's reply is a text of its own. `logprobs` asks for the
    log-probability of each generated token, `prompt_logprobs` for that of each prompt token after
    the first. Both are the model's own: before penalty, temperature and filters. `keep` leaves the
    sequence in the cache for the next run: if that keeps its sequence too, what the two have in
    common at their beginnings is not computed again.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    continues_text: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """What one sequence cost.

    Times are those of the model's own work on the device's clock, without what the caller does
    between steps. `ttft_s` runs from the start of the batch to this sequence's first token,
    `prefill_s` is its own prompt, `decode_s` all steps after the batch's prompts, to its end.
    Bytes are those of the whole batch: KV bytes and peak as this sequence ended, copies since the
    batch began, `_per_step` over the decode steps alone. `decode_ms` is a step's average, None if
    there was none. `cached_tokens` of the prompt were kept from an earlier run.
    `planned_...` is what the plan's formulas give for prompts, tokens and placement as they came to
    be; None where nothing was planned.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float
    prefill_s: float
    decode_s: float
    decode_ms: float | None
    planned_decode_ms: float | None
    peak_device_bytes: int
    planned_peak_device_bytes: int | None
    host_kv_bytes: int
    planned_host_kv_bytes: int | None
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


class Progress:
    """One request while it runs: its row in the cache, its tokens so far, its times."""

    def __init__(
        self, index: int, row: int, request: Request, tokenizer: Tokenizer, max_seq_len: int
    ) -> None:
        params = request.params
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
        room = max_seq_len - len(request.prompt_ids)
        if params.max_tokens is not None and params.max_tokens <= room:
            self.limit_tokens, self.limit_reason = params.max_tokens, "length"
        else:
            self.limit_tokens, self.limit_reason = room, "context"
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0
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
