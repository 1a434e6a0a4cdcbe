"""One step ahead: vLLM servers sample the next generation while the policy learns from the present one.

    generation k:  write weights k, read the prompts of k+1 | join the rollouts of k | servers read the weights and are
                   asked for k+1 | grade and learn from k

So the rollouts of k+1 come from weights k, and are learned from by weights k+1. The ratio to the engine corrects for
it; the old log-probabilities are the policy's own. Since all of these rollouts are stale, the drift is measured on
short rollouts of their own, which the present weights sample first of all, and score while the servers go on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from adora_vl.config.batch_plan import Shape
from adora_vl.config.checks import check_async
from adora_vl.data.dataloader import ROW_NUMBER
from adora_vl.data.loading import unreadable_rows
from adora_vl.dedup.images import DistinctImages
from adora_vl.rollout.agreement import DriftProbe
from adora_vl.rollout.rollouts import RolloutAnswer, RolloutGroup, asks_of
from adora_vl.rollout.servers import GroupRequest, Sampled
from adora_vl.rollout.sources import EngineNow
from adora_vl.training.generation import Generation
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file

FILE = "rollouts-ahead.json"  # in a checkpoint
_Found = tuple[list[Sampled], float]  # and when they were there

NextRows = Callable[[list[int]], list[Row]]


@dataclass
class Pending:
    """A generation that is asked for."""

    where: str  # its name
    numbers: list[int]  # of its rows on this rank, in the data set
    step: int  # optimizer steps of the weights that sample it
    found: Future[_Found] | None = None  # on the first rank


class RolloutsAhead:
    """Gives a generation the rollouts that were asked for while the policy learned. All ranks call it together."""

    def __init__(
        self,
        context: StepContext,
        sampler: EngineNow,
        images: DistinctImages,
        next_rows: NextRows,
        probe: Callable[[list[Row], int], DriftProbe],
        check_drift: Callable[[DriftProbe, list[RolloutAnswer], int], None],
    ) -> None:
        """`next_rows`: of the generation after the one with these numbers. `probe`: what to ask for of some rows, to
        measure the drift of the weights at this step, and `check_drift`: judges what came of it. Raises `UserError` for
        keys that do not go with it.
        """
        check_async(context.config)
        self.accelerator, self.log, self.state = context.accelerator, context.log, context.state
        self.config, self.sampler, self.images = context.config, sampler, images
        self.next_rows, self.probe, self.check_drift = next_rows, probe, check_drift
        shape = Shape.of(context.config)
        self.steps, self.generations = shape.updates, shape.generations
        self.pending: Pending | None = None
        self._present: Pending | None = None  # what the last generation took

    # ------------------------------------------------------------------------------------------ a generation

    def __call__(self, generation: Generation, drawn: Sequence[RolloutGroup]) -> tuple[list[RolloutAnswer], int]:
        """Join what was asked for the groups that were `drawn`, give the servers the present weights, and ask for the
        next generation. Returns the answers and the step of their weights. Raises `UserError` where the next generation
        cannot be known.
        """
        numbers = [group.problem.number for group in drawn for _ in group.rollouts]
        if min(numbers, default=0) < 0:
            raise UserError(
                "adora_rollouts.ahead: 1: these rows do not say their numbers, by which the next ones are known (a "
                "streamed data set, or a loader of your own); load the data set whole, or set adora_rollouts.ahead: 0"
            )
        asked = self.pending
        fits = asked is not None and (asked.where, asked.numbers) == (generation.where, numbers)
        if not all(gather_object([fits])):  # where a run begins, or goes on with other rows
            if asked is not None and asked.found is not None:
                asked.found.exception()  # servers that still sample cannot take weights
            self.sampler.give_weights()
            requests = self._requests(generation.rows, generation.where)
            asked = Pending(generation.where, numbers, generation.step, *self._ask(requests))
        assert asked is not None
        stale = generation.step - asked.step
        following, requests = self._following(generation, numbers)
        probe = self.probe(generation.rows[:: self.generations], generation.step) if stale else None
        with self.sampler.engine.weights_written() if stale else nullcontext():
            began = time.perf_counter()
            found, idle = self._joined(asked.found)
            waited = time.perf_counter() - began
            self._present, self.pending = asked, None
            self.sampler.give_weights()
        # The probe goes first, since its rollouts would wait for those of a whole generation.
        probed, coming = self._ask(probe.requests if probe else [], requests)
        self.pending = following and replace(following, found=coming)
        if probe is not None:
            short = self.sampler.engine.served.shared(self._joined(probed)[0], len(probe.prompts.ids))
            self.check_drift(probe, short, generation.step)
        answers = self.sampler.engine.served.shared(found, len(numbers))
        self.log("adora/staleness", stale / self.steps)
        for name, seconds in (("trainer", waited), ("servers", idle)):
            self.log(f"adora/{name}_waited_s", max(gather_object([seconds])))
        return answers, asked.step

    def _requests(self, rows: list[Row], where: str) -> list[GroupRequest]:
        """What servers are asked for the rows of the generation of this name, on the first rank."""
        prompts, seeded = self.images.prompts(rows, "train", further=False), self.config.own("seeded_rollouts")
        asks = asks_of(
            prompts.ids, prompts.images, seed=(self.config.seed, where) if seeded else None,
            first=self.accelerator.process_index * len(rows), generations=self.generations,
            grouped=self.config.own("group_requests"),
        )  # fmt: skip
        return self.sampler.engine.requests(asks)

    def _following(self, generation: Generation, numbers: list[int]) -> tuple[Pending | None, list[GroupRequest]]:
        """The generation after this one, or None where there is none, and what to ask for, with its images read."""
        step = generation.step + self.steps
        if step >= self.state().max_steps:
            return None, []
        rows: list[Row] = []
        with suppress(Exception):
            rows = self.next_rows(numbers)
        readable = bool(rows) and not unreadable_rows(rows)  # else the step that draws the row says so, on all ranks
        if not all(gather_object([readable])):
            return None, []
        following = _without_numbers(rows)
        where = replace(generation, key=f"{step}/0").where
        return Pending(where, following, generation.step), self._requests(rows, where)

    def _ask(self, *batches: list[GroupRequest]) -> list[Future[_Found] | None]:
        """Asks for one batch after the other, on a thread of the first rank that does HTTP alone, so that no collective
        of the policy's meets another. Returns what each will be, None on the other ranks.
        """
        if not self.accelerator.is_main_process:
            return [None for _ in batches]
        served, futures = self.sampler.engine.served, [Future[_Found]() for _ in batches]

        def work() -> None:
            for requests, future in zip(batches, futures, strict=True):
                try:
                    assert served.servers is not None
                    future.set_result((served.servers.sample(requests, served.place), time.perf_counter()))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, name="rollouts-ahead", daemon=True).start()
        return [*futures]

    def _joined(self, asked: Future[_Found] | None) -> tuple[list[Sampled], float]:
        """The answers, and how long the servers have waited since. Raises what asking raised, on all ranks."""
        found: _Found = self.sampler.engine.served.first_rank(lambda _: asked.result() if asked else None)
        return found[0], max(0.0, time.perf_counter() - found[1]) if asked else 0.0

    # ------------------------------------------------------------------------------------------ a checkpoint

    def save(self, folder: Path) -> None:
        """Wait for what was asked for, and write it: the weights that sampled it will be gone. Where nothing was
        learned from the last generation, what it took is written, since it begins again.
        """
        kept = self.pending
        if self._present is not None and self._present.where.split("/")[1] == str(self.state().global_step):
            kept = self._present
        if kept is None:
            return
        numbers = gather_object([kept.numbers])
        if kept.found is None or kept.found.exception() is not None:
            return
        answers = [asdict(answer) for answer in kept.found.result()[0]]
        folder.mkdir(parents=True, exist_ok=True)
        said = {"where": kept.where, "step": kept.step, "numbers": numbers, "answers": answers}
        replace_file(folder / FILE, json.dumps(said))

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote."""
        file = checkpoint / FILE
        if not file.is_file():
            return
        said = json.loads(file.read_text())
        if len(said["numbers"]) != self.accelerator.num_processes:
            return  # asked again
        future = Future[_Found]()
        answers = [Sampled(one["tokens"], [[*map(_number, row)] for row in one["logps"]]) for one in said["answers"]]
        future.set_result((answers, time.perf_counter()))
        first = self.accelerator.is_main_process
        numbers: Sequence[int] = said["numbers"][self.accelerator.process_index]
        self.pending = Pending(said["where"], list(numbers), said["step"], future if first else None)


def _without_numbers(rows: Sequence[Any]) -> list[int]:
    """Takes the column with the numbers of the rows out of them."""
    return [row.pop(ROW_NUMBER, -1) for row in rows]


def _number(logp: Any) -> float | None:
    """Of a token; an older checkpoint has a list of one."""
    found: float | None = logp[0] if isinstance(logp, list) else logp
    return found
