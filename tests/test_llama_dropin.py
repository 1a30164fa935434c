"""`Llama` is called as Meta's class is, without its launcher, process group or GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama import ConfigError, Llama, PromptTooLong, RequestError
from tests.helpers_generate import TINY_BOS, TINY_EOS, TINY_EOT, TINY_VOCAB_SIZE, write_tiny_llama3

MAX_SEQ_LEN, MAX_BATCH_SIZE = 128, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama3(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, **settings: Any) -> Llama:
    return Llama.build(
        ckpt_dir=str(folder),
        tokenizer_path=str(folder / "tokenizer.model"),
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=MAX_BATCH_SIZE,
        **{"device": "cpu", **settings},
    )


@pytest.fixture(scope="module")
def llama(folder: Path) -> Iterator[Llama]:
    with build(folder) as generator:
        yield generator


def logprobs_by_hand(llama: Llama, ids: list[int]) -> list[float]:
    """Return the log-probability of each id after the first, from one pass over all of them."""
    cache = llama.llm.cache
    with cache.step([0], [0], [len(ids)], logits="all") as step:
        logits = llama.llm.model(step.upload(ids), step)
    cache.free(0)
    assert logits is not None
    scores = torch.log_softmax(logits, -1)
    return [float(scores[at, token_id]) for at, token_id in enumerate(ids[1:])]


def test_the_model_shows_its_limits_and_its_cache_in_metas_names_and_shapes(llama: Llama) -> None:
    params = llama.model.params
    assert (params.dim, params.n_layers, params.n_heads, params.n_kv_heads) == (64, 4, 4, 2)
    assert (params.max_batch_size, params.max_seq_len) == (MAX_BATCH_SIZE, MAX_SEQ_LEN)
    assert params.vocab_size == TINY_VOCAB_SIZE
    assert len(llama.model.layers) == 4
    for layer in llama.model.layers:
        shape = (MAX_BATCH_SIZE, MAX_SEQ_LEN, 2, 16)
        assert tuple(layer.attention.cache_k.shape) == shape
        assert tuple(layer.attention.cache_v.shape) == shape
    assert llama.model.tok_embeddings.weight.shape == (TINY_VOCAB_SIZE, 64)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = llama.model.no_such_thing


def test_the_tokenizer_has_metas_methods(llama: Llama) -> None:
    tokenizer = llama.tokenizer
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id) == (512, TINY_BOS, TINY_EOS)
    assert TINY_EOT in tokenizer.stop_tokens
    assert tokenizer.encode("hi", bos=True, eos=True) == [TINY_BOS, *b"hi", TINY_EOS]
    assert tokenizer.encode("<|eot_id|>", bos=False, eos=False) == list(b"<|eot_id|>")
    assert tokenizer.decode([TINY_BOS, *b"hi", TINY_EOS]) == "hi"


def test_generate_returns_the_new_ids_of_each_prompt(llama: Llama) -> None:
    prompts = [[TINY_BOS, *b"abc"], [TINY_BOS, *b"a longer prompt than that"]]
    tokens, logprobs = llama.generate(prompts, max_gen_len=6, temperature=0)
    assert logprobs is None
    assert [len(t) for t in tokens] == [6, 6]
    echoed, _ = llama.generate(prompts, max_gen_len=6, temperature=0, echo=True)
    assert echoed == [p + t for p, t in zip(prompts, tokens, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_the_models_own_for_prompt_and_answer(
    llama: Llama, temperature: float
) -> None:
    prompts = [[TINY_BOS, *b"abc"], [TINY_BOS, *b"something else"]]
    tokens, logprobs = llama.generate(
        prompts, max_gen_len=5, temperature=temperature, logprobs=True, echo=True
    )
    assert logprobs is not None
    for ids, scores in zip(tokens, logprobs, strict=True):
        assert scores[0] == 0.0
        # One pass over all against steps of one token: float32 rounding.
        assert scores[1:] == pytest.approx(logprobs_by_hand(llama, ids), abs=1e-4)
    again, new = llama.generate(prompts[:1], max_gen_len=5, temperature=0, logprobs=True)
    assert new is not None
    by_hand = logprobs_by_hand(llama, prompts[0] + again[0])
    assert new[0] == pytest.approx(by_hand[len(prompts[0]) - 1 :], abs=1e-4)


def test_an_end_token_ends_the_answer_and_is_left_out(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B05: with Meta's layout both end tokens of Llama 3 apply."""
    real, calls = llama.llm.model.output.forward, 0

    def ending(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = real(x)
        if calls == 4:
            logits[:, TINY_EOT] = 1000.0
        return logits

    monkeypatch.setattr(llama.llm.model.output, "forward", ending)
    [[*tokens]], logprobs = llama.generate(
        [[TINY_BOS, *b"abc"]], max_gen_len=20, temperature=0, logprobs=True
    )
    assert len(tokens) == 3 and TINY_EOT not in tokens
    assert logprobs is not None and len(logprobs[0]) == 3
    calls = 0
    [chat] = llama.chat_completion([[{"role": "user", "content": "hi"}]], temperature=0)
    assert calls == 4 and "eot_id" not in chat["generation"]["content"]


def test_text_completion_gives_texts_and_on_request_tokens_and_logprobs(llama: Llama) -> None:
    prompts = ["abc", "The quick brown fox"]
    plain = llama.text_completion(prompts, temperature=0, max_gen_len=5)
    assert [list(p) for p in plain] == [["generation"], ["generation"]]
    full = llama.text_completion(prompts, temperature=0, max_gen_len=5, logprobs=True)
    for prediction, detailed in zip(plain, full, strict=True):
        assert detailed["generation"] == prediction["generation"]
        assert len(detailed["tokens"]) == len(detailed["logprobs"]) == 5
    echoed = llama.text_completion(prompts, temperature=0, max_gen_len=5, echo=True)
    assert [e["generation"] for e in echoed] == [
        prompt + p["generation"] for prompt, p in zip(prompts, plain, strict=True)
    ]


def test_control_tokens_in_a_text_are_plain_text_as_with_meta(llama: Llama) -> None:
    [done] = llama.text_completion(["a<|eot_id|>"], temperature=0, max_gen_len=1, echo=True)
    assert done["generation"].startswith("a<|eot_id|>")


def test_without_max_gen_len_the_answer_goes_on_to_the_end_of_the_context(llama: Llama) -> None:
    prompt = [TINY_BOS, *b"x" * (MAX_SEQ_LEN - 6)]
    [tokens], _ = llama.generate([prompt], max_gen_len=100, temperature=0)
    assert len(tokens) == 5
    [done] = llama.text_completion(["x" * (MAX_SEQ_LEN - 6)], temperature=0, logprobs=True)
    assert len(done["tokens"]) == 5


def test_chat_completion_gives_the_assistants_message(llama: Llama) -> None:
    dialogs: list[Any] = [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "go on"},
        ],
    ]
    replies = llama.chat_completion(dialogs, temperature=0, max_gen_len=4, logprobs=True)
    for dialog, reply in zip(dialogs, replies, strict=True):
        assert reply["generation"]["role"] == "assistant"
        ids = llama.llm.encode_chat(dialog)
        [tokens], _ = llama.generate([ids], max_gen_len=4, temperature=0)
        assert reply["generation"]["content"] == llama.tokenizer.decode(tokens)
        assert len(reply["tokens"]) == len(reply["logprobs"]) == len(tokens)
    with pytest.raises(RequestError):
        llama.chat_completion([[{"role": "robot", "content": "hi"}]])


