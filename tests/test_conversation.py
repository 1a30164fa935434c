"""Conversations longer than the context."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from offload_llama import LLM, Conversation, SamplingParams
from offload_llama.conversation import ContextFull
from offload_llama.errors import ConfigError, PromptTooLong

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


@pytest.mark.parametrize("policy", ["gpu", "offload", "gpu-layers:15"])
def test_a_kept_conversation_answers_as_one_computed_from_the_start(
    policy: str, smollm2_path: Path
) -> None:
    """Only the end of the last answer, the new message and the template's tokens are computed."""
    card = "sim:rtx-3060-12gb"
    params = SamplingParams(max_tokens=6)
    with LLM.load(
        str(smollm2_path), device=card, dtype="float32", ctx=256, kv_policy=policy
    ) as llm:
        talk = Conversation(llm, system=FRENCH)
        said = [talk.say(text, params) for text in ("Hello!", "Name a colour.", "Another?")]
        assert said[0].stats.cached_tokens == 0
        for earlier, later in itertools.pairwise(said):
            known = (*earlier.prompt_token_ids, *earlier.token_ids)
            assert later.prompt_token_ids[: len(known)] == known
            assert later.stats.cached_tokens == len(known) - 1
        copied = [answer.stats.d2h_bytes for answer in said]
        for answer in said:
            [fresh] = llm.generate([list(answer.prompt_token_ids)], params)
            assert fresh.token_ids == answer.token_ids
            assert fresh.stats.cached_tokens == 0
        # Kept rows are not written again.
        assert policy == "gpu" or copied[2] < fresh.stats.d2h_bytes


def test_a_closed_answer_is_part_of_the_conversation_and_one_that_never_began_is_not(
    llm: LLM,
) -> None:
    talk = Conversation(llm)
    talk.stream("Hello!", SamplingParams(max_tokens=8)).close()
    assert talk.messages == []
    answer = talk.stream("Hello!", SamplingParams(max_tokens=8))
    next(answer)
    next(answer)
    answer.close()
    assert answer.completion is not None and answer.completion.finish_reason == "interrupted"
    assert talk.messages[1]["content"] == answer.completion.text
    assert talk.undo() == "Hello!" and talk.messages == [] and talk.undo() is None


def test_a_full_conversation_can_be_refused_instead(llm: LLM) -> None:
    talk = Conversation(llm, overflow="error")
    params = SamplingParams(max_tokens=4)
    with pytest.raises(ContextFull, match=r"exceeds the context of 256; drop the oldest"):
        for _ in range(15):
            talk.say("please tell me about the sea. " * 4, params)
    assert talk.n_dropped == 0 and talk.n_exchanges > 3
    with pytest.raises(ConfigError, match="use error, drop-oldest"):
        Conversation(llm, overflow="sometimes")
