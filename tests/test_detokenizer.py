"""Text while it is generated equals the text decoded at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.open import open_tokenizer
from offload_llama.tokenizer.stream import Detokenizer
from tests.helpers_tokenizer import (
    ANY_TEXT,
    TEXTS,
    ranks_as_json,
    sentencepiece_as_gguf,
    sentencepiece_as_json,
    sentencepiece_path,
    write_ranks,
)

KINDS = ("default", "sentencepiece", "gguf-llama", "ranks", "json-llama", "json-bpe")


@pytest.fixture(scope="module")
def every(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("streams")
    sentencepiece_as_json(folder / "llama.json")
    ranks_as_json(folder / "bpe.json")
    paths = {
        "default": smollm2_path,
        "sentencepiece": sentencepiece_path(),
        "gguf-llama": sentencepiece_as_gguf(folder / "sp.gguf"),
        "ranks": write_ranks(folder / "tokenizer.model"),
        "json-llama": folder / "llama.json",
        "json-bpe": folder / "bpe.json",
    }
    return {name: open_tokenizer(path) for name, path in paths.items()}


def chunks_of(stream: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS, ""])
def test_chunks_join_to_the_whole_text(every: dict[str, Tokenizer], kind: str, text: str) -> None:
    """B11: double space, line feed and indent survive; the first chunk has no extra space."""
    tokenizer = every[kind]
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    chunks = chunks_of(stream, ids)
    assert "".join(chunks) == tokenizer.decode(ids) == stream.text
    assert text.replace("\u2581", " ") == stream.text.replace("\u2581", " ")
    if text and not text.startswith(" "):
        assert not stream.text.startswith(" ")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_chunks_of_any_ids_join_to_the_whole_text(
    every: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = every[kind]
    low = st.integers(0, 400)  # bytes and control tokens
    any_id = st.integers(0, tokenizer.n_ids + 10)
    ids = data.draw(st.lists(low | any_id, max_size=30))
    for skip_special in (True, False):
        stream = Detokenizer(tokenizer, skip_special=skip_special)
        chunks = chunks_of(stream, ids)
        assert "".join(chunks) == tokenizer.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [t for t in TEXTS if t.strip()])
def test_a_continuation_is_the_whole_text_less_the_prompt(
    every: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """B11: behind a prompt, the space in front of the first new word belongs to the text."""
    tokenizer = every[kind]
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if "\ufffd" in prompt:
            continue
        stream = Detokenizer(tokenizer, prompt_ids=ids[:cut])
        assert prompt + "".join(chunks_of(stream, ids[cut:])) == tokenizer.decode(ids)


def test_a_chat_s_reply_has_no_space_in_front_but_a_continuation_has(
    every: dict[str, Tokenizer],
) -> None:
    """B11: the same ids, as a text of their own and behind "Hello"."""
    tokenizer = every["sentencepiece"]
    ids = tokenizer.encode("there you are")
    assert "".join(chunks_of(Detokenizer(tokenizer), ids)) == "there you are"
    behind = Detokenizer(tokenizer, prompt_ids=[1, *tokenizer.encode("Hello")])
    assert "".join(chunks_of(behind, ids)) == " there you are"
    only_begun = Detokenizer(tokenizer, prompt_ids=[1])
    assert "".join(chunks_of(only_begun, ids)) == "there you are"


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_is_held_back_until_it_is_complete(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    byte_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_ids)}
    grin = [byte_of[bytes([b])] for b in "😀".encode()]
    stream = Detokenizer(tokenizer)
    assert [stream.push(i) for i in grin] == ["", "", "", "😀"]
    assert [stream.push(i) for i in grin[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.text == "😀\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_begun_by_the_prompt_is_completed(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    byte_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_ids)}
    grin = [byte_of[bytes([b])] for b in "😀".encode()]
    for cut in (1, 2, 3):
        stream = Detokenizer(tokenizer, prompt_ids=[*tokenizer.encode("Hello"), *grin[:cut]])
        assert "".join(chunks_of(stream, grin[cut:])) == "😀"


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_left_out_unless_asked_for(
    every: dict[str, Tokenizer], kind: str
) -> None:
    """B05: the marker of a turn's end is absent from the text."""
    tokenizer = every[kind]
    spelling, token_id = list(tokenizer.control_ids.items())[1]
    one, two = tokenizer.encode("one"), tokenizer.encode("x two")
    ids = [*one, token_id, *two]
    assert spelling not in "".join(chunks_of(Detokenizer(tokenizer), ids))
    shown = "".join(chunks_of(Detokenizer(tokenizer, skip_special=False), ids))
    assert shown == "one" + spelling + (" " if tokenizer.drops_first_space else "") + "x two"