def test_more_prompts_than_the_batch_is_an_error_with_both_numbers_and_the_way_out(
    llama: Llama,
) -> None:
    """B41: six prompts with a limit of four."""
    message = "6 prompts > max_batch_size 4; use chunked_text_completion"
    dialog: list[Any] = [{"role": "user", "content": "hi"}]
    for call in (
        lambda: llama.text_completion(["hi"] * 6),
        lambda: llama.generate([[1]] * 6, 5),
        lambda: llama.chat_completion([dialog] * 6),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_chunked_text_completion_takes_any_number_in_order_with_a_progress_bar(
    llama: Llama, capsys: pytest.CaptureFixture[str]
) -> None:
    """B41: runs as 4 + 2 in input order."""
    prompts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    found = llama.chunked_text_completion(prompts, temperature=0, max_gen_len=3)
    shown = capsys.readouterr()
    assert "6/6" in shown.err and shown.out == ""
    alone = [llama.text_completion([p], temperature=0, max_gen_len=3)[0] for p in prompts]
    assert found == alone
    llama.chunked_text_completion(prompts, temperature=0, max_gen_len=1, progress=False)
    assert capsys.readouterr().err == ""


def test_a_fresh_build_repeats_its_calls_and_rows_and_calls_differ(folder: Path) -> None:
    def calls(seed: int) -> list[list[int]]:
        with build(folder, seed=seed) as generator:
            prompt = [TINY_BOS, *b"abc"]
            first, _ = generator.generate([prompt, prompt], max_gen_len=12, temperature=1.0)
            second, _ = generator.generate([prompt], max_gen_len=12, temperature=1.0)
        return [*first, *second]

    one = calls(1)
    assert calls(1) == one
    assert calls(2) != one
    assert one[0] != one[1] and one[0] != one[2] and one[1] != one[2]


def test_a_prompt_that_does_not_fit_is_refused_by_number(llama: Llama) -> None:
    """B17: an error with both lengths instead of an assertion."""
    with pytest.raises(PromptTooLong, match=r"prompt 2 of 2 has 130 tokens.*context of 128"):
        llama.text_completion(["hi", "x" * 129])


@pytest.mark.parametrize("size", [2, 8, 0])
def test_more_than_one_process_is_refused_and_says_what_to_do(folder: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="leave it out") as caught:
        build(folder, model_parallel_size=size)
    assert "\n" not in str(caught.value)


def test_model_parallel_size_one_is_fine(folder: Path) -> None:
    with build(folder, model_parallel_size=1) as generator:
        assert len(generator.text_completion(["a"], max_gen_len=1)) == 1


SCRIPT = """
import json, socket, sys

def no_sockets(*args, **kwargs):
    raise OSError("sockets are blocked")

if "hostile" in sys.argv:
    import torch
    socket.socket.bind = socket.socket.connect = socket.socket.listen = no_sockets
    torch.distributed.is_available = lambda: False
from offload_llama import Llama

llama = Llama.build(sys.argv[1], None, max_seq_len=128, max_batch_size=2, device="cpu")
done = llama.text_completion(["abc", "The quick"], temperature=0.8, max_gen_len=8)
import torch.distributed
assert "hostile" in sys.argv or not torch.distributed.is_initialized()
print(json.dumps([d["generation"] for d in done]))
"""


def test_no_launcher_is_needed_and_a_stale_ones_environment_changes_nothing(
    folder: Path, llama: Llama
) -> None:
    """B46: plain python; RANK and WORLD_SIZE left over; no distributed package; no sockets."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in launcher}
    stale = {**clean, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "1"}
    answers = []
    for environment, mode in ((clean, "plain"), (stale, "hostile")):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), mode],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]
