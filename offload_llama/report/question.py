"""One question to the planner, with all that an answer needs, and what can be varied in it."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from offload_llama.config import ModelConfig
from offload_llama.cost import RUNNABLE_KV, RUNNABLE_WEIGHTS, SHORT_NAMES, Setup, decode_seconds
from offload_llama.hardware import HardwareProfile
from offload_llama.models import find_preset
from offload_llama.options.kinds import mixed
from offload_llama.planner import Budget, MemoryPlan, Speed, budget_of
from offload_llama.policy import Placement
from offload_llama.policy import plan as plan_of
from offload_llama.report.target import Target, plain_size

if TYPE_CHECKING:
    from offload_llama.checkpoint.headers import ModelShape

PROGRAM = "offload-llama"


@dataclass(frozen=True)
class Answer:
    """A plan with each layer's placement, and the speed it predicts."""

    plan: MemoryPlan
    placements: tuple[Placement, ...]

    @property
    def fits(self) -> bool:
        """Whether card and host both hold it."""
        return self.plan.fits and self.plan.host_fits

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step at full context."""
        plan = self.plan
        return decode_seconds(plan.setup, plan.profile, plan.hosts, plan.setup.ctx)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of each sequence, at full context."""
        return 1 / self.decode_s

    @functools.cached_property
    def speed(self) -> Speed:
        """All that is predicted; a prompt's seconds take the longest to work out."""
        return self.plan.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, a card and how the one runs on the other.

    `model` is what the user typed; `setup` holds context, batch and numbers. `notes` are what was
    decided for the user.
    """

    model: str
    shape: ModelShape
    target: Target
    setup: Setup
    policy: str = "auto"
    reserve_bytes: int | None = None
    allow_lossy: bool = False
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return self.setup.config

    @property
    def profile(self) -> HardwareProfile:
        return self.target.profile

    @property
    def budget(self) -> Budget:
        """What may be used of card and host.

        Raises:
            ConfigError: nothing is left beside the reserve.
        """
        return budget_of(
            self.profile,
            free_bytes=self.target.free_bytes,
            reserve_bytes=self.reserve_bytes,
            ram_bytes=self.target.ram_bytes,
        )

    def varied(self, **changes: Any) -> Question:
        """Return the question with another policy, or other fields of its setup."""
        policy = changes.pop("policy", self.policy)
        return replace(self, policy=policy, setup=replace(self.setup, **changes))

    def noted(self, note: str) -> Question:
        """Return the question with something that the report says of it."""
        return replace(self, notes=(*self.notes, note))

    def answer(self) -> Answer:
        """Return the plan.

        Raises:
            ConfigError: the policy cannot be read, or asks for what is not there.
        """
        return _answer(self.policy, self.setup, self.profile, self.budget)

    @property
    def not_yet_runnable(self) -> list[str]:
        """What of it the engine cannot run yet, as the options are spelled."""
        parts = []
        if self.setup.weights not in RUNNABLE_WEIGHTS:
            parts.append(f"--weights {self.setup.weights}")
        if self.setup.kv_dtype not in RUNNABLE_KV:
            parts.append(f"--kv-dtype {self.setup.kv_dtype}")
        short = SHORT_NAMES[self.setup.dtype]
        if not parts and {self.setup.weights, self.setup.kv_dtype} != {short}:
            parts.append(mixed(self.setup.weights, self.setup.kv_dtype, short))
        return parts

    def options(self) -> list[str]:
        """Return what to type behind `plan MODEL` for this very question."""
        setup = self.setup
        words = [*self.target.options]
        if self.target.ram_bytes is not None and self.target.title is None:
            words += ["--ram", plain_size(self.target.ram_bytes)]
        if self.reserve_bytes is not None:
            words += ["--reserve", plain_size(self.reserve_bytes)]
        words += ["--weights", setup.weights]
        if setup.kv_dtype != SHORT_NAMES[setup.dtype]:
            words += ["--kv-dtype", setup.kv_dtype]
        if setup.weights != SHORT_NAMES[setup.dtype]:
            words += ["--dtype", SHORT_NAMES[setup.dtype]]
        words += ["--ctx", tokens_word(setup.ctx)]
        if setup.batch != 1:
            words += ["--batch", str(setup.batch)]
        if setup.prefill_chunk != 512:
            words += ["--prefill-chunk", str(setup.prefill_chunk)]
        if self.policy != "auto":
            words += ["--kv-policy", self.policy]
        return words

    def command(self) -> str:
        """Return the command line that asks this very question."""
        preset = None if self.shape.file_bytes else find_preset(self.model)
        model = self.model if preset is None else preset.slug
        return shlex.join([PROGRAM, "plan", model, *self.options()])

    @property
    def run_model(self) -> str:
        """The name under which the model can be run: a preset's is its repository's."""
        preset = find_preset(self.model)
        if preset is None or self.shape.file_bytes is not None:
            return self.model
        return preset.repository

    def run_command(self) -> str:
        """Return the command line that runs the model like this."""
        words = self.options()
        if words[0] == "--gpu":
            del words[:2]  # a run takes the card that is there
        return shlex.join([PROGRAM, "generate", "--model", self.run_model, *words, "PROMPT"])


@functools.lru_cache(maxsize=512)
def _answer(policy: str, setup: Setup, profile: HardwareProfile, budget: Budget) -> Answer:
    return Answer(*plan_of(policy, setup, profile, budget))


def tokens_word(tokens: int) -> str:
    """Return a number of tokens as it is typed: 32k for 32768."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def numbers(
    weights: str, kv_dtype: str, dtype: str, profile: HardwareProfile
) -> tuple[str, str, str]:
    """Return weights, KV and compute dtype with every "auto" settled.

    The numbers that are computed with follow those of weights, or else of keys and values, where
    these are plain; else the card: bf16 where it has it, else fp16. What is not said otherwise is
    kept in the same.
    """
    long_names = {short: long for long, short in SHORT_NAMES.items()}
    if dtype == "auto":
        native = "bfloat16" if profile.bf16 else "float16"
        dtype = long_names.get(weights) or long_names.get(kv_dtype) or native
    short = SHORT_NAMES[dtype]
    return (
        short if weights == "auto" else weights,
        short if kv_dtype == "auto" else kv_dtype,
        dtype,
    )
