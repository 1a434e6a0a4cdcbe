"""Server mode: what all ranks do together. The first rank alone speaks with the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from adora_vl.rollout.servers import GroupRequest, PlaceFeatures, Sampled, Servers
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.utils.errors import EngineError, NoServerError, RolloutError, SharedUserError, UserError
from adora_vl.utils.seeding import rollout_seed

Tensors = Iterator[tuple[str, Tensor]]


@dataclass
class Served:
    """The servers of a run as its ranks see them. Every method is called by all ranks together."""

    accelerator: Accelerator
    place: PlaceFeatures
    servers: Servers | None  # of the first rank alone
    files: WeightFiles | None = None  # of the first rank alone, where weights travel by file
    _written: list[Path] | None = None  # inside of `weights_written`; the folder, on the first rank

    @contextmanager
    def weights_written(self, tensors: Callable[[bool], Tensors]) -> Iterator[None]:
        """Inside, `give_weights` has the servers read what is written now: the writing of a large model takes seconds,
        in which they may still sample. Where one of them needs more, it is written again.
        """
        with ExitStack() as until:
            found: list[Path] = []

            def write(_: Servers) -> None:
                assert self.files is not None
                found.append(until.enter_context(self.files.written(tensors(False))))

            self.first_rank(write, others=lambda: _go_through(tensors(False)))
            self._written = found
            try:
                yield
            finally:
                self._written = None

    def give_weights(self, tensors: Callable[[bool], Tensors]) -> None:
        """Have all servers read the policy's weights from a file.

        `tensors(everything)` yields the weights that can have changed since the last sync, or everything where some
        server has not got that sync: at the first one, and where a server was started again.
        """
        everything = bool(self.first_rank(lambda servers: servers.find()))
        written = self._written
        if written is not None and not everything:
            self.first_rank(lambda servers: servers.read_weights(written[0]))
            return

        def write_and_read(servers: Servers) -> None:
            assert self.files is not None
            with self.files.written(tensors(everything)) as folder:
                servers.read_weights(folder)

        self.first_rank(write_and_read, others=lambda: _go_through(tensors(everything)))

    def gathered(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        generations: int,
        sampling: dict[str, Any],
        seed: tuple[int, str] | None,
        grouped: bool,
    ) -> list[GroupRequest]:
        """The rows of all ranks as requests, on the first rank; nothing elsewhere.

        `generations`: rollouts of a prompt, whose rows are neighbours. `sampling`: arguments of `VLLMClient.generate`.
        `seed`: the run's, and where it stands. `grouped`: a prompt is one request.
        """
        all_prompts = gather_object(prompts)
        all_images = gather_object(images if images is not None else [None] * len(prompts))
        if not self.accelerator.is_main_process:
            return []
        count = generations if grouped else 1
        asks = []
        for row in range(0, len(all_prompts), count):
            one = {**sampling, "n": count}
            if seed is not None:
                number = rollout_seed(*seed, *divmod(row, generations))
                one["generation_kwargs"] = {**sampling["generation_kwargs"], "seed": number}
            asks.append(GroupRequest(list(all_prompts[row]), list(all_images[row] or []), one))
        return asks

    def sample(self, asks: list[GroupRequest], rows: int) -> tuple[Any, ...]:
        """Ask now. Returns what `VLLMGeneration.generate` does of this rank's `rows`, without the prompts."""
        return self.shared(self.first_rank(lambda servers: servers.sample(asks, self.place)), rows)

    def shared(self, answers: list[Sampled], rows: int) -> tuple[Any, ...]:
        """The part of this rank, which has `rows`, in the answers to all."""
        mine = slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)
        names = ("tokens", "logps")
        return tuple([one for answer in answers for one in getattr(answer, name)][mine] for name in names)

    def first_rank(self, do: Callable[[Servers], Any], others: Callable[[], None] = lambda: None) -> Any:
        """What `do` returns on the first rank, on all of them. They raise together where it raises; the others do
        `others` in the meantime.
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
        number = next((n for n, known in enumerate(kinds) if isinstance(problem, known)), len(kinds))
        told: list[Any] = [found, number, "" if problem is None else str(problem) or type(problem).__name__]
        broadcast_object_list(told, from_process=0)
        if problem is not None:
            raise problem
        if told[2]:
            raise [NoServerError, SharedUserError, RolloutError, EngineError][told[1]](told[2])
        return told[0]


def _go_through(tensors: Tensors) -> None:
    """Take part in the gathering of each."""
    for _ in tensors:
        pass
