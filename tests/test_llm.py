"""`LLM`: loading, which prompts may run, batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama import LLM, ConfigError, PromptTooLong, RequestError, SamplingParams
from offload_llama import llm as llm_module
from offload_llama.device.cpu import CpuDevice
from offload_llama.errors import CheckpointError, OffloadLlamaError
from offload_llama.generate import Completion
from tests.helpers_generate import (
    TINY_BOS,
    TINY_EOS,
    TINY_EOT,
    TINY_VOCAB_SIZE,
    write_tiny_llama3,
)

CTX = 256
LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama3(tmp_path_factory.mktemp("tiny"), max_seq_len=CTX)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="cpu", max_batch_size=4, prefill_chunk=32) as model:
        yield model


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


def drawn(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True, **settings)


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


class TestLoading:
    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("the weights were read")

        monkeypatch.setattr(llm_module, "load_weights", refuse)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dtype": "float8"}, "unknown dtype 'float8'; use auto, float32"),
            ({"kv_policy": "disk"}, "unknown KV policy 'disk'"),
            ({"kv_policy": "gpu-layers:9"}, "more layers than the model's 4"),
            ({"kv_policy": "layers:0-1=gpu"}, "leaves out layer 2"),
            ({"ctx": 257}, "--ctx 257 is not possible: this model allows 2 to 256 tokens"),
            ({"ctx": 1}, "--ctx 1 is not possible"),
            ({"max_batch_size": 0}, "--max-batch-size must be 1 or more, got 0"),
            ({"prefill_chunk": 0}, "--prefill-chunk must be 1 or more, got 0"),
            ({"device": "tpu"}, "unknown device 'tpu'"),
            ({"part_tokens": 3}, "part"),
            ({"chat_template": "no-such-file.jinja"}, "--chat-template no-such-file.jinja"),
        ],
    )
    def test_impossible_settings_are_refused_in_one_line_before_weights_are_read(
        self, folder: Path, settings: dict[str, Any], message: str
    ) -> None:
        """B41 (limit 0), B17 (a context the model does not have)."""
        with pytest.raises(ConfigError) as caught:
            LLM.load(folder, **{"device": "cpu", **settings})
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_missing_model_is_a_checkpoint_error(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError):
            LLM.load(tmp_path / "nothing-here", device="cpu")

    def test_what_was_opened_is_closed_if_loading_fails(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[str] = []
        monkeypatch.setattr(CpuDevice, "close", lambda self: closed.append("device"))
        monkeypatch.setattr(llm_module.KVCache, "close", lambda self: closed.append("cache"))
        with pytest.raises(AssertionError, match="the weights were read"):
            LLM.load(folder, device="cpu")
        assert closed == ["cache", "device"]


def test_on_the_cpu_offloading_is_a_no_op_with_one_notice(folder: Path, llm: LLM) -> None:
    """B55: offload flags without a GPU."""
    said: list[str] = []
    with LLM.load(folder, device="cpu", kv_policy="offload", notify=said.append) as offloaded:
        assert [p.store for p in offloaded.placements] == ["resident"] * 4
        assert all("same" in p.reason for p in offloaded.placements)
        [completion] = offloaded.generate(LONG, greedy())
    assert len(said) == 1 and "offload" in said[0]
    assert ids(llm.generate(LONG, greedy())) == [completion.token_ids]
    assert completion.stats.host_kv_bytes == completion.stats.h2d_bytes == 0


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_on_the_cpu_half_precision_files_run_in_float32(
    stored: torch.dtype, tmp_path: Path
) -> None:
    """B55: half-precision operators are missing or slow on the CPU."""
    folder = write_tiny_llama3(tmp_path, dtype=stored, n_layers=1)
    with LLM.load(folder, device="cpu") as model:
        assert model.cache.dtype == torch.float32
        assert model.model.tok_embeddings.weight.dtype == torch.float32
        assert len(model.generate("abc", greedy())[0].token_ids) == 8


def test_an_explicit_cuda_without_a_card_fails_in_one_line(folder: Path) -> None:
    """B55: explicit --device cuda."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(OffloadLlamaError) as caught:
        LLM.load(folder, device="cuda")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 7


def test_the_context_is_the_models_own_unless_asked_for_less(folder: Path, llm: LLM) -> None:
    """B17: no hidden small default."""
    assert llm.cache.max_seq_len == CTX
    with LLM.load(folder, device="cpu", ctx=64) as small:
        assert small.cache.max_seq_len == 64
        [completion] = small.generate("abc")
        assert completion.finish_reason in ("context", "eos")


