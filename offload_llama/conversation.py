"""A conversation that outlives its context: the oldest exchanges go, and it is said."""

from __future__ import annotations

from collections.abc import Callable

from offload_llama.admission import GREEDY
from offload_llama.config import SamplingParams
from offload_llama.errors import ConfigError, PromptTooLong
from offload_llama.generate import Completion, Token
from offload_llama.llm import LLM
from offload_llama.steps import Stream
from offload_llama.tokenizer.chat import Message

ANSWER_SHARE = 4
"""An answer gets at least this part of the context, unless `max_tokens` asks for less."""

OVERFLOWS = ("error", "drop-oldest")


class ContextFull(PromptTooLong):
    """The conversation no longer fits, and would without its oldest exchanges."""


class Answer:
    """Iterator over the tokens of the answer to a message.

    The message and what was answered are part of the conversation once it has ended, or was closed
    after its first token. Closed before, it leaves the conversation as it was.
    """

    def __init__(self, tokens: Stream, done: Callable[[Completion], None]) -> None:
        self._tokens, self._done = tokens, done

    @property
    def completion(self) -> Completion | None:
        """The answer once it is finished or closed; None before, or if it never began."""
        return self._tokens.completion

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Token:
        token = next(self._tokens)
        if token.completion is not None:
            self._done(token.completion)
        return token

    def close(self) -> None:
        """Stop; an unfinished answer ends as "interrupted"."""
        began = self._tokens.completion is None
        self._tokens.close()
        if began and self._tokens.completion is not None:
            self._done(self._tokens.completion)


class Conversation:
    """Messages to and from one model, in order.

    Between two messages the cache keeps what was said, so that only what is new is computed; any
    other use of the model ends that, and costs nothing but the time.

    When the messages no longer fit the context, the oldest exchanges are dropped, never the system
    message and never the message that is being asked. Nothing is cut inside a message.

    Attributes:
        messages: what the model is shown with the next message.
        n_dropped: exchanges that were dropped so far.
        overflow: "drop-oldest", or "error" to refuse a message instead.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        overflow: str = "drop-oldest",
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        if overflow not in OVERFLOWS:
            raise ConfigError(f"unknown overflow {overflow!r}; use {', '.join(OVERFLOWS)}")
        self.messages: list[Message] = []
        self.system = system
        self.n_dropped = 0
        self.overflow = overflow
        self._llm, self._notify = llm, notify

    @property
    def system(self) -> str | None:
        """The system message; None if there is none."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    @property
    def n_exchanges(self) -> int:
        """Messages that were answered."""
        return sum(message["role"] == "user" for message in self.messages)

    def say(self, text: str, params: SamplingParams = GREEDY) -> Completion:
        """Return the answer to a message; both are part of the conversation then.

        Raises:
            PromptTooLong: the message does not fit; the conversation is as it was.
            ContextFull: it would, were exchanges dropped, which `overflow` rules out.
            TokenizerError: there is no chat template, or it cannot be used.
        """
        answer = self.stream(text, params)
        for _ in answer:
            pass
        assert answer.completion is not None
        return answer.completion

    def stream(self, text: str, params: SamplingParams = GREEDY) -> Answer:
        """Return an iterator over the tokens of the answer to a message; raises what `say` does."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        kept, ids, dropped = self._shortened(asked, params)

        def done(completion: Completion) -> None:
            if dropped:
                self.n_dropped += dropped
                which = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
                self._notify(
                    f"the conversation outgrew the context of {self._llm.cache.max_seq_len:,} "
                    f"tokens: the oldest {which} dropped; --ctx makes room for more"
                )
            self.messages = [*kept, {"role": "assistant", "content": completion.text}]

        return Answer(self._llm.stream(ids, params, keep=True), done)

    def undo(self) -> str | None:
        """Take the last exchange back and return its question; None if there is none."""
        if not self.n_exchanges:
            return None
        question = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return question

    def clear(self) -> None:
        """Forget every exchange; the system message stays."""
        self.messages = self.messages[: 0 if self.system is None else 1]

    def _shortened(
        self, messages: list[Message], params: SamplingParams
    ) -> tuple[list[Message], list[int], int]:
        """Return the messages that fit, their ids, and how many exchanges had to go."""
        limit = self._llm.cache.max_seq_len
        room = limit // ANSWER_SHARE
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        first = 1 if messages[0]["role"] == "system" else 0
        dropped = n_whole = 0
        while True:
            ids = self._llm.encode_chat(messages)
            n_whole = n_whole or len(ids)
            if len(ids) + room <= limit:
                break
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
        if dropped and self.overflow == "error":
            raise ContextFull(
                f"the conversation has {n_whole} tokens, and with {room} for the answer that "
                f"exceeds the context of {limit}; drop the oldest exchanges "
                "(--overflow drop-oldest), or raise --ctx",
                prompt_tokens=n_whole,
                max_seq_len=limit,
            )
        return messages, ids, dropped
