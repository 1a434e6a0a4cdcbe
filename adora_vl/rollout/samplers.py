"""The samplers of a generation.

vLLM samples in the trainer's own processes or on servers; without it the policy samples itself.
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
from adora_vl.rollout.rollouts import FinishReason, SamplingRequest, SamplingResult
from adora_vl.rollout.servers import ServerPool
from adora_vl.types import StepContext
from adora_vl.utils.errors import engine_call

Asks = Sequence[SamplingRequest]
Settings = Mapping[str, Any] | None  # of vLLM's `SamplingParams`; None: the run's


@dataclass(frozen=True)
class PendingSamples:
    """Samples that were asked for and have not arrived.

    Servers that sample ahead sample them with the weights of a step, while the trainer goes on; any
    other sampler begins when `join` is called. `join` waits for this rank's results and raises a
    server's error on all ranks. All ranks call it together; a second call returns the same results.
    """

    step: int  # number of optimizer steps that those weights have
    join: Callable[[], list[SamplingResult]]


class Sampler(Protocol):
    """Samples rollouts. All ranks call every method together, also without any requests."""

    scores: bool  # whether its results have log-probabilities

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        """Sample now, with the policy's present weights.

        `prompts`: the processed prompts of `asks`; None where they are not known.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Inside the block an engine does not sleep between two calls."""


class TransformersSampler:
    """Samples with `transformers.generate`, as TRL does.

    Log-probabilities come from a later forward pass.
    """

    scores = False

    def __init__(self, turn: Callable[[PromptBatch], list[list[int]]]) -> None:
        """`turn`: samples the tokens of one rollout per prompt."""
        self._turn = turn

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        assert prompts is not None
        assert settings is None
        return [
            SamplingResult(
                tokens=tokens, logps=[None] * len(tokens), finish_reason=FinishReason.STOP
            )
            for tokens in self._turn(prompts)
        ]

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()


class VLLMSampler:
    """Samples with vLLM, in the trainer's processes or on servers, after a weight sync."""

    scores = True

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        self.engine = engine
        self.context = context
        self.synced = -1  # number of optimizer steps of the weights that the engine has
        engine.take_images_from(images.cache)

    def give_weights(self, *, anew: bool = False) -> None:
        """Send the policy's weights to the engine, unless it has those of this step.

        `anew`: send them in any case, since they have changed within the step.
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
    """Samples on servers that get their requests before the rollouts are needed.

    Weights and requests go into a queue. A thread of the first rank works it off in order, so which
    weights sample a rollout does not depend on timing. The thread does nothing but HTTP, so that
    its collective calls cannot interleave with the policy's. Weights wait as files.
    """

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        super().__init__(context, images, engine)
        self.ahead = context.config.adora_rollouts.ahead  # generations
        self._queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        self._files: dict[Path, ExitStack] = {}  # weights that no server has read yet
        self._partly_new = False  # whether a server was started again and needs all weights
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
            self._partly_new = servers.find_living(in_part=not everything) and not everything
            servers.read_weights(folder)
        finally:
            self._files.pop(folder, ExitStack()).close()

    def begin(self, asks: Asks, settings: Settings = None) -> PendingSamples:
        """Queue requests to the servers, behind everything that is queued already."""
        engine = self.engine
        place_features = engine.served.place
        requests = engine.served.gathered(asks, engine.sampling if settings is None else settings)
        future = self._put(lambda servers: servers.sample(requests, place_features))
        return PendingSamples(step=self.synced, join=cache(partial(self._join, future, len(asks))))

    def _join(self, future: Future[Any] | None, asks: int) -> list[SamplingResult]:
        """Wait for the results of this rank, which has asked for `asks` rollouts."""
        began = time.perf_counter()
        with engine_call("generate"):
            everyone = self.engine.served.first_rank(lambda _: future.result() if future else [])
        self._seconds["trainer"] += time.perf_counter() - began
        return self.engine.served.shared(everyone, asks)

    def sample(
        self, asks: Asks, prompts: PromptBatch | None = None, settings: Settings = None
    ) -> list[SamplingResult]:
        self.give_weights()
        return self.begin(asks, settings).join()

    def waited(self) -> dict[str, float]:
        """Return seconds of waiting since the last call.

        `trainer`: the trainer waited for servers. `servers`: they waited for it (first rank only).
        """
        seconds = self._seconds
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds

    def close(self) -> None:
        """Remove the weight files that no server has read."""
        for folder in list(self._files):
            self._files.pop(folder, ExitStack()).close()

    def _put(self, do: Callable[[ServerPool], Any]) -> Future[Any] | None:
        """Queue a job, on the first rank; None on every other rank.

        After a failure every later job fails with the same error.
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
        """Work off the queue, on a thread of its own."""
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