@pytest.mark.parametrize("n_tokens", [CTX, CTX + 47])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    llm: LLM, n_tokens: int
) -> None:
    """B17: nothing is cut off, and nothing is run."""
    with pytest.raises(PromptTooLong) as caught:
        llm.generate([65] * n_tokens)
    assert f"has {n_tokens} tokens" in str(caught.value) and "context of 256" in str(caught.value)
    assert "all this model allows" in str(caught.value)
    assert (caught.value.prompt_tokens, caught.value.max_seq_len) == (n_tokens, CTX)
    assert caught.value.exit_code == 6 and "\n" not in str(caught.value)


def test_one_token_less_than_the_context_gives_one_token(llm: LLM) -> None:
    """B17, B47: to capacity exactly, then the reason is "context"."""
    [completion] = llm.generate([65] * (CTX - 1), SamplingParams(ignore_eos=True))
    assert len(completion.token_ids) == 1 and completion.finish_reason == "context"
    [completion] = llm.generate([65] * 200, SamplingParams(ignore_eos=True))
    assert len(completion.token_ids) == 56 and completion.finish_reason == "context"


def test_a_context_smaller_than_the_models_names_the_flag_that_raises_it(folder: Path) -> None:
    """B17: the flag to raise the limit, and how far."""
    with LLM.load(folder, device="cpu", ctx=32) as small:
        with pytest.raises(PromptTooLong, match="raise it with --ctx, this model allows 256"):
            small.generate("x" * 40)
        with pytest.raises(PromptTooLong, match="at most 256: shorten the prompt"):
            small.generate("x" * 400)


def test_an_empty_prompt_starts_from_the_begin_token(llm: LLM) -> None:
    """B34: with a begin token."""
    both = llm.generate(["", "hi"], greedy())
    assert both[0].prompt_token_ids == (TINY_BOS,)
    assert llm.generate([[]], greedy())[0].token_ids == both[0].token_ids
    assert both[1].token_ids == llm.generate("hi", greedy())[0].token_ids
    for blank in ("   ", "\n"):
        assert len(llm.generate(blank, greedy())[0].token_ids) == 8


def test_an_empty_prompt_without_a_begin_token_is_refused_by_number(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B34: without a begin token; the other row can be run."""
    admission = replace(llm._admission, tokenizer=NoBegin(llm.tokenizer))
    monkeypatch.setattr(llm, "_admission", admission)
    with pytest.raises(RequestError, match=r"prompt 1 of 2 is empty.*no begin token"):
        llm.generate(["", "hi"])
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.check(llm.encode(""))
    assert llm.check(llm.encode("hi")) == tuple(b"hi")


class NoBegin:
    """The same vocabulary without a begin token."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self.bos_id = None

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> Any:
        return self._vocabulary.encode(text, special=special)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, TINY_VOCAB_SIZE], "token id 512; this model has ids 0 to 511"),
        ([-1, 5], "token id -1"),
        (["hi", 5], "a prompt is a string or a list of token ids"),
        (["hi", None], "a prompt is a string or a list of token ids"),
        (["hi", [1.5]], "a prompt is a string or a list of token ids"),
    ],
)
def test_a_prompt_the_model_cannot_read_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt)
    assert message in str(caught.value)


def test_text_gets_the_begin_token_and_its_control_tokens_are_read(llm: LLM) -> None:
    assert llm.encode("a<|eot_id|>b") == [TINY_BOS, 97, TINY_EOT, 98]
    assert llm.encode([97, 98]) == [97, 98]


def test_more_prompts_than_the_batch_run_in_chunks_and_in_order(llm: LLM) -> None:
    """B41: six prompts with a limit of four, and each is like alone."""
    prompts = ["a", LONG, "bc", "def", "gh", "the last"]
    settings = [greedy(n) for n in (9, 3, 6, 1, 4, 2)]
    done: list[tuple[int, Completion]] = []
    completions = llm.generate(
        prompts, settings, on_done=lambda index, answer: done.append((index, answer))
    )
    assert [len(c.token_ids) for c in completions] == [9, 3, 6, 1, 4, 2]
    assert [c.prompt_token_ids for c in completions] == [tuple(llm.encode(p)) for p in prompts]
    assert [index for index, _ in done] == [3, 1, 2, 0, 5, 4]
    assert all(completions[index] is answer for index, answer in done)
    for prompt, params, answer in zip(prompts, settings, completions, strict=True):
        assert llm.generate(prompt, params)[0].token_ids == answer.token_ids


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    """B41: an empty file."""
    assert llm.generate([]) == []


