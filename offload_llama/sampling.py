"""Logits -> token ids.

    R  sequences in this step    V  rows of the output matrix

The greedy choice is made on the device and only ids travel. Everything else happens in float32
on the CPU with a random generator of the sequence's own, so that a seed means the same text on
every device and beside any neighbours.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from offload_llama.config import SamplingParams
from offload_llama.errors import OffloadLlamaError

GREEDY_TEMPERATURE = 0.01
"""At and below this temperature the likeliest token is taken."""

_NUCLEUS_GUESS = 1024
"""Tokens tried first for top-p; sorting a whole vocabulary costs milliseconds."""


class Choice(NamedTuple):
    """One chosen token; `logprob` is None unless it was asked for."""

    token_id: int
    logprob: float | None


class Sampler:
    """Chooses one sequence's tokens, and remembers what that needs from token to token.

    The steps come in this order: repetition penalty, temperature, top-k, top-p, min-p, draw.

    Attributes:
        seed: what the generator was seeded with: `params.seed`, or a fresh one.
    """

    def __init__(
        self, params: SamplingParams, *, prompt_ids: Iterable[int] = (), logprobs: bool = False
    ) -> None:
        self.params = params
        self.logprobs = logprobs
        self.greedy = params.temperature <= GREEDY_TEMPERATURE
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._generator = torch.Generator(device="cpu").manual_seed(self.seed)
        self._prompt_ids = tuple(prompt_ids) if params.repetition_penalty != 1 else ()
        self._seen: torch.Tensor | None = None  # (V,) bool: ids of the prompt and the answer

    @property
    def needs_logits(self) -> bool:
        """Whether the choice takes the logits themselves, not only where they are largest."""
        return not self.greedy or self.logprobs or self.params.repetition_penalty != 1

    def choose(self, logits: torch.Tensor, n_ids: int) -> Choice:
        """Return the next token; it counts as seen from now on.

        Args:
            logits: (V,) float32 on the CPU; not changed.
            n_ids: only ids below this may be chosen.

        Raises:
            OffloadLlamaError: the logits are not finite.
        """
        scores = self._penalised(logits)[:n_ids]
        best = scores.max()
        if not torch.isfinite(best):
            raise _not_finite()
        token_id = int(scores.argmax()) if self.greedy else self._draw(scores - best)
        if self._seen is not None:
            self._seen[token_id] = True
        logprob = float(logits[token_id] - logits.logsumexp(0)) if self.logprobs else None
        return Choice(token_id, logprob)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with those of seen ids pushed towards the unlikely.

        Source: CTRL (arXiv 1909.05858), section 4.1, in the form that also lowers negative logits.
        """
        penalty = self.params.repetition_penalty
        if penalty == 1:
            return logits
        if self._seen is None:
            self._seen = torch.zeros(logits.shape[0], dtype=torch.bool)
            self._seen[list(self._prompt_ids)] = True
        lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(self._seen, lowered, logits)

    def _draw(self, scores: torch.Tensor) -> int:
        """Return an id drawn by scores (n_ids,), of which the largest is 0."""
        ids, weights = self._candidates(scores / self.params.temperature)
        # In id order, not by rank: two nearly equal logits that swap ranks on another device or
        # in another batch then do not change which of them a random number falls on.
        cumulative = weights.cumsum(0)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[-1]
        place = int(torch.searchsorted(cumulative, point, right=True))
        place = min(place, cumulative.shape[0] - 1)
        return place if ids is None else int(ids[place])

    def _candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the ids that survive top-k, top-p and min-p, ascending, and their weights.

        None stands for all ids. Weights are float64 and not normalised; the likeliest weighs 1.

        Source: top-p from "The Curious Case of Neural Text Degeneration" (arXiv 1904.09751): the
        smallest set of likeliest tokens that reaches p; min-p from arXiv 2407.01082: tokens at
        least p times as likely as the likeliest.
        """
        top_k, top_p, min_p = self.params.top_k, self.params.top_p, self.params.min_p
        ids = None
        if top_k is not None and top_k < scores.shape[0]:
            ids = largest(scores, top_k)
            if top_p < 1:
                ids = ids[: _n_to_reach(top_p, scores[ids].double().exp())]
        elif top_p < 1:
            ids = _nucleus(scores, top_p)
        if ids is not None:
            ids = ids.sort().values
            scores = scores[ids]
        weights = scores.double().exp()
        if min_p > 0:
            kept = (weights >= min_p).nonzero().squeeze(1)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        return ids, weights


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest scores, largest first, the lower id first on a tie."""
    if count >= scores.shape[0]:
        return scores.sort(descending=True, stable=True).indices
    threshold = scores.topk(count).values[-1]
    ids = (scores >= threshold).nonzero().squeeze(1)
    return ids[scores[ids].sort(descending=True, stable=True).indices[:count]]


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the fewest likeliest ids whose weights reach `top_p` of all, likeliest first."""
    total = scores.double().exp().sum()
    likeliest = largest(scores, _NUCLEUS_GUESS)
    weights = scores[likeliest].double().exp()
    if weights.sum() < top_p * total:
        likeliest = largest(scores, scores.shape[0])
        weights = scores[likeliest].double().exp()
    return likeliest[: _n_to_reach(top_p, weights, total)]


def _n_to_reach(top_p: float, weights: torch.Tensor, total: torch.Tensor | None = None) -> int:
    """Return how many of the first weights it takes to reach `top_p` of their total."""
    cumulative = weights.cumsum(0)
    goal = top_p * (cumulative[-1] if total is None else total)
    return int(torch.searchsorted(cumulative, goal)) + 1


def sample(logits: torch.Tensor, samplers: Sequence[Sampler], n_ids: int) -> list[Choice]:
    """Return the next token of each sequence, waiting for the device once for all of them.

    Args:
        logits: (R, V) float32 on the device.
        samplers: one per row.
        n_ids: ids the vocabulary knows. Rows of the output matrix beyond it are never chosen.

    Raises:
        OffloadLlamaError: the logits of a sequence are not finite.
    """
    n_ids = min(n_ids, logits.shape[-1])
    if any(sampler.needs_logits for sampler in samplers):
        rows = logits.cpu()
        return [s.choose(row, n_ids) for s, row in zip(samplers, rows, strict=True)]
    best, ids = logits[:, :n_ids].max(dim=-1)
    chosen: list[int] = torch.where(best.isfinite(), ids, -1).cpu().tolist()
    if min(chosen) < 0:
        raise _not_finite()
    return [Choice(token_id, None) for token_id in chosen]


def logprobs_of(logits: torch.Tensor, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of ids[i] under logits[i]: (n, V) on the device, n ids."""
    if not ids:
        return []
    chosen = torch.tensor(ids).to(logits.device)
    picked = logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1)
    values: list[float] = picked.cpu().tolist()
    return values


def _not_finite() -> OffloadLlamaError:
    return OffloadLlamaError(
        "the model's logits are not finite numbers: the weights are damaged, or the numbers grew "
        "too large for the dtype; try --dtype bfloat16 or --dtype float32"
    )
