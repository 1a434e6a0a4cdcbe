"""Server mode: what all ranks do together, while the first rank alone talks to the servers."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult, merge_requests
from adora_vl.rollout.servers import GroupRequest, PlaceFeatures, Sampled, ServerPool
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.utils.errors import (
    EngineError,
    NoServerError,
    RolloutError,
    SharedUserError,
    UserError,
)

Tensors = Iterator[tuple[str, Tensor]]


@dataclass
class ServerGroup:
    """The servers of a run as its ranks see them. Every method is called by all ranks together."""

    accelerator: Accelerator
    place: PlaceFeatures
    servers: ServerPool | None  # None on every rank but the first
    files: WeightFiles | None = None  # on the first rank, where weights are sent as files

    @contextmanager
    def weights_written(self, tensors: Tensors) -> Iterator[Path]:
        """Write the tensors; yields their folder, which stays while the block runs."""
        with ExitStack() as stack:

            def write(_: ServerPool) -> Path:
                assert self.files is not None
                return stack.enter_context(self.files.written(tensors))

            # The other ranks go through the tensors too: gathering each is a collective call.
            yield self.first_rank(write, meanwhile=lambda: deque(tensors, 0))

    def gathered(
        self, requests: Sequence[SamplingRequest], settings: Mapping[str, Any]
    ) -> list[GroupRequest]:
        """Return the requests of all ranks, on the first rank; an empty list on every other rank.

        `settings`: vLLM's sampling parameters.
        """
        requests_of_all = gather_object(list(requests))
        if not self.accelerator.is_main_process:
            return []
        group_requests = []
        for group in merge_requests(requests_of_all):
            first = group[0]
            group_settings = dict(settings)
            if first.seed is not None:
                group_settings["seed"] = first.seed
            if first.max_tokens is not None:
                group_settings["max_tokens"] = first.max_tokens
            group_requests.append(
                GroupRequest(
                    prompt_ids=first.prompt_ids,
                    images=first.images,
                    rollouts=len(group),
                    settings=group_settings,
                )
            )
        return group_requests

    def sample(self, requests: list[GroupRequest], rollouts: int) -> list[SamplingResult]:
        """Sample now. Returns the results of this rank, which has asked for `rollouts` rollouts."""
        answers = self.first_rank(lambda servers: servers.sample(requests, self.place))
        return self.shared(answers, rollouts)

    def shared(self, answers: list[Sampled], rollouts: int) -> list[SamplingResult]:
        """Return this rank's part of the answers to all ranks.

        `rollouts`: the number of rollouts that this rank has requested. The answers are in the order
        of the ranks.
        """
        rollouts_of_ranks = gather_object([rollouts])
        first = sum(rollouts_of_ranks[: self.accelerator.process_index])
        results = []
        for answer in answers:
            for tokens, logps in answer:
                results.append(SamplingResult(tokens=tokens, logps=[*logps]))
        return results[first : first + rollouts]

    def first_rank(
        self, do: Callable[[ServerPool], Any], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        """Run `do` on the first rank, and return its result, or raise its error, on all ranks.

        The other ranks run `meanwhile`. Collective.
        """
        result: Any = None
        problem: Exception | None = None
        if self.servers is not None:
            try:
                result = do(self.servers)
            except Exception as error:
                problem = error
        else:
            meanwhile()
        # An error travels as the number of its kind and its text: not every error can be pickled.
        kinds: list[type[Exception]] = [NoServerError, UserError, RolloutError]
        raised_elsewhere = [NoServerError, SharedUserError, RolloutError, EngineError]
        kind_number = len(kinds)  # any further error is raised as the last kind
        for number, kind in enumerate(kinds):
            if isinstance(problem, kind):
                kind_number = number
                break
        text = ""
        if problem is not None:
            text = str(problem) or type(problem).__name__
        message: list[Any] = [result, kind_number, text]
        broadcast_object_list(message, from_process=0)
        if problem is not None:
            raise problem
        result, kind_number, text = message
        if text:
            raise raised_elsewhere[kind_number](text)
        return result
