"""`Llama`: takes the place of the class of Meta's `llama` package.

Code written for Meta's class runs with the import changed: the same methods, arguments and
results, without a launcher, a process group or a GPU. Keyword arguments that Meta's class does not
have choose device, dtype and where the cache lives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NotRequired, TypedDict

from offload_llama.config import ModelConfig, SamplingParams
from offload_llama.errors import ConfigError, RequestError
from offload_llama.generate import Completion, Request
from offload_llama.llm import LLM
from offload_llama.model import Transformer
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.chat import Message


class CompletionPrediction(TypedDict):
    """One answer to a prompt; tokens and log-probabilities only where they were asked for."""

    generation: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


class ChatPrediction(TypedDict):
    """One reply to a dialog; tokens and log-probabilities only where they were asked for."""

    generation: Message
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The model's shape and the limits it was built with, under Meta's names."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_batch_size: int
    max_seq_len: int


class MetaModel:
    """A transformer with Meta's `params`; everything else is the transformer's own."""

    def __init__(self, transformer: Transformer, params: ModelArgs) -> None:
        self.transformer, self.params = transformer, params

    def __getattr__(self, name: str) -> Any:
        if name == "transformer":  # asked for before __init__, by copy or pickle
            raise AttributeError(name)
        return getattr(self.transformer, name)


class MetaTokenizer:
    """A vocabulary with the attributes and methods of Meta's `Tokenizer`."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        self.vocabulary = vocabulary
        self.n_words = vocabulary.n_ids
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.pad_id = -1
        self.stop_tokens = vocabulary.stop_ids

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """Return the ids of `s`, between the begin and the end token where asked for."""
        ids = self.vocabulary.encode(s)
        if bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, t: Sequence[int]) -> str:
        """Return the text of ids, without control tokens."""
        return self.vocabulary.decode(t)


