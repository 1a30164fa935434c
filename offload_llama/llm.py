"""`LLM`: loads a model, joins its parts and answers prompts. The one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offload_llama.admission import GREEDY, Admission, Prompt
from offload_llama.cache import KVCache
from offload_llama.checkpoint.api import Checkpoint
from offload_llama.checkpoint.load import load_weights
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.config import DTYPES, ModelConfig, SamplingParams
from offload_llama.cost import RUNNABLE_KV, RUNNABLE_WEIGHTS
from offload_llama.cost.packing import PACKED
from offload_llama.device import Device, open_device
from offload_llama.errors import ConfigError
from offload_llama.fitting import (
    Wishes,
    batch_size,
    dtype_name,
    fit,
    require_one_kind,
    require_runnable,
)
from offload_llama.forecast import moved_line
from offload_llama.generate import Completion, Engine, Request
from offload_llama.model import Transformer
from offload_llama.planner import MemoryPlan
from offload_llama.policy import Placement
from offload_llama.steps import Interrupted, Steps, Stream, Turn
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.chat import Message, encode_chat
from offload_llama.tokenizer.chat_templates import BUILT_IN
from offload_llama.tokenizer.open import open_tokenizer


class LLM:
    """A loaded model with its cache on one device; made by `LLM.load`.

    One run has the cache at a time: calls from several threads wait for each other. A `stream`
    or `steps` iterator holds it from its first item until it ends, is closed or is dropped.

    Attributes:
        checkpoint: the model's files (closed after loading), with their format and path.
        plan: what it was loaded with; None where device and host memory are the same.
        chat_template: what `encode_chat` uses: the one given, else the model's own, else None.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        checkpoint: Checkpoint,
        plan: MemoryPlan | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.chat_template = chat_template or engine.tokenizer.chat_template
        self._turn = Turn(engine)
        self._admission = Admission(
            config=checkpoint.config,
            tokenizer=engine.tokenizer,
            max_seq_len=engine.cache.max_seq_len,
        )

    @classmethod
    def load(
        cls,
        model: str | Path = "smollm2-135m",
        *,
        tokenizer: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        kv_dtype: str = "auto",
        kv_policy: str = "auto",
        ctx: int | None = None,
        max_batch_size: int | str = 1,
        prefill_chunk: int = 512,
        part_tokens: int | None = None,
        flush_tokens: int | None = None,
        ring_slots: int | None = None,
        reserve_bytes: int | None = None,
        ram_bytes: int | None = None,
        vram_bytes: int | None = None,
        fallback: bool = True,
        plan: Mapping[str, Any] | None = None,
        pin: bool = True,
        chat_template: str | None = None,
        progress: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> LLM:
        """Return a model ready to answer. What can be refused is refused before weights are read.

        Args:
            model: a folder, a file, a repository id or the short name of an installed model.
            tokenizer: a tokenizer's file or folder, where it is not beside the model.
            dtype: of weights and cache. "auto" is float32 on the CPU, and on a card bfloat16
                where it has it, else float16.
            weights: how the matrices are kept: "auto" is as they were saved packed, else `dtype`;
                int8, int4 and int4-g32 pack them while they load.
            kv_dtype: how keys and values are kept; "auto" is `dtype`.
            kv_policy: where each layer's keys and values live (see `policy`). "auto" keeps all on
                the card as long as they fit, and moves layers to the host as the context grows.
            ctx: tokens one sequence may have, prompt and answer; if None what the model allows, or
                less where that does not fit.
            max_batch_size: sequences that run together; "auto" for as many as fit.
            prefill_chunk: most prompt tokens in one forward pass.
            part_tokens, flush_tokens, ring_slots: sizes of the cache, None for its own choice.
            reserve_bytes: device memory to keep free; None for a share of it.
            ram_bytes, vram_bytes: memory that may be used; None for what is free.
            fallback: move a layer to the host where device memory runs out; if False, raise.
            plan: a saved plan (`plan --json`) to be replayed.
            pin: page-lock the host memory of offloaded layers.
            chat_template: a jinja file, jinja text or a built-in's name, in place of the model's.
            progress: show a bar on standard error while weights load.
            notify: is told in one line each what the user should know.

        Raises:
            ConfigError: a setting is not possible for this model.
            DoesNotFit: the memory does not suffice; the message says what would fit.
            CheckpointError: the model's files are missing, damaged or not supported.
            TokenizerError: its vocabulary cannot be used.
            DeviceError: the device is not here.
        """
        say = notify or _say_nothing
        if dtype not in ("auto", *DTYPES):
            raise ConfigError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
        batch = batch_size(max_batch_size)
        _require_positive("--prefill-chunk", prefill_chunk)
        for flag, name, runnable in (
            ("--weights", weights, RUNNABLE_WEIGHTS),
            ("--kv-dtype", kv_dtype, RUNNABLE_KV),
        ):
            require_runnable(flag, name, runnable)
        template = None if chat_template is None else _read_template(chat_template)
        with ExitStack() as undo:
            checkpoint = open_checkpoint(str(model))
            undo.callback(checkpoint.close)
            config = checkpoint.config
            vocabulary = open_tokenizer(
                checkpoint.path if tokenizer is None else Path(tokenizer),
                model_stop_ids=checkpoint.stop_token_ids,
            )
            card = open_device(device)
            undo.callback(card.close)
            weights = weights if weights != "auto" else checkpoint.weights or "auto"
            dtype = dtype_name(dtype, card)
            require_one_kind(weights, dtype)
            torch_dtype: torch.dtype = getattr(torch, dtype)
            wishes = Wishes(
                weights=weights,
                kv_dtype=kv_dtype,
                dtype=dtype,
                kv_policy=kv_policy,
                ctx=ctx,
                max_batch_size=batch,
                prefill_chunk=prefill_chunk,
                part_tokens=part_tokens,
                flush_tokens=flush_tokens,
                ring_slots=ring_slots,
                reserve_bytes=reserve_bytes,
                ram_bytes=ram_bytes,
                vram_bytes=vram_bytes,
                saved=plan,
            )
            with card.scope(), torch.no_grad():
                found = fit(config, card, wishes, say)
                narrator = _Narrator(found.plan, say)
                transformer = Transformer(config)
                # Before the weights: this checks the cache's settings, and its rows come with use.
                cache = KVCache(
                    config,
                    card,
                    found.placements,
                    dtype=torch_dtype,
                    max_batch_size=found.max_batch_size,
                    max_seq_len=found.max_seq_len,
                    part_tokens=part_tokens,
                    flush_tokens=flush_tokens,
                    ring_slots=ring_slots if found.plan is None else found.plan.ring_slots,
                    kv_budget_bytes=None if found.plan is None else found.plan.kv_budget_bytes,
                    on_move=narrator.moved,
                    pin=pin,
                    warn=say,
                )
                narrator.cache = cache
                engine = Engine(
                    model=transformer,
                    cache=cache,
                    device=card,
                    tokenizer=vocabulary,
                    prefill_chunk=prefill_chunk,
                    fallback=fallback,
                    notify=say,
                    plan=found.plan,
                )
                undo.callback(engine.close_cache)
                transformer.use_cache(cache)
                load_weights(
                    transformer,
                    checkpoint,
                    device=card,
                    dtype=torch_dtype,
                    progress=progress,
                    weights=weights if weights in PACKED else None,
                )
            undo.pop_all()
        checkpoint.close()
        return cls(engine, checkpoint=checkpoint, plan=found.plan, chat_template=template)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.checkpoint.config

    @property
    def model(self) -> Transformer:
        """The transformer; once closed, this and the next three raise RequestError."""
        return self._turn.engine.model

    @property
    def cache(self) -> KVCache:
        """The KV cache of all sequences."""
        return self._turn.engine.cache

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where each layer's keys and values are now, and why."""
        return self.cache.placements

    @property
    def device(self) -> Device:
        """Where the weights are and the work is done."""
        return self._turn.engine.device

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary."""
        return self._turn.engine.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: text as it stands, ids as they are.

        Text gets the begin token in front if the vocabulary wants it, and control tokens written
        out in it are read as such.

        Raises:
            RequestError: what was given is neither text nor ids.
        """
        return self._admission.encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's reply begins.

        Raises:
            RequestError: the messages do not make a conversation that the template can write.
            TokenizerError: there is no template, or it cannot be used.
        """
        return encode_chat(self.tokenizer, list(messages), template=self.chat_template)

    def check(self, prompt_ids: Sequence[int], *, name: str = "the prompt") -> tuple[int, ...]:
        """Return the ids a run would begin with: those given, or the begin token if there is none.

        Raises:
            PromptTooLong: no room is left in the context for an answer. Nothing is ever cut off.
            RequestError: the prompt is empty and there is no begin token, or an id is unknown.
        """
        return self._admission.check(prompt_ids, name=name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Return the answer to each prompt, in order.

        More prompts than `max_batch_size` run in chunks. A seed counts for each prompt by itself:
        the same prompt and seed give the same text whatever runs beside it.

        Args:
            prompts: a string, a list of ids, or a list of those; an empty list gives no answers.
            params: for all prompts, or one for each.
            on_done: is given a prompt's index and its completion as soon as it has finished.

        Raises:
            PromptTooLong: a prompt leaves no room for an answer; nothing was run.
            RequestError: a prompt cannot be run, and nothing was; or the model is busy or closed.
            ConfigError: there are not as many params as prompts.
            Interrupted: Ctrl-C; it carries the completions there are.
        """
        return self.run(self._admission.requests(prompts, params), on_done=on_done)

    def run(
        self,
        requests: Sequence[Request],
        *,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Return the completions of requests whose prompts passed `check`; else as `generate`."""
        steps = Steps(self._turn, requests)
        try:
            for tokens in steps:
                for token in tokens:
                    if token.completion is not None and on_done is not None:
                        on_done(token.index, token.completion)
        except KeyboardInterrupt as interrupt:
            steps.close()
            raise Interrupted(steps.completions) from interrupt
        finally:
            steps.close()
        return steps.completions

    def chat(self, messages: Sequence[Message], params: SamplingParams = GREEDY) -> Completion:
        """Return the assistant's reply; raises what `encode_chat` and `generate` do."""
        return self.generate(self.encode_chat(messages), params)[0]

    def steps(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        keep: bool = False,
    ) -> Steps:
        """Return an iterator over the steps of what `generate` would do.

        With `keep` the sequences stay in the cache afterwards, each in the row of its prompt, until
        the next run: if that keeps too, only what is new of its prompts is computed.
        """
        return Steps(self._turn, self._admission.requests(prompts, params, keep=keep))

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, keep: bool = False
    ) -> Stream:
        """Return an iterator over the tokens of the answer to one prompt; `keep` as in `steps`."""
        prompts: list[Prompt] = [prompt]
        return Stream(self.steps(prompts, params, keep=keep))

    def close(self) -> None:
        """Free cache, weights and device; an unfinished iterator ends. Closing twice is fine."""
        self._turn.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _say_nothing(_text: str) -> None:
    """Take the place of a `notify` that was not given."""


def _require_positive(flag: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{flag} must be 1 or more, got {value}")


def _read_template(given: str) -> str:
    """Return the name of a built-in chat template, or jinja text: as given, or from a file."""
    if given in BUILT_IN or "{" in given:
        return given
    try:
        return Path(given).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {given}: not a file that can be read ({error}), and not one of "
            f"{', '.join(BUILT_IN)}"
        ) from error


class _Narrator:
    """Tells the user when layers move."""

    def __init__(self, plan: MemoryPlan | None, say: Callable[[str], None]) -> None:
        self.cache: KVCache | None = None
        self._plan, self._say = plan, say

    def moved(self, layers: tuple[int, ...]) -> None:
        """Say which layers left the card just now, and what a token costs from here on."""
        if self.cache is not None:
            hosts = [placement.store == "host" for placement in self.cache.placements]
            self._say(moved_line(self._plan, layers, hosts, self.cache.lengths))
