"""Server mode: what all ranks do together. The first rank alone speaks with the servers."""

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
    servers: ServerPool | None  # of the first rank alone
    files: WeightFiles | None = None  # of the first rank alone, where weights travel by file

    @contextmanager
    def weights_written(self, tensors: Tensors) -> Iterator[Path]:
        """Inside, the tensors are in the folder of this name."""
        with ExitStack() as until:

            def write(_: ServerPool) -> Path:
                assert self.files is not None
                return until.enter_context(self.files.written(tensors))

            # take part in the gathering of each
            yield self.first_rank(write, others=lambda: deque(tensors, 0))

    def gathered(
        self, asks: Sequence[SamplingRequest], settings: Mapping[str, Any]
    ) -> list[GroupRequest]:
        """What all ranks ask for as requests, on the first rank; nothing elsewhere.

        `settings`: vLLM's parameters.
        """
        everyone = gather_object(list(asks))
        if not self.accelerator.is_main_process:
            return []
        requests = []
        for ask, *more in merge_requests(everyone):
            own = {"seed": ask.seed, "max_tokens": ask.max_tokens}
            own = {name: value for name, value in own.items() if value is not None}
            requests.append(
                GroupRequest(
                    prompt_ids=ask.prompt_ids,
                    images=ask.images,
                    rollouts=1 + len(more),
                    settings={**settings, **own},
                )
            )
        return requests

    def sample(self, requests: list[GroupRequest], asks: int) -> list[SamplingResult]:
        """Ask now. Returns the answers to this rank's `asks`."""
        return self.shared(
            self.first_rank(lambda servers: servers.sample(requests, self.place)), asks
        )

    def shared(self, answers: list[Sampled], asks: int) -> list[SamplingResult]:
        """The part of this rank, which has `asks`, in the answers to all."""
        first = sum(gather_object([asks])[: self.accelerator.process_index])
        results = [
            SamplingResult(tokens=tokens, logps=[*logps])
            for answer in answers
            for tokens, logps in answer
        ]
        return results[first : first + asks]

    def first_rank(
        self, do: Callable[[ServerPool], Any], others: Callable[[], object] = lambda: None
    ) -> Any:
        """What `do` returns on the first rank, or raises, on all of them; the others do `others` in
        the meantime.
        """
        found: Any = None
        problem: Exception | None = None
        if self.servers is not None:
            try:
                found = do(self.servers)
            except Exception as error:
                problem = error
        else:
            others()
        kinds: list[type[Exception]] = [NoServerError, UserError, RolloutError]
        number = next(
            (n for n, known in enumerate(kinds) if isinstance(problem, known)), len(kinds)
        )
        told: list[Any] = [
            found,
            number,
            "" if problem is None else str(problem) or type(problem).__name__,
        ]
        broadcast_object_list(told, from_process=0)
        if problem is not None:
            raise problem
        if told[2]:
            raise [NoServerError, SharedUserError, RolloutError, EngineError][told[1]](told[2])
        return told[0]
