"""Who samples a generation: vLLM, in the trainer's own processes or on servers, or else the policy
itself.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.servers import ServerPool
from adora_vl.types import StepContext
from adora_vl.utils.errors import engine_call

Asks = Sequence[SamplingRequest]
Settings = Mapping[str, Any] | None  # of vLLM's `SamplingParams`; None: the run's


@dataclass(frozen=True)
class PendingSamples:
    """For what was asked of servers, to be sampled by the weights of a step."""

    step: int  # optimizer steps that had been made
    # waits for this rank's answers; raises what asking raised, on all ranks
    join: Callable[[], list[SamplingResult]]


class Sampler(Protocol):
    """All ranks call every method together, also with nothing to ask."""

    scores: bool  # whether its answers have log-probabilities

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        """Sampled now, by the policy's present weights.

        `prompts`: of the asks, None where there are none.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Inside, an engine does not sleep between two calls."""


class TransformersSampler:
    """The policy samples by Transformers, in TRL's way.

    What it thinks of its tokens a pass has to say.
    """

    scores = False

    def __init__(self, turn: Callable[[PromptBatch], list[list[int]]]) -> None:
        """`turn`: samples a rollout of each prompt."""
        self._turn = turn

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        assert prompts is not None and settings is None
        return [
            SamplingResult(tokens, [None] * len(tokens), "stop") for tokens in self._turn(prompts)
        ]

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()


class VLLMSampler:
    """vLLM samples, in the trainer's processes or on servers, after it has got the policy's
    weights.
    """

    scores = True

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        self.engine = engine
        self.context = context
        self.synced = -1  # optimizer steps of the weights that were given last
        engine.take_images_from(images.cache)

    def give_weights(self, *, anew: bool = False) -> None:
        """The policy's weights to the engine, unless it has them.

        `anew`: they are no longer those of this step.
        """
        if anew or self.context.state().global_step != self.synced:
            self._give()
            self.synced = self.context.state().global_step

    def _give(self) -> None:
        self.engine.sync_weights()

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        self.give_weights()
        return self.engine.sample(asks, settings)

    def awake(self) -> AbstractContextManager[None]:
        return self.engine.staying_awake()


class AsyncServerSampler(VLLMSampler):
    """Servers that are asked before the rollouts are needed.

    What they get, weights and asks, stands in a queue, and is done in its order on a thread of the
    first rank that does HTTP alone, so that no collective of the policy's meets another: which
    weights sample what does not depend on the clock. Weights wait as files.
    """

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        super().__init__(context, images, engine)
        self.ahead = context.config.adora_rollouts.ahead  # generations
        self._queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        self._files: dict[Path, ExitStack] = {}  # of weights that are not read yet
        self._partly_new = False  # whether a server was started again, and has no weights
        self._thread: threading.Thread | None = None
        self._seconds = {"trainer": 0.0, "servers": 0.0}

    def _give(self) -> None:
        everything = self.synced < 0 or self.engine.served.first_rank(lambda _: self._partly_new)
        with ExitStack() as until:
            folder = until.enter_context(self.engine.weights_written(everything=everything))
            if self.engine.served.servers is not None:
                self._files[folder] = until.pop_all()
                self._put(partial(self._read, folder=folder, everything=everything))

    def _read(self, servers: ServerPool, folder: Path, everything: bool) -> None:
        try:
            self._partly_new = servers.find(in_part=not everything) and not everything
            servers.read_weights(folder)
        finally:
            self._files.pop(folder, ExitStack()).close()

    def begin(self, asks: Asks, settings: Settings = None) -> PendingSamples:
        """Ask the servers, once they have done what they were asked before."""
        engine = self.engine
        place = self.engine.served.place
        requests = engine.served.gathered(asks, engine.sampling if settings is None else settings)
        found = self._put(lambda servers: servers.sample(requests, place))
        return PendingSamples(self.synced, cache(partial(self._join, found, len(asks))))

    def _join(self, found: Future[Any] | None, asks: int) -> list[SamplingResult]:
        began = time.perf_counter()
        with engine_call("generate"):
            everyone = self.engine.served.first_rank(lambda _: found.result() if found else [])
        self._seconds["trainer"] += time.perf_counter() - began
        return self.engine.served.shared(everyone, asks)

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        self.give_weights()
        return self.begin(asks, settings).join()

    def waited(self) -> dict[str, float]:
        """Seconds since the last call for which the trainer waited for servers, and on the first
        rank they for it.
        """
        found = self._seconds
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return found

    def close(self) -> None:
        """Remove the weights that nobody has read."""
        for folder in list(self._files):
            self._files.pop(folder, ExitStack()).close()

    def _put(self, do: Callable[[ServerPool], Any]) -> Future[Any] | None:
        """Into the queue, on the first rank.

        What follows an item that has failed fails as it has.
        """
        servers = self.engine.served.servers
        if servers is None:
            return None
        future = Future[Any]()
        self._queue.put((partial(do, servers), future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts-ahead", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        problem: BaseException | None = None
        while True:
            began = time.perf_counter()
            do, future = self._queue.get()
            self._seconds["servers"] += time.perf_counter() - began
            try:
                if problem is not None:
                    raise problem
                future.set_result(do())
            except BaseException as error:
                problem = error
                future.set_exception(error)
