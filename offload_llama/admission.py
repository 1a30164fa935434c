"""Which prompts may run: from what a caller gives to checked requests, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from offload_llama.config import ModelConfig, SamplingParams
from offload_llama.errors import ConfigError, PromptTooLong, RequestError
from offload_llama.generate import Request
from offload_llama.tokenizer.api import Tokenizer

Prompt = str | Sequence[int]
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a prompt is checked against. `max_seq_len` are the tokens of prompt and answer."""

    config: ModelConfig
    tokenizer: Tokenizer
    max_seq_len: int

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt.

        A string is encoded as it stands, with the begin token in front if the vocabulary wants
        it, and control tokens written out in it are read as such. Ids are taken as they are.

        Raises:
            RequestError: what was given is neither text nor ids.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, bos=True, special=True)
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt is a string or a list of token ids: {error}") from error

    def check(self, prompt_ids: Sequence[int], *, name: str = "the prompt") -> tuple[int, ...]:
        """Return the ids a run would begin with: those given, or the begin token if there is none.

        Args:
            name: what the message calls this prompt.

        Raises:
            PromptTooLong: no room is left in the context for an answer. Nothing is ever cut off.
            RequestError: the prompt is empty and there is no begin token, or an id is unknown.
        """
        ids = tuple(prompt_ids)
        if not ids:
            if self.tokenizer.bos_id is None:
                raise RequestError(
                    f"{name} is empty, and this model has no begin token to start from; "
                    "give it some text"
                )
            ids = (self.tokenizer.bos_id,)
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self.config.vocab_size:
                raise RequestError(
                    f"{name} holds token id {token_id}; this model has ids 0 to "
                    f"{self.config.vocab_size - 1}"
                )
        if len(ids) >= self.max_seq_len:
            raise self._too_long(name, len(ids))
        return ids

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        keep: bool = False,
    ) -> list[Request]:
        """Return the checked requests for one prompt or several.

        Text goes on from a prompt given as text; after ids the answer is a text of its own.
        `keep` is every request's.

        Raises:
            PromptTooLong: a prompt leaves no room for an answer.
            RequestError: a prompt cannot be run; with several the message gives its number.
            ConfigError: there are not as many params as prompts.
        """
        several = _as_list(prompts)
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise ConfigError(f"{len(several)} prompts need as many params, got {len(each)}")
        names = [f"prompt {number} of {len(several)}" for number in range(1, len(several) + 1)]
        if len(several) == 1:
            names = ["the prompt"]
        return [
            Request(
                prompt_ids=self.check(self.encode(prompt), name=name),
                params=own,
                continues_text=isinstance(prompt, str),
                keep=keep,
            )
            for prompt, own, name in zip(several, each, names, strict=True)
        ]

    def _too_long(self, name: str, n_tokens: int) -> PromptTooLong:
        limit, model_limit = self.max_seq_len, self.config.max_seq_len
        if limit >= model_limit:
            remedy = "that is all this model allows: shorten the prompt"
        elif n_tokens >= model_limit:
            remedy = f"this model allows at most {model_limit}: shorten the prompt"
        else:
            remedy = f"raise it with --ctx, this model allows {model_limit}"
        return PromptTooLong(
            f"{name} has {n_tokens} tokens and leaves no room for an answer in a context of "
            f"{limit}; {remedy}",
            prompt_tokens=n_tokens,
            max_seq_len=limit,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list: a string or a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and not isinstance(items[0], str | Sequence):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)
