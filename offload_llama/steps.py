"""Iterators over what a model generates, and whose turn it is to have the cache."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from types import TracebackType

from offload_llama.errors import RequestError
from offload_llama.generate import Completion, Engine, Request, Run, Token


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while prompts were running.

    Attributes:
        completions: one for each prompt that had begun, in order; those not finished hold what
            there is, with the reason "interrupted".
    """

    def __init__(self, completions: Sequence[Completion]) -> None:
        super().__init__("interrupted")
        self.completions = list(completions)


class Turn:
    """The engine, and the right to use it: one run at a time.

    Entered by a run for as long as it needs the cache. Other threads wait. The thread that has
    it already is refused, since it would wait for itself.
    """

    def __init__(self, engine: Engine) -> None:
        self.run: Run | None = None
        self._engine: Engine | None = engine
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def engine(self) -> Engine:
        """The parts that a run works with.

        Raises:
            RequestError: the model was closed.
        """
        if self._engine is None:
            raise RequestError("this model was closed; load it again")
        return self._engine

    def __enter__(self) -> Turn:
        if self._owner == threading.get_ident():
            raise RequestError(
                "the model is busy: an earlier iterator of this thread is not finished; "
                "read it to its end or close() it first"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.run = None
        self._owner = None
        self._lock.release()

    def close(self) -> None:
        """End what this thread has running, wait for what others have, and free the engine."""
        if self._owner == threading.get_ident():
            self._free()
        else:
            with self:
                self._free()

    def _free(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self.run is not None:
            self.run.close()
        engine.close_cache()
        engine.device.close()


class Steps:
    """Iterator over the steps of a run: lists of tokens, one from each sequence that moved.

    Each prompt's first token comes in a step of its own, as its prefill ends. From the first step
    to the end, `close` or the loss of the last reference, the model is busy with it.
    """

    def __init__(self, turn: Turn, requests: Sequence[Request]) -> None:
        self._done: dict[int, Completion] = {}
        # The generator knows the dict and not this object: without a reference cycle, a dropped
        # iterator closes at once.
        self._tokens = _steps(turn, requests, self._done)

    @property
    def completions(self) -> list[Completion]:
        """Those there are, by prompt; after `close` one for each prompt that had begun."""
        return [self._done[index] for index in sorted(self._done)]

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> list[Token]:
        return next(self._tokens)

    def close(self) -> None:
        """Stop and free the cache's rows; what is unfinished ends as "interrupted"."""
        self._tokens.close()


class Stream:
    """Iterator over the tokens of one answer.

    After Ctrl-C, or whenever the caller has enough, `close` ends it and `completion` has what
    there is.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @property
    def completion(self) -> Completion | None:
        """The answer once it is finished or closed; None before, or if it never began."""
        return next(iter(self._steps.completions), None)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        [token] = next(self._steps)
        return token

    def close(self) -> None:
        """Stop and free the cache's row; an unfinished answer ends as "interrupted"."""
        self._steps.close()


def _steps(
    turn: Turn, requests: Sequence[Request], done: dict[int, Completion]
) -> Generator[list[Token], None, None]:
    """Yield the tokens of each step, and put completions into `done`."""
    with turn:
        size = turn.engine.cache.max_batch_size
        for first in range(0, len(requests), size):
            run = Run(turn.engine, requests[first : first + size], first_index=first)
            turn.run = run
            keep_partial = False
            try:
                while not run.done:
                    tokens = run.step()
                    done.update(run.completions)
                    yield tokens
            except (GeneratorExit, KeyboardInterrupt):
                keep_partial = True
                raise
            finally:
                run.close(interrupted=keep_partial)
                done.update(run.completions)
