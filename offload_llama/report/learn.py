"""A short run on the card that is here, to learn what its runtime takes beyond the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from offload_llama.config import SamplingParams
from offload_llama.console import Console
from offload_llama.errors import ConfigError
from offload_llama.hardware import format_bytes
from offload_llama.planner import MemoryPlan

if TYPE_CHECKING:
    from offload_llama.device import Device
    from offload_llama.llm import LLM

PROMPT_TOKENS, ANSWER_TOKENS = 512, 8


def learn(load: Callable[[], LLM], device_name: str, console: Console) -> int:
    """Load a model, run it briefly, keep what it took beyond its plan, and return the exit code.

    Raises:
        ConfigError: the device is no real card.
        OffloadLlamaError: what keeps the model from loading or running.
    """
    from offload_llama.device import open_device
    from offload_llama.device.figures import card_title
    from offload_llama.profiles import key_of, learn_overhead

    device = open_device(device_name)
    real = device.offloads and not device.simulated
    device.close()
    if not real:
        raise ConfigError(
            f"--learn measures a real card, and --device {device_name} is none here; a simulated "
            "card is what its figures say"
        )
    with load() as llm:
        if llm.plan is None:
            raise ConfigError("--learn needs a card with memory of its own")
        limit = llm.cache.max_seq_len - ANSWER_TOKENS
        prompt = [0] * max(1, min(PROMPT_TOKENS, limit))
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        llm.generate([prompt], params)
        beyond = beyond_plan(llm.plan, llm.device)
        learnt = learn_overhead(key_of(card_title(llm.device)), beyond).learnt_bytes
    planned = llm.plan.device_bytes["overhead"]
    console.write(
        f"the runtime took {format_bytes(planned + beyond)} beside the tensors, "
        f"{format_bytes(planned)} were planned; plans for this card now add "
        f"{format_bytes(learnt)}\n"
    )
    return 0


def beyond_plan(plan: MemoryPlan, device: Device) -> int:
    """Return what the runtime took beside our tensors since loading, less what was planned."""
    memory = device.memory()
    taken = plan.available_bytes - memory.free_bytes
    return taken - memory.peak_bytes - plan.device_bytes["overhead"]
