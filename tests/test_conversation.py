"""Conversations longer than the context."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_llama import LLM, Conversation, SamplingParams
from offload_llama.errors import PromptTooLong

FRENCH = "Always answer in French."


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM.load(str(smollm2_path), device="cpu", ctx=256)


def test_a_conversation_outlives_its_context_and_keeps_the_system_message(llm: LLM) -> None:
    """B49: fifteen turns of some 40 tokens in a context of 256, then a message of 400."""
    said: list[str] = []
    talk = Conversation(llm, system=FRENCH, notify=said.append)
    params = SamplingParams(max_tokens=4)
    for turn in range(15):
        answer = talk.say(f"Question {turn}: " + "please tell me about the sea. " * 4, params)
        shown = llm.tokenizer.decode(answer.prompt_token_ids)
        assert FRENCH in shown and f"Question {turn}:" in shown
        assert len(answer.prompt_token_ids) + 4 <= 256
    assert 0 < talk.n_dropped == sum(int(line.split("oldest ")[1][0]) if "exchanges" in line else 1
                                     for line in said)  # fmt: skip
    assert "outgrew the context of 256 tokens" in said[0]
    assert "Question 0:" not in shown and "Question 13:" in shown
    before = list(talk.messages)
    with pytest.raises(PromptTooLong, match=r"exceeds the context of 256; shorten it"):
        talk.say("word " * 400, params)
    assert talk.messages == before
    assert talk.say("Are you still there?", params).finish_reason in ("eos", "length")


def test_what_fits_is_kept_word_for_word(llm: LLM) -> None:
    said: list[str] = []
    talk = Conversation(llm, notify=said.append)
    first = talk.say("Hello!", SamplingParams(max_tokens=8))
    talk.say("And then?", SamplingParams(max_tokens=8))
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "user", "assistant"]
    assert talk.messages[1]["content"] == first.text
    assert talk.n_dropped == 0 and said == []
    once = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=8))
    assert once.token_ids == first.token_ids