class Llama:
    """A model that answers batches of prompts, called as Meta's class is.

    Attributes:
        llm: the `LLM` behind it.
        model: the transformer; `model.params` has the limits, and
            `model.layers[i].attention.cache_k` a layer's keys in Meta's shape.
        tokenizer: the vocabulary, with Meta's methods.
    """

    def __init__(self, llm: LLM, *, seed: int = 1) -> None:
        self.llm = llm
        config, cache = llm.config, llm.cache
        self.model = MetaModel(
            llm.model, _model_args(config, cache.max_batch_size, cache.max_seq_len)
        )
        self.tokenizer = MetaTokenizer(llm.tokenizer)
        # Each prompt ever given draws the next seed from here: rows of one batch differ, as
        # Meta's do, and a fresh build with the same seed answers the same calls the same way.
        self._seeds = random.Random(seed)

    @staticmethod
    def build(
        ckpt_dir: str | Path,
        tokenizer_path: str | Path | None,
        max_seq_len: int,
        max_batch_size: int,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_policy: str = "gpu",
        prefill_chunk: int = 512,
        part_tokens: int | None = None,
        flush_tokens: int | None = None,
        ring_slots: int | None = None,
        pin: bool = True,
        chat_template: str | None = None,
        progress: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Llama:
        """Return a loaded model.

        Args:
            ckpt_dir: Meta's folder; any other model that `LLM.load` takes does as well.
            tokenizer_path: the tokenizer's file; None looks beside the model.
            max_seq_len: tokens of context, prompt and answer together.
            max_batch_size: prompts in one call.
            model_parallel_size: None or 1. Any number of shards is merged in one process.
            seed: of everything that is drawn from now on, in the order of the calls.

        The keyword arguments are those of `LLM.load`, which also says what is raised.

        Raises:
            ConfigError: `model_parallel_size` asks for more than one process.
        """
        if model_parallel_size not in (None, 1):
            raise ConfigError(
                f"model_parallel_size {model_parallel_size} is not possible: one process runs the "
                "model, whatever the number of its shards; leave it out"
            )
        llm = LLM.load(
            ckpt_dir,
            tokenizer=tokenizer_path,
            device=device,
            dtype=dtype,
            kv_policy=kv_policy,
            ctx=max_seq_len,
            max_batch_size=max_batch_size,
            prefill_chunk=prefill_chunk,
            part_tokens=part_tokens,
            flush_tokens=flush_tokens,
            ring_slots=ring_slots,
            pin=pin,
            chat_template=chat_template,
            progress=progress,
            notify=notify,
        )
        return Llama(llm, seed=seed)

    def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return the generated ids of each prompt, and their log-probabilities if asked for.

        An id that ends the text is left out. With `echo` the prompt's ids come first; its first
        one, which nothing predicts, has the log-probability 0.

        Raises:
            RequestError: more prompts than `max_batch_size`, or one that cannot be run.
            PromptTooLong: a prompt leaves no room in the context.
            ConfigError: a sampling setting is out of range.
        """
        self._check_batch(len(prompt_tokens))
        done = self._run(prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo)
        tokens = [_tokens(c, echo) for c in done]
        return tokens, [_logprobs(c, echo) for c in done] if logprobs else None

    def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
    ) -> list[CompletionPrediction]:
        """Return how each text goes on.

        Args:
            max_gen_len: most tokens to generate; None goes on until the context is full.
            logprobs: add each token's text and log-probability.
            echo: put the prompt in front of the answer.

        Raises:
            RequestError, PromptTooLong, ConfigError: as `generate`.
        """
        self._check_batch(len(prompts))
        return self._complete(prompts, temperature, top_p, max_gen_len, logprobs, echo)

    def chunked_text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        progress: bool = True,
    ) -> list[CompletionPrediction]:
        """Return how each of any number of texts goes on; `max_batch_size` of them run together.

        Args:
            progress: show a bar on standard error; the other arguments are `text_completion`'s.

        Raises:
            RequestError, PromptTooLong, ConfigError: as `generate`, before anything runs.
        """
        with _bar(len(prompts), shown=progress) as advance:
            return self._complete(
                prompts, temperature, top_p, max_gen_len, logprobs, echo, on_done=advance
            )

    def chat_completion(
        self,
        dialogs: Sequence[Sequence[Message]],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
    ) -> list[ChatPrediction]:
        """Return the assistant's reply to each dialog.

        Markers spelled out in a message are plain text to the model, so they need no refusal.

        Raises:
            RequestError: a dialog is not one the chat template can write; or as `generate`.
            TokenizerError: the model has no chat template.
            PromptTooLong, ConfigError: as `generate`.
        """
        self._check_batch(len(dialogs))
        prompt_tokens = [self.llm.encode_chat(dialog) for dialog in dialogs]
        done = self._run(prompt_tokens, max_gen_len, temperature, top_p, logprobs, False)
        predictions: list[ChatPrediction] = []
        for completion in done:
            content = self.tokenizer.decode(completion.token_ids)
            prediction: ChatPrediction = {"generation": {"role": "assistant", "content": content}}
            if logprobs:
                prediction["tokens"] = [self.tokenizer.decode([t]) for t in completion.token_ids]
                prediction["logprobs"] = _logprobs(completion, echo=False)
            predictions.append(prediction)
        return predictions

    def close(self) -> None:
        """Free the model; see `LLM.close`."""
        self.llm.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_batch(self, n_prompts: int) -> None:
        limit = self.llm.cache.max_batch_size
        if n_prompts > limit:
            raise RequestError(
                f"{n_prompts} prompts > max_batch_size {limit}; use chunked_text_completion, or "
                "build with a larger max_batch_size"
            )

    def _complete(
        self,
        prompts: Sequence[str],
        temperature: float,
        top_p: float,
        max_gen_len: int | None,
        logprobs: bool,
        echo: bool,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[CompletionPrediction]:
        prompt_tokens = [self.tokenizer.encode(text, bos=True, eos=False) for text in prompts]
        done = self._run(
            prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, on_done=on_done
        )
        predictions: list[CompletionPrediction] = []
        for completion in done:
            ids = _tokens(completion, echo)
            prediction: CompletionPrediction = {"generation": self.tokenizer.decode(ids)}
            if logprobs:
                prediction["tokens"] = [self.tokenizer.decode([token_id]) for token_id in ids]
                prediction["logprobs"] = _logprobs(completion, echo)
            predictions.append(prediction)
        return predictions

    def _run(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | None,
        temperature: float,
        top_p: float,
        logprobs: bool,
        echo: bool,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        requests = [
            Request(
                prompt_ids=self.llm.check(ids, name=f"prompt {number} of {len(prompt_tokens)}"),
                params=SamplingParams(
                    temperature=temperature,
                    top_p=top_p,
                    max_tokens=max_gen_len,
                    seed=self._seeds.getrandbits(32),
                ),
                logprobs=logprobs,
                prompt_logprobs=logprobs and echo,
            )
            for number, ids in enumerate(prompt_tokens, start=1)
        ]
        return self.llm.run(requests, on_done=on_done)


def _model_args(config: ModelConfig, max_batch_size: int, max_seq_len: int) -> ModelArgs:
    return ModelArgs(
        dim=config.dim,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
    )


def _tokens(completion: Completion, echo: bool) -> list[int]:
    prompt = completion.prompt_token_ids if echo else ()
    return [*prompt, *completion.token_ids]


def _logprobs(completion: Completion, echo: bool) -> list[float]:
    generated = completion.logprobs or ()
    return [0.0, *(completion.prompt_logprobs or ()), *generated] if echo else [*generated]


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int, Completion], None]]:
    """Give a function that advances a progress bar by one prompt."""
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt", disable=not shown) as bar:

        def advance(_index: int, _completion: Completion) -> None:
            bar.update()

        yield advance
