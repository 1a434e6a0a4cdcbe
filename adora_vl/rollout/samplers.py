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
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.types import StepContext
from adora_vl.utils.errors import engine_call

# arguments of vLLM's `SamplingParams`; None: those of the run
SamplingSettings = Mapping[str, Any]
# takes prompts and the largest number of tokens, and returns the tokens sampled after each prompt
Generate = Callable[[PromptBatch, int], list[list[int]]]


@dataclass(frozen=True)
class PendingSamples:
    """Samples that were requested and have not arrived.

    Servers sample them while the trainer goes on. Any other sampler begins when `join` is called.
    `join` waits for this rank's results, and raises a server's error on all ranks. All ranks call
    it together. A second call returns the same results.
    """

    step: int  # number of optimizer steps behind the weights that sample
    join: Callable[[], list[SamplingResult]]


class Sampler(Protocol):
    """Samples rollouts. All ranks call every method together, also without any requests."""

    returns_logps: bool  # whether the results have log-probabilities
    reads_prompts: bool  # whether it samples from the processed prompts, besides the requests

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        prompts: PromptBatch | None = None,
        settings: SamplingSettings | None = None,
    ) -> list[SamplingResult]:
        """Sample a rollout for each request, with the policy's present weights.

        Args:
            requests: the prompts of this rank, as an engine takes them.
            prompts: the same prompts, processed for the policy; None for a sampler that does not
                read them. A rank without requests has one prompt there, as a stand-in.
            settings: vLLM's sampling parameters; None: those of the run.
        """

    def sample_greedily(
        self, requests: Sequence[SamplingRequest], prompts: PromptBatch | None = None
    ) -> list[SamplingResult]:
        """Return the likeliest tokens after each request, as an evaluation asks for them.

        No random number is drawn. The arguments are those of `sample`.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Return a context in which an engine does not sleep between two calls of `sample`."""


class TransformersSampler:
    """Samples with `transformers.generate`, as TRL does.

    Log-probabilities come from a later forward pass.
    """

    returns_logps = False
    reads_prompts = True

    def __init__(self, generate: Generate, generate_greedily: Generate) -> None:
        """Sample with two functions of the policy.

        Args:
            generate: draws tokens by the run's settings, such as its temperature.
            generate_greedily: takes the likeliest token at each position.
        """
        self._generate = generate
        self._generate_greedily = generate_greedily

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        prompts: PromptBatch | None = None,
        settings: SamplingSettings | None = None,
    ) -> list[SamplingResult]:
        """Sample a rollout for each of `prompts`, without log-probabilities.

        The policy samples itself, so it needs the processed prompts, and takes no settings of vLLM.
        """
        assert settings is None
        return self._sample_with(self._generate, requests, prompts)

    def sample_greedily(
        self, requests: Sequence[SamplingRequest], prompts: PromptBatch | None = None
    ) -> list[SamplingResult]:
        return self._sample_with(self._generate_greedily, requests, prompts)

    def _sample_with(
        self,
        generate: Generate,
        requests: Sequence[SamplingRequest],
        prompts: PromptBatch | None,
    ) -> list[SamplingResult]:
        """Return the result of each request, sampled with one of the policy's functions."""
        assert prompts is not None
        limits = []
        for request in requests:
            assert request.max_tokens is not None
            limits.append(request.max_tokens)
        # With weights divided by ZeRO-3 generation is collective, so a rank without requests
        # samples a token for its stand-in, which is in none of the results.
        completions = generate(prompts, max(limits, default=1))
        results = []
        # All prompts are sampled up to the largest limit, and cut to their own.
        for completion, limit in zip(completions, limits, strict=False):
            tokens = completion[:limit]
            results.append(SamplingResult(tokens=tokens, logps=[None] * len(tokens)))
        return results

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()


