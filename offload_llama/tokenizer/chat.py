"""Messages to ids: the model's chat template, and contents that cannot forge a turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

from offload_llama.errors import RequestError, TokenizerError
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.chat_templates import BUILT_IN, LLAMA_3, LLAMA_3_MARKERS
from offload_llama.tokenizer.jinja_env import Refusal, compile_template

ROLES = ("system", "user", "assistant")

_compiled = lru_cache(maxsize=8)(compile_template)


class Message(TypedDict):
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, template: str | None = None
) -> list[int]:
    """Return the ids of a conversation, ready for the assistant's next turn.

    Markers that the template writes become single control ids. A marker spelled out in a
    message's content stays plain text. The begin token comes once: the template's own, else one
    in front if the vocabulary wants it.

    Args:
        template: jinja text, or "llama-2" or "llama-3"; None takes the model's own.

    Raises:
        RequestError: the messages are malformed (the index is named), or the template refuses
            them.
        TokenizerError: there is no template, or it fails.
    """
    check_messages(messages)
    guard = _unused_character(tokenizer, messages, template)
    text = _render(tokenizer, messages, template, guard)
    return tokenizer.encode(text, bos=True, special=True, guard=guard)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, template: str | None = None
) -> str:
    """Return the text a conversation becomes, control tokens spelled out.

    Raises:
        RequestError, TokenizerError: as `encode_chat`.
    """
    check_messages(messages)
    guard = _unused_character(tokenizer, messages, template)
    return _render(tokenizer, messages, template, guard).replace(guard, "")


def check_messages(messages: Sequence[Message]) -> None:
    """Return nothing if every message has a known role and a text.

    Raises:
        RequestError: the list is empty, or a message is malformed; its index is named.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise RequestError("the list of messages is empty; give at least one user message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} must have a role and a content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"message {index} has the role {role!r}; possible are {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            found = "no content" if content is None else f"a {type(content).__name__} as content"
            raise RequestError(f"message {index} has {found}; it must be a string")


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str | None, guard: str
) -> str:
    """Return the rendered text with `guard` inside every control spelling of the contents."""
    source = _template_source(tokenizer, template)
    render = _compiled(source)
    protect = _protector(tokenizer, guard)
    turns = [{"role": m["role"], "content": protect(m["content"])} for m in messages]

    def attempt(some: list[dict[str, str]]) -> str:
        return render(messages=some, **_variables(tokenizer))

    tried, refused = turns, None
    for tried in filter(None, (turns, _system_in_first_user_turn(turns))):
        try:
            return attempt(tried)
        except Refusal as refusal:
            refused = refusal
    index = _offending_index(attempt, tried) + len(turns) - len(tried)
    raise RequestError(
        f"message {index} (role {turns[index]['role']!r}) is refused by the model's chat "
        f"template: {' '.join(str(refused).replace(guard, '').split())}"
    ) from refused


def _template_source(tokenizer: Tokenizer, template: str | None) -> str:
    if template is not None:
        return BUILT_IN.get(template, template)
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if all(marker in tokenizer.control_ids for marker in LLAMA_3_MARKERS):
        return LLAMA_3
    raise TokenizerError(
        "this model has no chat template; give one with --chat-template FILE, or send the prompt "
        "as it is with --raw"
    )


def _variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what templates may ask for beside the messages."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return {
        "add_generation_prompt": True,
        "bos_token": "" if bos is None else tokenizer.token(bos),
        "eos_token": "" if eos is None else tokenizer.token(eos),
        "tools": None,
        "documents": None,
    }


def _system_in_first_user_turn(turns: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """Return the turns with a leading system text moved into the user turn behind it.

    Templates that know no system role still take it there, which is where their models saw it.
    """
    if len(turns) < 2 or turns[0]["role"] != "system" or turns[1]["role"] != "user":
        return None
    content = f"{turns[0]['content']}\n\n{turns[1]['content']}"
    return [{"role": "user", "content": content}, *turns[2:]]


def _offending_index(
    attempt: Callable[[list[dict[str, str]]], str], turns: list[dict[str, str]]
) -> int:
    """Return the last message of the shortest beginning that the template refuses."""
    for index in range(len(turns)):
        try:
            attempt(turns[: index + 1])
        except Refusal:
            # A system text alone may be refused only because the user's is missing behind it.
            if index > 0 or turns[0]["role"] != "system" or len(turns) == 1:
                return index
    return len(turns) - 1


def _unused_character(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str | None
) -> str:
    """Return a private-use character that neither the messages nor the template contain."""
    texts = [template or "", tokenizer.chat_template or "", *(m["content"] for m in messages)]
    used = set().union(*texts)
    return next(c for c in map(chr, range(0xE000, 0xF900)) if c not in used)


def _protector(tokenizer: Tokenizer, guard: str) -> Callable[[str], str]:
    """Return a function that puts `guard` into the control spellings of a content.

    The guard stands behind a spelling's first character. It is no white space, so that a
    template's trimming works as without it. A beginning of a spelling at the end of a content is
    broken too: what the template writes next must not complete it.
    """
    spellings = [s for s in tokenizer.control_ids if len(s) > 1]
    if not spellings:
        return lambda content: content
    starts = {s[:n] for s in spellings for n in range(1, len(s))}
    longest_first = sorted(spellings, key=len, reverse=True)
    # Looking ahead, so that spellings that overlap are all found.
    whole = re.compile("(?=(?:" + "|".join(re.escape(s) for s in longest_first) + "))(.)", re.S)
    longest = max(map(len, starts))

    def protect(content: str) -> str:
        content = whole.sub(lambda match: match.group(1) + guard, content)
        end = len(content.rstrip())
        begins = [b for b in range(max(0, end - longest), end) if content[b:end] in starts]
        for begin in reversed(begins):
            content = content[: begin + 1] + guard + content[begin + 1 :]
        return content

    return protect
