"""Every exception of the package.

    OffloadLlamaError
    ├── ConfigError          a value the user gave is not possible
    ├── CheckpointError      the model's files are missing, damaged or not supported
    ├── TokenizerError       the vocabulary or the chat template cannot be used
    ├── PlanError
    │   └── DoesNotFit       more bytes are needed than there are
    ├── OutOfMemory          the card's memory ran out, and nothing more could leave it
    ├── CacheError
    │   └── CapacityError    a sequence or a batch outgrew the cache
    ├── DeviceError          the device is not here, or cannot do what was asked
    └── RequestError         one prompt or message list cannot be served
        └── PromptTooLong    the prompt does not fit the context

A message says what was asked, what is possible and what to do next, in one line. The command
line turns `exit_code` into the process's exit code.
"""

from __future__ import annotations

from collections.abc import Mapping


class OffloadLlamaError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class ConfigError(OffloadLlamaError):
    """A value given by the user is not possible."""

    exit_code = 2


class CheckpointError(OffloadLlamaError):
    """A model's files are missing, damaged or of an unsupported kind."""

    exit_code = 4


class TokenizerError(OffloadLlamaError):
    """The vocabulary or the chat template is missing or unusable."""

    exit_code = 4


class PlanError(OffloadLlamaError):
    """No placement does what was asked."""

    exit_code = 3


class DoesNotFit(PlanError):
    """More bytes are needed than are available.

    Attributes:
        needed_bytes: bytes the request needs.
        available_bytes: bytes there are.
        suggestions: what to type instead, best first.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        suggestions: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.suggestions = suggestions


class OutOfMemory(OffloadLlamaError):
    """The card's memory ran out, and nothing more could leave it.

    Attributes:
        phase: "weights", "prefill" or "decode".
        needed_bytes: what was asked for in vain.
        free_bytes: what was free.
        holders: bytes by who holds them: weights, KV, staging, activations, other programs, and
            what PyTorch keeps for itself.
        suggestions: three options that would work, best first.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        phase: str,
        needed_bytes: int,
        free_bytes: int,
        holders: Mapping[str, int],
        suggestions: tuple[str, ...],
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.holders = dict(holders)
        self.suggestions = suggestions


class CacheError(OffloadLlamaError):
    """The KV cache was asked for something it cannot do."""


class CapacityError(CacheError):
    """A sequence or a batch outgrew the cache it was planned for."""

    exit_code = 6


class DeviceError(OffloadLlamaError):
    """The device is not here, or cannot do what was asked."""

    exit_code = 7


class RequestError(OffloadLlamaError):
    """One prompt or message list cannot be served; others can."""

    exit_code = 2


class PromptTooLong(RequestError):
    """The prompt leaves no room in the context.

    Attributes:
        prompt_tokens: length of the prompt.
        max_seq_len: tokens the context holds.
    """

    exit_code = 6

    def __init__(self, message: str, *, prompt_tokens: int, max_seq_len: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.max_seq_len = max_seq_len