def test_as_many_params_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="2 prompts need as many params, got 1"):
        llm.generate(["a", "b"], [greedy()])


def test_batched_rows_have_the_ids_of_their_single_runs(llm: LLM) -> None:
    """B04: 3, 40 and 117 tokens in all six orders, one that ends in the end token, twins."""
    prompts = [list(b"abc"), [*(LONG * 2)[:39].encode(), TINY_EOS], list(LONG[:117].encode())]
    assert [len(p) for p in prompts] == [3, 40, 117]
    alone = [llm.generate(p, greedy(32))[0].token_ids for p in prompts]
    for order in permutations(range(3)):
        assert ids(llm.generate([prompts[i] for i in order], greedy(32))) == [
            alone[i] for i in order
        ]
    assert ids(llm.generate([prompts[1], prompts[1]], greedy(32))) == [alone[1]] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_half_precision_a_short_row_beside_a_long_one_is_like_alone(
    folder: Path, dtype: str
) -> None:
    """B23: 1 and 64 tokens, chunk 16; not a number would be an error of its own."""
    with LLM.load(folder, device="cpu", dtype=dtype, max_batch_size=2, prefill_chunk=16) as model:
        short, long = [97], list(LONG[:64].encode())
        [alone] = model.generate([short], greedy(4))
        both = model.generate([long, short], greedy(4))
    assert both[1].token_ids == alone.token_ids
    assert len(both[0].token_ids) == 4


def test_a_second_call_is_like_the_first_after_other_calls_and_one_that_raised(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B28: long A, short B, A again, with another batch size and a failure between."""
    a, b = LONG, "short"
    first = llm.generate(a, greedy())[0]
    second = llm.generate(b, greedy())[0]
    llm.generate([b, a, b], greedy())
    ffn = llm.model.layers[2].feed_forward  # fails in the middle of a step

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a layer broke")

    with monkeypatch.context() as patch:
        patch.setattr(ffn, "forward", broken)
        with pytest.raises(RuntimeError, match="a layer broke"):
            llm.generate([a, b], greedy())
    assert llm.cache.lengths == [0] * 4
    assert llm.generate(a, greedy())[0].token_ids == first.token_ids
    with LLM.load(folder, device="cpu", prefill_chunk=32) as fresh:
        assert fresh.generate(b, greedy())[0].token_ids == second.token_ids
    stats = llm.cache.stats()
    assert stats.host_kv_bytes == stats.device_kv_bytes == 0


def test_a_chat_is_answered_through_the_template(llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say <|eot_id|>"}]
    prompt = llm.encode_chat(messages)
    assert prompt[0] == TINY_BOS and prompt.count(TINY_BOS) == 1
    assert prompt.count(TINY_EOT) == 1  # the template's; the user's is plain text
    completion = llm.chat(messages, greedy())
    assert completion.prompt_token_ids == tuple(prompt)
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_can_be_given_as_text_or_file(
    folder: Path, tmp_path: Path, as_file: bool
) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(template, "utf-8")
    given = str(path) if as_file else template
    with LLM.load(folder, device="cpu", chat_template=given) as model:
        assert model.chat_template == template
        assert model.encode_chat([{"role": "user", "content": "hi"}]) == [TINY_BOS, *b"[hi]"]


def test_the_json_object_lists_every_layers_placement(llm: LLM) -> None:
    [completion] = llm.generate("abc", greedy(2))
    answer = completion.as_dict(llm.placements)
    assert [p["layer"] for p in answer["placements"]] == [0, 1, 2, 3]
    assert answer["stats"]["device_kv_bytes"] > 0


@pytest.mark.parametrize(
    ("card", "dtype"),
    [("rtx-3060-12gb", torch.bfloat16), ("rtx-2060", torch.float16)],
)
def test_a_card_runs_in_bfloat16_where_it_has_it(
    folder: Path, card: str, dtype: torch.dtype
) -> None:
    with LLM.load(folder, device=f"sim:{card}") as model:
        assert model.cache.dtype == dtype