class VLLMSampler:
    """Samples with vLLM, in the trainer's processes or on servers, after a weight sync.

    A weight sync sends the policy's weights to vLLM. One is enough for each optimizer step.
    """

    returns_logps = True
    reads_prompts = False

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        self.engine = engine
        self.context = context
        # number of optimizer steps behind the weights that the engine has; -1: it has none
        self.synced_step = -1
        engine.take_images_from(images.cache)

    def sync_weights(self, *, force: bool = False) -> None:
        """Send the policy's weights to the engine, unless it has those of this optimizer step.

        `force`: send them in any case, since they have changed within the step.
        """
        step = self.context.state().global_step
        if force or step != self.synced_step:
            self._send_weights()
            self.synced_step = step

    def _send_weights(self) -> None:
        self.engine.sync_weights()

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        prompts: PromptBatch | None = None,
        settings: SamplingSettings | None = None,
    ) -> list[SamplingResult]:
        """Send new weights to the engine, and sample a rollout for each request.

        `prompts` are not used, since vLLM processes the prompts itself. `settings` replace those of
        the run.
        """
        self.sync_weights()
        return self.engine.sample(requests, settings)

    def sample_greedily(
        self, requests: Sequence[SamplingRequest], prompts: PromptBatch | None = None
    ) -> list[SamplingResult]:
        return self.sample(requests, settings=self.engine.greedy_settings)

    def awake(self) -> AbstractContextManager[None]:
        return self.engine.staying_awake()