# Stop strings


def expected_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop string that is completed first, letter by letter."""
    for end in range(len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - len(max(done, key=len))]
    return text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=80)
@given(
    text=st.text(alphabet="ab \n", max_size=25),
    stops=st.lists(st.text(alphabet="ab \n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_end_the_text_wherever_the_tokens_borders_are(
    every: dict[str, Tokenizer], kind: str, text: str, stops: list[str]
) -> None:
    tokenizer = every[kind]
    for ids in (tokenizer.encode(text), _letter_by_letter(tokenizer, text)):
        stream = Detokenizer(tokenizer, stop=tuple(stops))
        chunks = chunks_of(stream, ids)
        whole = tokenizer.decode(ids)
        assert "".join(chunks) == stream.text == expected_stop(whole, stops)
        assert stream.stopped is any(s in whole for s in stops)


def _letter_by_letter(tokenizer: Tokenizer, text: str) -> list[int]:
    prefix = tokenizer.encode("a")
    letters = [tokenizer.encode("a" + letter)[len(prefix) :] for letter in text]
    return [i for ids in letters for i in ids]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=ANY_TEXT, stop=st.text(alphabet="ab <|>", min_size=1, max_size=6))
def test_nothing_that_was_shown_is_ever_taken_back(
    every: dict[str, Tokenizer], kind: str, text: str, stop: str
) -> None:
    tokenizer = every[kind]
    stream = Detokenizer(tokenizer, stop=(stop,))
    shown = ""
    whole = tokenizer.decode(tokenizer.encode(text))
    for token_id in tokenizer.encode(text):
        shown += stream.push(token_id)
        assert whole.startswith(shown)
        assert stop not in shown
        assert shown == stream.text
    shown += stream.finish()
    assert shown == expected_stop(whole, [stop])


def test_text_is_withheld_only_while_it_may_begin_a_stop_string(
    every: dict[str, Tokenizer],
) -> None:
    tokenizer = every["ranks"]
    stream = Detokenizer(tokenizer, stop=("\n\nUser:",))
    [newline] = tokenizer.encode("\n")
    assert stream.push(tokenizer.encode("a")[0]) == "a"
    assert stream.push(newline) == ""
    assert stream.push(newline) == ""
    assert stream.push(newline) == "\n"
    assert "".join(map(stream.push, tokenizer.encode("Use"))) == ""
    assert not stream.stopped
    assert stream.finish() == "\n\nUse"
    assert stream.text == "a\n\n\nUse"


def test_a_stopped_stream_stays_silent(every: dict[str, Tokenizer]) -> None:
    tokenizer = every["default"]
    stream = Detokenizer(tokenizer, stop=("stop",))
    assert "".join(map(stream.push, tokenizer.encode("please stop here"))) == "please "
    assert stream.stopped
    assert stream.push(tokenizer.encode("more")[0]) == ""
    assert stream.finish() == ""
    assert stream.text == "please "


@pytest.mark.parametrize(("kind", "stop"), [("sentencepiece", "</s>"), ("default", "<|im_end|>")])
@pytest.mark.parametrize("skip_special", [True, False])
def test_a_stop_string_that_spells_a_control_token_meets_its_id(
    every: dict[str, Tokenizer], kind: str, stop: str, skip_special: bool
) -> None:
    """B59: stop list given as "</s>"; the text of that token never shows."""
    tokenizer = every[kind]
    ids = [*tokenizer.encode("one two <"), tokenizer.control_ids[stop], *tokenizer.encode("no")]
    stream = Detokenizer(tokenizer, stop=(stop,), skip_special=skip_special)
    assert "".join(chunks_of(stream, ids)) == "one two <"
    assert stream.stopped
    typed = Detokenizer(tokenizer, stop=(stop,), skip_special=skip_special)
    assert "".join(chunks_of(typed, tokenizer.encode(f"one{stop}two"))) == "one"


class _Counting:
    """A tokenizer that counts how often the bytes of an id are looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lookups = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def token_bytes(self, token_id: int) -> bytes:
        self.lookups += 1
        return self._tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_each_id_is_looked_up_once_however_long_the_text_and_the_prompt(
    every: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = every[kind]
    ids = tokenizer.encode("Some words and 😀\n" * 300)
    counting = _Counting(tokenizer)
    stream = Detokenizer(counting, prompt_ids=ids, stop=("never there",))  # type: ignore[arg-type] # a stand-in that passes attributes on
    assert counting.lookups <= 4
    counting.lookups = 0
    assert "".join(chunks_of(stream, ids)).endswith("Some words and 😀\n")
    assert counting.lookups == len(ids)
