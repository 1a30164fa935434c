"""A conversation that outlives its context: the oldest exchanges go, and it is said."""

from __future__ import annotations

from collections.abc import Callable

from offload_llama.admission import GREEDY
from offload_llama.config import SamplingParams
from offload_llama.errors import PromptTooLong
from offload_llama.generate import Completion
from offload_llama.llm import LLM
from offload_llama.tokenizer.chat import Message

ANSWER_SHARE = 4
"""An answer gets at least this part of the context, unless `max_tokens` asks for less."""


class Conversation:
    """Messages to and from one model, in order.

    When they no longer fit the context, the oldest exchanges are dropped, never the system message
    and never the message that is being asked. Nothing is cut inside a message.

    Attributes:
        messages: what the model is shown with the next message.
        n_dropped: exchanges that were dropped so far.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.n_dropped = 0
        self._llm, self._notify = llm, notify

    def say(self, text: str, params: SamplingParams = GREEDY) -> Completion:
        """Return the answer to a message; both are part of the conversation then.

        Raises:
            PromptTooLong: the message does not fit even alone; the conversation is as it was.
            TokenizerError: there is no chat template, or it cannot be used.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        kept, ids, dropped = self._shortened(asked, params)
        completion = self._llm.generate(ids, params)[0]
        if dropped:
            self.n_dropped += dropped
            which = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
            self._notify(
                f"the conversation outgrew the context of {self._llm.cache.max_seq_len:,} tokens: "
                f"the oldest {which} dropped; --ctx makes room for more"
            )
        self.messages = [*kept, {"role": "assistant", "content": completion.text}]
        return completion

    def _shortened(
        self, messages: list[Message], params: SamplingParams
    ) -> tuple[list[Message], list[int], int]:
        """Return the messages that fit, their ids, and how many exchanges had to go."""
        limit = self._llm.cache.max_seq_len
        room = limit // ANSWER_SHARE
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        first = 1 if messages[0]["role"] == "system" else 0
        dropped = 0
        while True:
            ids = self._llm.encode_chat(messages)
            if len(ids) + room <= limit:
                return messages, ids, dropped
            if len(messages) <= first + 1:
                beside = "and the system message " if first else ""
                raise PromptTooLong(
                    f"the message {beside}has {len(ids)} tokens, and with {room} for the answer "
                    f"that exceeds the context of {limit}; shorten it, or raise --ctx",
                    prompt_tokens=len(ids),
                    max_seq_len=limit,
                )
            messages = [*messages[:first], *messages[first + 2 :]]
            dropped += 1
