"""Server mode: what all ranks do together, while the first rank alone talks to the servers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult, merge_requests
from adora_vl.rollout.server import GroupRequest, PlaceFeatures
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.utils.errors import (
    EngineError,
    NoServerError,
    RolloutError,
    SharedUserError,
    UserError,
)


@dataclass
class ServerGroup:
    """The vLLM servers of a run, for all of its ranks. All ranks call every method together.

    Only the first rank has the `pool`, which talks to the servers. The requests of all ranks are
    gathered there, and the results are sent back.
    """

    accelerator: Accelerator
    place_features: PlaceFeatures  # adds the positions of image tokens to a prompt's image features
    pool: ServerPool | None = None  # None on every rank but the first
    weight_files: WeightFiles | None = None  # on the first rank, where weights are sent as files

    @contextmanager
    def write_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Path]:
        """Write named tensors to files, and yield their folder, which exists inside the block.

        Collective: the first rank writes, and the others only iterate over `tensors`, since each
        step of the iterator may gather a tensor from all ranks. All get the same folder.
        """
        with ExitStack() as stack:

            def write(_: ServerPool) -> Path:
                """Write the files, which the stack removes at the end of the block."""
                assert self.weight_files is not None
                return stack.enter_context(self.weight_files.write(tensors))

            def take_part_in_gathering() -> None:
                """Consume the iterator, whose steps are collective."""
                for _ in tensors:
                    pass

            yield self.on_first_rank(write, on_other_ranks=take_part_in_gathering)

    def gather_requests(
        self, requests: Sequence[SamplingRequest], settings: Mapping[str, Any]
    ) -> list[GroupRequest]:
        """Gather the requests of all ranks on the first rank, in the form that servers get.

        Neighbouring requests for the same prompt become one request for several rollouts. For
        example, requests for the prompts A, A and B become one for two rollouts of A, and one for a
        rollout of B.

        Args:
            requests: the requests of this rank.
            settings: vLLM's sampling parameters. A request with a seed or a number of tokens of its
                own replaces them.

        Returns the requests of all ranks on the first rank, and an empty list on every other rank.
        """
        requests_of_all = gather_object(list(requests))
        if not self.accelerator.is_main_process:
            return []
        group_requests = []
        for group in merge_requests(requests_of_all):
            first = group[0]
            group_requests.append(
                GroupRequest(
                    prompt_ids=first.prompt_ids,
                    images=first.images,
                    rollout_count=len(group),
                    settings=first.sampling_parameters(settings),
                )
            )
        return group_requests

    def sample(
        self, requests: Sequence[SamplingRequest], settings: Mapping[str, Any]
    ) -> list[SamplingResult]:
        """Sample a rollout for each request of this rank, and wait for it.

        `settings` are vLLM's sampling parameters.
        """
        group_requests = self.gather_requests(requests, settings)
        rollouts_by_request = self.on_first_rank(
            lambda pool: pool.sample(group_requests, self.place_features)
        )
        return self.select_results_of_rank(rollouts_by_request, len(requests))

    def select_results_of_rank(
        self, rollouts_by_request: Sequence[Sequence[SamplingResult]], rollout_count: int
    ) -> list[SamplingResult]:
        """Select the rollouts that this rank has requested from those of all ranks.

        For example, if rank 0 has requested 2 rollouts and rank 1 has requested 3, rank 1 gets the
        last 3 of all 5.

        Args:
            rollouts_by_request: the sampled rollouts of each `GroupRequest` of `gather_requests`,
                which has the requests in the order of the ranks.
            rollout_count: how many rollouts this rank has requested.
        """
        rollout_counts_R = gather_object([rollout_count])  # of R ranks
        first_rollout = sum(rollout_counts_R[: self.accelerator.process_index])
        results: list[SamplingResult] = []
        for rollouts in rollouts_by_request:
            results += rollouts
        return results[first_rollout : first_rollout + rollout_count]

    def on_first_rank(
        self,
        action: Callable[[ServerPool], Any],
        on_other_ranks: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run an action with the servers on the first rank, and return its result on all ranks.

        If it raises an error, all ranks raise: the first rank the error itself, the others one of
        its kind with the same text. Collective.

        Args:
            action: what the first rank does with the pool of servers.
            on_other_ranks: what the other ranks do at the same time.
        """
        result: Any = None
        error: Exception | None = None
        if self.pool is not None:  # this is the first rank
            try:
                result = action(self.pool)
            except Exception as raised_error:
                error = raised_error
        else:
            on_other_ranks()
        # Not every error can be pickled, so the other ranks get one of this package with its text.
        outcome: list[Any] = [result, None if error is None else _error_of_other_ranks(error)]
        broadcast_object_list(outcome, from_process=0)
        if error is not None:
            raise error
        result, error_of_first_rank = outcome
        if error_of_first_rank is not None:
            raise error_of_first_rank
        return result


def _error_of_other_ranks(error: Exception) -> Exception:
    """Return the error that the other ranks raise for an error of the first rank."""
    text = str(error) or type(error).__name__
    if isinstance(error, NoServerError):
        return NoServerError(text)
    if isinstance(error, UserError):
        return SharedUserError(text)
    if isinstance(error, RolloutError):
        return RolloutError(text)
    return EngineError(text)