class AsyncServerSampler(VLLMSampler):
    """Samples on servers that get their requests before the rollouts are needed.

    Weights and requests go into a queue, and a thread of the first rank handles them in order. So
    timing never decides which weights sample a rollout. For example, in the queue (weights 3,
    requests A, weights 4, requests B) weights 3 sample A, however long that takes. Weights wait in
    the queue as files. The thread does nothing but HTTP, since collective calls of its own could
    interleave with the policy's.
    """

    def __init__(
        self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration
    ) -> None:
        """Create the sampler; its thread starts with the first job.

        Args:
            context: the config and the state of the run.
            images: the images of the run.
            engine: the connection to the servers.
        """
        super().__init__(context, images, engine)
        self._queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        # The folders of weights that no server has read yet. Closing its stack removes a folder.
        self._stack_by_weight_folder: dict[Path, ExitStack] = {}
        # whether a server was started again and lacks the weights that training does not change
        self._server_needs_all_weights = False
        self._thread: threading.Thread | None = None
        # since the last call of `pop_seconds_waited`, which says who waits for what
        self._seconds_waited_by = {"trainer": 0.0, "servers": 0.0}

    def _send_weights(self) -> None:
        """Write the policy's weights to files, and queue a job that lets the servers read them."""
        server_group = self.engine.server_group
        # All weights are sent, or only those that training changes. All ranks have to write the
        # same tensors, but only the first rank knows whether a server needs all.
        is_first_sync = self.synced_step < 0
        sends_all = is_first_sync or server_group.on_first_rank(
            lambda _: self._server_needs_all_weights
        )
        with ExitStack() as stack:
            folder = stack.enter_context(self.engine.write_weights(sends_all=sends_all))
            is_first_rank = server_group.pool is not None
            if is_first_rank:
                # The files outlive this block: `_read_weights` removes them.
                self._stack_by_weight_folder[folder] = stack.pop_all()
                self._queue_job(partial(self._read_weights, folder=folder, sends_all=sends_all))

    def _read_weights(self, pool: ServerPool, folder: Path, sends_all: bool) -> None:
        """Let the servers read the weights in a folder, and remove it. The thread runs this job.

        Args:
            pool: the servers.
            folder: the files of the weights.
            sends_all: whether the folder has all weights, or only those that training changes. In
                the latter case a server that was started again is left out until the next sync,
                which then sends all.
        """
        try:
            any_missed_last_sync = pool.update_servers_in_use(sends_only_changes=not sends_all)
            self._server_needs_all_weights = any_missed_last_sync and not sends_all
            pool.read_weights(folder)
        finally:
            self._remove_weights(folder)

    def submit(
        self, requests: Sequence[SamplingRequest], settings: SamplingSettings | None = None
    ) -> PendingSamples:
        """Queue requests for the servers, and return the samples to wait for. Collective.

        They are sampled with the weights that were queued last.

        Args:
            requests: the prompts of this rank.
            settings: vLLM's sampling parameters; None: those of the run.
        """
        server_group = self.engine.server_group
        if settings is None:
            settings = self.engine.sampling_settings
        group_requests = server_group.gather_requests(requests, settings)
        future = self._queue_job(
            lambda pool: pool.sample(group_requests, server_group.place_features)
        )
        # A checkpoint that is written in the meantime waits for the samples too, so `join` may be
        # called twice. `cache` makes the second call return the results of the first one.
        join = cache(partial(self._join, future, len(requests)))
        return PendingSamples(step=self.synced_step, join=join)

    def _join(self, future: Future[Any] | None, rollout_count: int) -> list[SamplingResult]:
        """Wait for the rollouts that `submit` has requested, and return this rank's. Collective.

        Args:
            future: the rollouts of all ranks; None on every rank but the first.
            rollout_count: how many rollouts this rank has requested.
        """
        server_group = self.engine.server_group
        start_time = time.perf_counter()
        with engine_call("generate"):
            rollouts_by_request = server_group.on_first_rank(
                lambda _: future.result() if future is not None else []
            )
        self._seconds_waited_by["trainer"] += time.perf_counter() - start_time
        return server_group.select_results_of_rank(rollouts_by_request, rollout_count)

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        prompts: PromptBatch | None = None,
        settings: SamplingSettings | None = None,
    ) -> list[SamplingResult]:
        """Queue new weights and the requests, and wait for the rollouts.

        `prompts` are not used, since vLLM processes the prompts itself.
        """
        self.sync_weights()
        return self.submit(requests, settings).join()

    def pop_seconds_waited(self) -> dict[str, float]:
        """Return the seconds of waiting since the last call, by who has waited.

        `trainer`: the trainer waited for rollouts. `servers`: the servers waited for a job of the
        trainer, which only the first rank knows.
        """
        seconds = self._seconds_waited_by
        self._seconds_waited_by = dict.fromkeys(self._seconds_waited_by, 0.0)
        return seconds

    def close(self) -> None:
        """Remove the weight files that no server has read."""
        for folder in list(self._stack_by_weight_folder):
            self._remove_weights(folder)

    def _remove_weights(self, folder: Path) -> None:
        """Remove the weight files in `folder`, if they are still there."""
        # Without them it is an empty stack that is closed, which does nothing.
        self._stack_by_weight_folder.pop(folder, ExitStack()).close()

    def _queue_job(self, job: Callable[[ServerPool], Any]) -> Future[Any] | None:
        """Queue a job for the thread of the first rank, and return the future of its result.

        Returns None on every other rank. After a failure every later job fails with the same error.
        """
        pool = self.engine.server_group.pool
        if pool is None:
            return None
        future = Future[Any]()
        self._queue.put((partial(job, pool), future))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_jobs, name="rollouts-ahead", daemon=True
            )
            self._thread.start()
        return future

    def _run_jobs(self) -> None:
        """Run the jobs of the queue in order. This is the thread's function, and never returns.

        After a job has failed, later ones get its error: they would be sampled with weights that
        did not arrive.
        """
        first_error: BaseException | None = None
        while True:
            start_time = time.perf_counter()
            job, future = self._queue.get()
            # While this thread waits for a job, so do the servers.
            self._seconds_waited_by["servers"] += time.perf_counter() - start_time
            try:
                if first_error is not None:
                    raise first_error
                future.set_result(job())
            except BaseException as error:
                first_error = error
                future.set_exception(error)
