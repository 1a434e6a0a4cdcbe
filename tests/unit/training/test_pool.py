"""The pool of groups, with an engine whose answers have drawn lengths: every group is learned from
once, and in order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from PIL import Image
from transformers import TrainerState

from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.dataloader import ROW_NUMBER_COLUMN
from adora_vl.data.shared_images import as_kept_image, content_digest
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import (
    Call,
    DrawnProblem,
    FinishReason,
    Picture,
    Rollout,
    RolloutGroup,
    SamplingRequest,
    SamplingResult,
    Segment,
    StepKey,
    merge_requests,
)
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.generation import Generation, ScoredGroups
from adora_vl.training.generation_numbers import GenerationNumbers
from adora_vl.training.generation_sampler import GenerationSampler
from adora_vl.training.group_sampler import GroupSampler, PromptReader
from adora_vl.training.late_drift import LateDriftCheck
from adora_vl.training.pool import Pool
from adora_vl.training.pool_state import PoolState
from adora_vl.training.refill import Refill
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.training.schedule import (
    automatic_budget,
    count_groups_to_begin,
    draw_refill_rows,
    groups_to_complete,
)
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import UserError
from adora_vl.utils.seeding import rollout_seed
from tests.support.facts import rollout_facts
from tests.support.step_context import step_context

MAX_GROUPS = 6  # groups of a rank and generation
GROUP_SIZE = 4  # rollouts of a group
MAX_TOKENS = 400  # of a rollout
RUN_SEED = 7
IMAGE_TOKEN = 4
LARGEST_TOKEN = 2**31 - 1  # that a checkpoint takes


class OneProcess:
    """The accelerator of a run of one process."""

    process_index = 0
    num_processes = 1
    device = torch.device("cpu")

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class OneOfSeveral(OneProcess):
    """The accelerator of one of several processes, which are threads here."""

    def __init__(self, rank: int, parts: list[Any], meeting: Barrier) -> None:
        """Build the accelerator of a rank.

        Args:
            rank: the number of the process.
            parts: a place for the tensor of each process. All processes share the list.
            meeting: lets no process pass before all have come to it.
        """
        self.process_index = rank
        self.num_processes = len(parts)
        self._parts = parts
        self._meeting = meeting

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._parts[self.process_index] = tensor
        self._meeting.wait()  # until all tensors are there
        gathered = torch.cat(self._parts)
        self._meeting.wait()  # until all have read them, since the next call replaces them
        return gathered


def draw_length(seed: int) -> int:
    """Draw the length of the answer that begins with this seed.

    The distribution has a long tail, and some answers run to the limit.
    """
    rng = random.Random(seed & LARGEST_TOKEN)
    if rng.random() < 0.02:
        return MAX_TOKENS
    return min(MAX_TOKENS, max(3, int(60 * rng.lognormvariate(0, 0.7))))


class CountingEngine:
    """A stand-in for the engine, whose tokens tell where they come from.

    An answer's first token is its seed. Each further token is the optimizer step of the weights that
    sample it, and minus the step is its log-probability. An answer that runs to the limit would
    never end by itself.
    """

    def __init__(self) -> None:
        self.step = 0  # of the present weights
        self.length = draw_length  # of the answer that begins with a seed
        self.requests_of_calls: list[list[SamplingRequest]] = []
        self.forward_passes = 0

    @property
    def all_requests(self) -> list[SamplingRequest]:
        """The requests of all calls."""
        return [request for requests in self.requests_of_calls for request in requests]

    returns_logps = True
    awake = staticmethod(nullcontext)

    def sample(self, requests: list[SamplingRequest], prompts: Any) -> list[SamplingResult]:
        """Return for each request the tokens that its answer has left, at most `max_tokens`."""
        self.requests_of_calls.append(requests)
        results = []
        for request in requests:
            assert request.seed is not None
            assert request.max_tokens is not None
            # A problem's prompt is one token. Behind it come those that the answer has already.
            earlier_tokens = request.prompt_ids[1:]
            first_token = earlier_tokens[0] if earlier_tokens else request.seed & LARGEST_TOKEN
            length = self.length(first_token)
            left = 10 * MAX_TOKENS  # more than may be sampled: it never ends by itself
            if length < MAX_TOKENS:
                left = length - len(earlier_tokens)
            count = min(request.max_tokens, left)
            has_ended = left <= request.max_tokens
            results.append(
                SamplingResult(
                    tokens=[request.seed & LARGEST_TOKEN, *[self.step] * (count - 1)],
                    logps=[-float(self.step)] * count,
                    finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
                )
            )
        self.forward_passes += max((len(result.tokens) for result in results), default=0)
        return results


class TurnsEngine(CountingEngine):
    """An engine for rollouts with tools: the seed of a request draws the length of its answer.

    A request is for a whole turn, or for what a token budget has cut off from one.
    """

    def sample(self, requests: list[SamplingRequest], prompts: Any) -> list[SamplingResult]:
        """Return a turn for each request; all its tokens are the seed."""
        self.requests_of_calls.append(requests)
        results = []
        for request in requests:
            assert request.seed is not None
            assert request.max_tokens is not None
            assert request.max_tokens > 0
            # The engine has to get each picture of a tool, which has one image token here.
            assert request.prompt_ids.count(IMAGE_TOKEN) == len(request.images)
            drawn_length = draw_length(request.seed)
            length = min(request.max_tokens, drawn_length)
            has_ended = drawn_length <= request.max_tokens
            results.append(
                SamplingResult(
                    tokens=[request.seed & LARGEST_TOKEN] * length,
                    logps=[-1.0] * length,
                    finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
                )
            )
        return results


class EngineAhead(CountingEngine, AsyncServerSampler):
    """A stand-in for servers that sample ahead, with the weights of when they were asked."""

    def __init__(self, ahead: int) -> None:
        CountingEngine.__init__(self)
        self.ahead = ahead

    def sync_weights(self, *, force: bool = False) -> None:
        pass

    def submit(self, asks: Any, settings: Any = None) -> PendingSamples:
        results = CountingEngine.sample(self, [*asks], prompts=None)
        return PendingSamples(step=self.step, join=lambda: results)

    def sample(self, asks: Any, prompts: Any = None, settings: Any = None) -> list[SamplingResult]:
        return CountingEngine.sample(self, [*asks], prompts=prompts)

    def pop_seconds_waited(self) -> dict[str, float]:
        return {}


def rows_after(numbers: Sequence[int], distance: int) -> list[Row]:
    """Return the rows of the generation `distance` after the one with these row numbers.

    With six groups a generation, for example, the rows 12 to 17 come one generation after 6 to 11.
    """
    later = [number + distance * MAX_GROUPS for number in numbers]
    rows: list[Any] = [{"id": f"0/{number}", ROW_NUMBER_COLUMN: number} for number in later]
    return rows


class PictureTools:
    """A stand-in for the tool loop: it answers most turns with a picture, up to three a rollout."""

    turn_tokens = None

    def __call__(
        self, rollout: Rollout, images: Any, *, max_length: int, step: int, seed: str, **_: Any
    ) -> Rollout:
        """Append a picture to the rollout, or end it."""
        rng = random.Random(f"{seed}/{len(rollout.pictures)}")
        if rng.random() < 0.3 or len(rollout.pictures) == 3:
            reason = FinishReason.STOP if rng.random() < 0.7 else FinishReason.CALLS
            return replace(rollout, finish_reason=reason)
        has_no_room = max_length - len(rollout.tokens) < 30
        if has_no_room:
            return replace(rollout, finish_reason=FinishReason.CONTEXT)
        image = as_kept_image(Image.new("RGB", (28, 28 + rng.randrange(9))))
        picture = Picture(digest=image.digest, image=image, segment_number=len(rollout.segments))
        # A tool's tokens have no log-probabilities. 5 and 6 stand for words around the picture.
        answer = Segment(tokens=(5, IMAGE_TOKEN, 6), logps=None, step=step)
        return replace(
            rollout,
            finish_reason=FinishReason.RUNNING,
            segments=(*rollout.segments, answer),
            pictures=(*rollout.pictures, picture),
        )


class SilentTools:
    """A stand-in for the tool loop that answers nothing."""

    turn_tokens = None

    def __call__(self, rollout: Rollout, images: Any, **_: Any) -> Rollout:
        return rollout


class StandInScorer:
    """A stand-in for the stages that build and score a batch.

    The batch has the row number of each rollout's problem in place of its tokens.
    """

    def __init__(self, accelerator: Any, has_signal: Callable[[int, int], bool]) -> None:
        """Build a scorer; `has_signal(row_number, rank)`: whether a problem's group has signal."""
        self.accelerator = accelerator
        self.has_signal = has_signal

    def score(self, generation: Generation, groups: Any) -> ScoredGroups:
        """Return the groups with their batch.

        In the facts the reward of a rollout is the row number of its problem, and the length of its
        prompt is the rank. Facts are gathered, so `assess` reads there which group is whose.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        row_numbers = [group.problem.row_number for group in groups for _ in group.rollouts]
        ages = [
            generation.number - group.start_generation for group in groups for _ in group.rollouts
        ]
        row_numbers_B1 = torch.tensor(row_numbers)[:, None]
        ones_B1 = torch.ones_like(row_numbers_B1)
        batch: Any = {
            "prompt_ids": row_numbers_B1,
            "completion_ids": row_numbers_B1,
            "prompt_mask": ones_B1,
            "completion_mask": ones_B1,
            "age": torch.tensor(ages),
        }
        lengths = torch.tensor([float(len(rollout.tokens)) for rollout in rollouts])
        ranks = torch.full((len(rollouts),), float(self.accelerator.process_index))
        facts = rollout_facts(row_numbers_B1.float(), length_N=lengths, prompt_length_N=ranks)
        facts = RolloutFacts.gather_from_ranks(facts, self.accelerator)
        facts = replace(facts, missing_reasons=(None,) * len(facts.rewards_NF))
        assessment = self.assess(facts, GROUP_SIZE, step=0)
        return ScoredGroups(groups=groups, batch=batch, facts=facts, assessment=assessment)

    def assess(self, facts: RolloutFacts, group_size: int, step: int) -> GroupAssessment:
        """Return which groups of all ranks have signal, by row number and rank of their problems.

        `facts` are what `score` has made, so rewards are row numbers and prompt lengths are ranks.
        """
        numbers = facts.rewards_NF[::group_size, 0].int().tolist()
        ranks = facts.prompt_length_N[::group_size].int().tolist()
        nothing: Any = None
        return GroupAssessment(
            groups=nothing,
            weighting=nothing,
            trl_advantages_PG=nothing,
            has_signal_P=torch.tensor(list(map(self.has_signal, numbers, ranks))),
            equal_reward_share=0.0,
            num_ranks=self.accelerator.num_processes,
        )


@dataclass(frozen=True)
class LearnedGeneration:
    """A generation that was learned from."""

    generation: Generation
    groups: Any
    batch: Any

    @property
    def rows(self) -> list[Row]:
        """The row of each rollout's problem."""
        return [group.row for group in self.groups for _ in group.rollouts]

    @property
    def row_numbers(self) -> list[int]:
        """The row number of each group's problem, which stands in place of its prompt."""
        numbers: list[int] = self.batch["prompt_ids"][::GROUP_SIZE, 0].tolist()
        return numbers


def rollouts_of(learned: LearnedGeneration) -> list[list[int]]:
    """Return the tokens of each rollout that a generation has learned from."""
    return [rollout.tokens for group in learned.groups for rollout in group.rollouts]


def learned_groups(run: SimulatedRun) -> list[list[RolloutGroup]]:
    """Return the groups of each generation that a run has learned from."""
    return [list(learned.groups) for learned in run.learned]


def staged_trainer(run: Any, context: StepContext, scorer: StandInScorer) -> Any:
    """Return a trainer without a policy that goes through the stages of a generation.

    Sampling, the pool and the refill are the real ones. The stages after them are stand-ins: a
    scorer, and no weighing.
    """
    trainer: Any = AdoraGRPOTrainer.__new__(AdoraGRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer.state = run.state
    trainer.args = context.config
    trainer.accelerator = context.accelerator
    trainer.num_generations = GROUP_SIZE
    trainer.prefetch = SimpleNamespace(start=lambda: None, finish=lambda: None)
    checkpoint_state = SimpleNamespace(
        unfinished_generation=SimpleNamespace(remember_step_start=lambda *_: None)
    )
    trainer.parts = SimpleNamespace(
        context=context,
        pool=run.pool,
        generation_sampler=run.generation_sampler,
        checkpoint_state=checkpoint_state,
        refill=Refill(
            context=context,
            pool=run.pool,
            generation_sampler=run.generation_sampler,
            advantage_computer=scorer,  # type: ignore[arg-type]
        ),
    )
    trainer._metadata = dict
    trainer._logs = {}
    trainer._step = 0
    trainer._score = scorer.score
    trainer._weigh = lambda generation, scored: LearnedGeneration(
        generation, scored.groups, scored.batch
    )
    return trainer


class LearnedRollout(NamedTuple):
    """A rollout that was learned from."""

    problem: str  # the id of its row: rank and number
    tokens: list[int]


class SimulatedRun:
    """A training without a policy: generations are sampled, scored and forgotten."""

    def __init__(
        self,
        steps: int,
        accelerator: Any = None,
        updates: int = 1,
        tools: bool = False,
        has_signal: Callable[[int, int], bool] = lambda number, rank: True,
        **rollouts: Any,
    ) -> None:
        """Build a run that has not begun.

        Args:
            steps: its optimizer steps.
            accelerator: that of its process, by default the only one.
            updates: how many optimizer steps learn from one generation.
            tools: whether rollouts call tools, which answer with pictures.
            has_signal: whether the group of a problem has signal, by row number and rank.
            rollouts: the options of `adora_rollouts`. The token budget is 60 unless they say more.
        """
        self.state = TrainerState(max_steps=steps)
        self.log: dict[str, float] = {}
        self.updates = updates
        options = RolloutOptions(**{"budget": 60, **rollouts})
        self.engine = EngineAhead(options.ahead) if options.ahead else CountingEngine()
        context = step_context(
            self.log,
            accelerator=accelerator or OneProcess(),
            state=self.state,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=MAX_GROUPS * GROUP_SIZE,
            steps_per_generation=updates,
            gradient_accumulation_steps=1,
            max_completion_length=MAX_TOKENS,
            use_vllm=True,
            seed=RUN_SEED,
            vllm_importance_sampling_mode="token_truncate",
            adora_rollouts=options,
        )
        self.rank = context.accelerator.process_index
        # A generation more than the run needs, so that what is sampled ahead has rows too.
        rows = [{"id": f"{self.rank}/{number}"} for number in range((steps + updates) * MAX_GROUPS)]
        # Every prompt is the one token 1.
        images: Any = SimpleNamespace(
            prompts=lambda rows, *_, **__: PromptBatch([], [[1]] * len(rows), None, {})
        )
        guard: Any = SimpleNamespace(
            refuse_unusable=lambda *_: None, ending_run_without_servers=nullcontext
        )
        scorer = StandInScorer(context.accelerator, has_signal)
        # An answer that is shorter than its limit has ended by itself.
        stop: Any = SimpleNamespace(has_stopped=lambda *_: True)
        if tools:
            self.engine = TurnsEngine()
        tool_loop: Any = PictureTools() if tools else None
        self.pool = Pool(context, rows, has_tools=tools)
        groups = GroupSampler(
            context=context,
            prompt_reader=PromptReader(images),
            sampler=self.engine,  # type: ignore[arg-type]
            stop_criteria=stop,
            extensions=[],
            tool_loop=tool_loop,
        )
        # No drift is measured: without a policy there are no log-probabilities to compare.
        pair: Any = SimpleNamespace(
            read_prompts=list,
            begin_sampling=lambda *_, **__: None,
            join_sampling=lambda *_: SimpleNamespace(logps_BC=None, mask_BC=None),
            policy_logps=lambda _: None,
            images=SimpleNamespace(vision=SimpleNamespace(unshared=nullcontext)),
        )
        drift_guard: Any = SimpleNamespace(check=lambda *_: None)
        self.generation_sampler = GenerationSampler(
            context=context,
            pool=self.pool,
            group_sampler=groups,
            guard=guard,
            phase=lambda _: nullcontext(),
            environments=None,
            upcoming_rows=rows_after,
            drift_check=LateDriftCheck(pair, drift_guard),
        )
        self.trainer = staged_trainer(self, context, scorer)
        self.learned: list[LearnedGeneration] = []
        self.metrics: list[dict[str, float]] = []

    def sample_next(self) -> LearnedGeneration:
        """Return the next generation, sampled and scored. The step does not go on."""
        step = self.state.global_step
        self.engine.step = step
        rows: list[Any] = [
            {"id": f"{self.rank}/{number}", ROW_NUMBER_COLUMN: number}
            for number in range(step * MAX_GROUPS, (step + self.updates) * MAX_GROUPS)
            for _ in range(GROUP_SIZE)
        ]
        return self.trainer._generate_and_score_completions(rows)

    def go_on(self, until: int | None = None) -> SimulatedRun:
        """Train until this optimizer step, by default the last one; return the run itself."""
        while self.state.global_step < (until or self.state.max_steps):
            self.learned.append(self.sample_next())
            self.metrics.append(dict(self.log))
            self.state.global_step += self.updates
        return self

    @property
    def learned_rollouts(self) -> list[LearnedRollout]:
        """All rollouts that were learned from, in their order."""
        return [
            LearnedRollout(problem=row["id"], tokens=tokens)
            for generation in self.learned
            for row, tokens in zip(generation.rows, rollouts_of(generation), strict=True)
        ]

    @property
    def sizes(self) -> list[int]:
        """The number of groups of each generation that was learned from."""
        return [len(generation.rows) // GROUP_SIZE for generation in self.learned]


def unlimited_lengths(problem: str, updates: int = 1) -> list[int]:
    """Return the lengths of a problem's rollouts, as a run without a token budget samples them.

    Args:
        problem: rank and row number. With six groups a generation, for example, `0/8` is the
            problem in slot 2 of generation 1 on rank 0.
        updates: optimizer steps on a generation, which has so many times six groups.
    """
    rank, number = map(int, problem.split("/"))
    generation, slot_on_rank = divmod(number, MAX_GROUPS * updates)
    position = f"train/{generation * updates}/0"
    slot = slot_on_rank + rank * MAX_GROUPS * updates  # counted over all ranks
    lengths = []
    for member in range(GROUP_SIZE):
        first_seed = rollout_seed(RUN_SEED, position, slot, member)
        lengths.append(draw_length(first_seed))
    return lengths


def check_learned_once(run: SimulatedRun, ended: bool = True) -> int:
    """Check that a run has learned from every group once, and from whole rollouts.

    Groups may wait, unless the run has `ended`.

    Returns:
        How many generations' worth of problems did not begin, because unfinished groups took their
        slots. For example, 40 generations of six groups in which 222 groups began: 222 fill 37
        generations, so the result is 3.
    """
    problems = [rollout.problem for rollout in run.learned_rollouts[::GROUP_SIZE]]
    lengths = [len(rollout.tokens) for rollout in run.learned_rollouts]
    expected_lengths = []
    for problem in problems:
        expected_lengths += unlimited_lengths(problem, run.updates)
    assert lengths == expected_lengths
    waiting_problems = [group.row["id"] for group in run.pool.state.waiting_groups]
    numbers = sorted(int(problem.split("/")[1]) for problem in [*problems, *waiting_problems])
    assert numbers == list(range(len(numbers)))
    if ended:
        assert not waiting_problems
    return len(run.learned) - math.ceil(len(numbers) / MAX_GROUPS / run.updates)


@pytest.mark.parametrize("budget", [20, 60, 150, "auto"])
def test_what_began_is_learned_from_once_and_at_its_whole_length(budget):
    """Long rollouts are learned from as often as they are sampled, whatever the budget."""
    run = SimulatedRun(40, budget=budget).go_on()
    assert check_learned_once(run) <= 4
    assert max(run.sizes) == MAX_GROUPS
    assert min(run.sizes) >= MAX_GROUPS // 2
    assert sum(run.sizes[15:]) > 0.95 * 25 * MAX_GROUPS, "after a while hardly a slot is free"


def test_a_run_of_any_shape_that_is_stopped_and_goes_on_learns_from_every_group_once(tmp_path):
    """The result is equal to the bit, however often a run is killed.

    After a few steps a run is saved, and another one goes on from there. In half of the cases the
    first one has sampled the next generation before it is killed, and the second samples it again.
    """
    rng = random.Random(0)
    for case in range(12):
        updates = rng.choice((1, 1, 2, 3))
        staleness = rng.randint(1, 6)
        budget = rng.choice((5, 30, 100, 250, "auto"))
        steps = rng.randint(1, 30) * updates
        keys: dict[str, Any] = {"budget": budget, "staleness": staleness, "updates": updates}
        run = SimulatedRun(steps, **keys)
        while run.state.global_step < steps:
            run.go_on(until=min(steps, run.state.global_step + updates * rng.randint(1, 5)))
            step = run.state.global_step
            check_learned_once(run, ended=step == steps)
            if step < steps and rng.random() < 0.5:
                run.sample_next()  # and is killed before it learns from the generation
            folder = tmp_path / f"{case}-{step}"
            run.pool.save(folder)
            resumed_run = resume(run, folder, step, **keys)
            resumed_run.learned = run.learned
            resumed_run.metrics = run.metrics
            run = resumed_run
        uninterrupted = SimulatedRun(steps, **keys).go_on()
        assert run.learned_rollouts == uninterrupted.learned_rollouts, (keys, steps)
        assert run.metrics == uninterrupted.metrics, (keys, steps)
        assert learned_groups(run) == learned_groups(uninterrupted), (keys, steps)


@pytest.mark.parametrize("budget", [None, 40])
def test_a_run_with_tools_that_is_killed_within_a_turn_goes_on_to_the_bit(tmp_path, budget):
    """Tools are not called again for what is saved, and each part of a turn has a seed of its own."""
    uninterrupted = SimulatedRun(12, tools=True, budget=budget).go_on()
    run = SimulatedRun(12, tools=True, budget=budget)
    for step in (3, 7):
        run.go_on(until=step).sample_next()
        run.pool.save(tmp_path / str(step))
        resumed_run = resume(run, tmp_path / str(step), step, tools=True, budget=budget)
        resumed_run.learned = run.learned
        run = resumed_run
    run.go_on()
    assert learned_groups(run) == learned_groups(uninterrupted)
    groups = [group for groups in learned_groups(uninterrupted) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "calls", "length", "room"}
    assert {len(rollout.pictures) for rollout in rollouts} == {0, 1, 2, 3}
    seeds = [request.seed for request in uninterrupted.engine.all_requests]
    assert len(set(seeds)) == len(seeds)
    groups_of_earlier_generations = [
        group
        for learned in uninterrupted.learned
        for group in learned.groups
        if group.start_generation < learned.generation.number
    ]
    # Only with a budget do rollouts go on in a later generation.
    assert bool(groups_of_earlier_generations) is (budget is not None)


def test_where_nothing_is_called_a_run_with_tools_is_the_run_without():
    without_tools = SimulatedRun(4, tools=True, budget=None)
    without_tools.generation_sampler.group_sampler.tool_loop = None
    silent_tools: Any = SilentTools()
    with_silent_tools = SimulatedRun(4, tools=True, budget=None)
    with_silent_tools.generation_sampler.group_sampler.tool_loop = silent_tools
    without_tools.go_on()
    with_silent_tools.go_on()
    assert without_tools.learned_rollouts == with_silent_tools.learned_rollouts
    assert without_tools.engine.requests_of_calls == with_silent_tools.engine.requests_of_calls


def test_processes_whose_rollouts_have_other_numbers_of_turns_make_the_same_calls():
    def request_counts(rank: int, accelerator: Any) -> list[int]:
        """Train on a rank; the tools of rank 1 answer nothing, so its rollouts have one turn."""
        run = SimulatedRun(4, accelerator, tools=True, budget=None)
        if rank == 1:
            silent_tools: Any = SilentTools()
            run.generation_sampler.group_sampler.tool_loop = silent_tools
        run.go_on()
        return [len(requests) for requests in run.engine.requests_of_calls]

    several_turns_counts, one_turn_counts = run_on_two_ranks(request_counts)
    generations = 4  # one for each step
    assert len(several_turns_counts) == len(one_turn_counts) > generations
    further_turns = len(one_turn_counts) - generations
    assert one_turn_counts.count(0) == further_turns, "it takes part without any request"
    assert several_turns_counts.count(0) == 0


@pytest.mark.parametrize(("tools", "budget"), [(True, None), (True, 40), (False, 40)])
def test_the_engine_stays_awake_through_a_generation(tools, budget):
    """An engine that has slept needs all weights again, so it sleeps once a generation.

    A generation may have several calls: one for each turn, and for each part that a budget cuts off.
    """
    run = SimulatedRun(4, tools=tools, budget=budget)
    events = list[str]()
    stock_sample = run.engine.sample

    def record_sample(requests: Any, prompts: Any) -> list[SamplingResult]:
        events.append("turn")
        return stock_sample(requests, prompts)

    @contextmanager
    def record_awake() -> Iterator[None]:
        events.append("awake")
        yield
        events.append("asleep")

    engine: Any = run.engine
    engine.sample = record_sample
    engine.awake = record_awake
    run.go_on()
    # A generation is the events from one "awake" to the next.
    events_by_generation = [text.split() for text in " ".join(events).split("awake ")[1:]]
    assert len(events_by_generation) == 4
    assert max(generation.count("turn") for generation in events_by_generation) > 1
    assert all(generation[-1] == "asleep" for generation in events_by_generation)
    assert events.count("asleep") == 4


def test_when_answers_get_short_again_no_group_waits_for_long():
    """From step 30 on all new answers have 10 tokens, so more groups end than a generation takes.

    Then fewer groups begin, and the problems that were drawn for the others come later.
    """
    run = SimulatedRun(70, budget=60)
    length_by_seed = dict[int, int]()

    def length_by_step(seed: int) -> int:
        """Return the length of an answer, which does not change while it is sampled in parts."""
        length = draw_length(seed) if run.engine.step < 30 else 10
        return length_by_seed.setdefault(seed, length)

    run.engine.length = length_by_step
    run.go_on()
    staleness = [metrics["adora/staleness"] for metrics in run.metrics]
    assert sum(staleness[15:30]) / 15 > 1.5
    assert max(staleness[45:]) <= 0.5
    assert run.sizes[45:] == [MAX_GROUPS] * 25
    assert not run.pool.state.waiting_groups


def test_a_budget_shortens_generations():
    """The engine makes as many forward passes as its longest answer has tokens."""
    passes_per_rollout = {}
    for budget in (120, MAX_TOKENS):
        run = SimulatedRun(30, budget=budget).go_on()
        passes_per_rollout[budget] = run.engine.forward_passes / len(run.learned_rollouts)
    assert passes_per_rollout[120] < 0.6 * passes_per_rollout[MAX_TOKENS]


def test_a_budget_that_no_answer_reaches_changes_nothing():
    run = SimulatedRun(5, budget=MAX_TOKENS).go_on()
    assert run.sizes == [MAX_GROUPS] * 5
    assert [rollout.problem for rollout in run.learned_rollouts[::GROUP_SIZE]] == [
        f"0/{number}" for number in range(5 * MAX_GROUPS)
    ]
    for learned, requests in zip(run.learned, run.engine.requests_of_calls, strict=True):
        position = learned.generation.key.name
        seeds = [
            rollout_seed(RUN_SEED, position, slot, member)
            for slot in range(MAX_GROUPS)
            for member in range(GROUP_SIZE)
        ]
        assert [request.seed for request in requests] == seeds
        assert len({request.group for request in requests}) == MAX_GROUPS
        assert len(merge_requests(requests)) == MAX_GROUPS


def test_each_token_keeps_the_log_probability_of_the_weights_that_sampled_it():
    """A token is the step of the weights that sampled it, and minus the step its log-probability.

    Only the first token of each part that is sampled at once is a seed, which is larger.
    """
    run = SimulatedRun(20).go_on()
    rollouts_of_several_weights = 0
    for learned in run.learned:
        step = learned.generation.key.step
        rollouts = [rollout for group in learned.groups for rollout in group.rollouts]
        for rollout, age in zip(rollouts, learned.batch["age"], strict=True):
            tokens = rollout.tokens
            logps = [logp for logp in rollout.logps if logp is not None]
            for token, logp in zip(tokens, logps, strict=True):
                assert -logp == token or token >= 1000
            stale_tokens = [logp for logp in logps if -logp != step]
            assert len(stale_tokens) == rollout.stale_tokens(step)
            distinct_weights = len({*logps})
            assert distinct_weights <= len(rollout.segments)
            assert distinct_weights <= age + 1
            if 0 < len(stale_tokens) < len(tokens):
                rollouts_of_several_weights += 1
    assert rollouts_of_several_weights > 20


def test_segments_have_random_numbers_of_their_own_and_those_that_go_on_come_first_and_share_no_request():
    """No two requests have the same seed, also where they continue the same rollout.

    In each call rollouts that go on come first, and none of them shares its request with others. A
    rollout that goes on is known by its prompt, which is longer than the one token of a problem.
    """
    engine = SimulatedRun(20).go_on().engine
    seeds = [request.seed for request in engine.all_requests]
    assert len(set(seeds)) == len(seeds)
    for requests in engine.requests_of_calls:
        goes_on = [len(request.prompt_ids) > 1 for request in requests]
        assert goes_on == sorted(goes_on, reverse=True), "those that go on come first"
        continued_keys = [request.group for request in requests if len(request.prompt_ids) > 1]
        new_keys = [request.group for request in requests if len(request.prompt_ids) == 1]
        assert len(set(continued_keys)) == len(continued_keys)
        assert not {*continued_keys} & {*new_keys}


def test_no_answer_is_older_than_it_may_be():
    """An answer has one segment of its first generation, and one of each of `staleness` later ones.

    A generation adds two segments where it has too few complete groups: it samples some unfinished
    ones up to the budget, and then to their ends.
    """
    for staleness in (1, 2):
        run = SimulatedRun(40, budget=20, staleness=staleness).go_on()
        groups = [group for learned in run.learned for group in learned.groups]
        segment_counts = [len(rollout.segments) for group in groups for rollout in group.rollouts]
        assert staleness + 1 <= max(segment_counts) <= staleness + 2


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_every_generation_that_is_asked_for_ahead_has_groups_of_its_own(ahead):
    """Groups that are complete when a generation is requested may be used up before its turn.

    A generation without new groups would then have nothing to learn from, and the run would end.
    """
    for budget in (20, 60, 150):
        for steps in (9, 24):
            run = SimulatedRun(steps, budget=budget, ahead=ahead).go_on()
            assert min(run.sizes) >= MAX_GROUPS // 2, (budget, steps, run.sizes)
            check_learned_once(run, ended=False)
            assert len(run.pool.state.waiting_groups) <= MAX_GROUPS, "little is sampled in vain"


@given(
    mode=sampled_from(["train", "eval"]),
    step=integers(0, 10**6),
    micro=integers(0, 999),
    attempt=integers(0, 9),
)
def test_the_texts_that_seed_a_run_stay_what_they_are(mode, step, micro, attempt):
    """With other texts a run that resumes would draw other random numbers."""
    key = StepKey(mode=mode, step=step, micro=micro, attempt=attempt)
    assert key.position == f"{step}/{micro}"
    expected_name = f"{mode}/{step}/{micro}"
    if attempt:
        expected_name += f"/{attempt}"
    assert key.name == expected_name


def test_the_metrics_of_a_generation():
    run = SimulatedRun(20).go_on()
    for generation, metrics in zip(run.learned, run.metrics, strict=True):
        ages = generation.batch["age"].tolist()
        assert metrics["adora/staleness"] == pytest.approx(sum(ages) / len(ages), rel=1e-6)
        assert metrics["adora/staleness_max"] == max(ages)
        assert metrics["adora/rollout_budget"] == 60
    assert run.metrics[5]["adora/unfinished"] > 0
    assert run.metrics[-1]["adora/unfinished"] == 0


def test_how_many_begin_and_have_to_be_complete():
    """A generation has 8 slots here.

    With 9 waiting groups of which 6 are complete, for example, two complete groups are more than half
    of the slots, so only 6 groups begin. With 2 generations left there is room for 16 groups; 12
    wait, so at most 4 begin.
    """
    # (waiting groups, complete ones of these, remaining generations): groups that begin
    begin_cases = {
        (0, 0, 9): 8,
        (3, 3, 9): 8,
        (3, 0, 1): 5,
        (8, 0, 1): 0,
        (12, 0, 2): 4,
        (9, 4, 9): 8,
        (9, 6, 9): 6,
        (14, 13, 9): 0,
        (12, 6, 2): 4,
    }
    for (waiting, complete, remaining), begun in begin_cases.items():
        arguments = {
            "waiting_groups": waiting,
            "complete_groups": complete,
            "slots": 8,
            "remaining_generations": remaining,
        }
        assert count_groups_to_begin(**arguments) == begun
        assert count_groups_to_begin(**arguments, min_new_groups=4) == max(4, begun)
    # (groups that have begun, remaining generations): groups that have to be complete now
    complete_cases = {(8, 9): 2, (8, 1): 8, (11, 2): 3, (16, 2): 8, (1, 9): 1}
    for (groups, remaining), to_complete in complete_cases.items():
        assert groups_to_complete(groups, 8, remaining, min_groups=2) == to_complete


def test_generations_are_counted_and_named_where_an_epochs_last_step_has_fewer():
    """A step has two generations here, and an epoch three, so every other step has only one.

    With a wrong count groups would wait for a generation that does not come, and rollouts that are
    requested ahead would count as older than they are.
    """
    context = step_context(
        accelerator=OneProcess(),
        state=TrainerState(max_steps=4),
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=MAX_GROUPS * GROUP_SIZE,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
    )
    three_generations = range(3 * MAX_GROUPS)  # the rows of an epoch
    generations = GenerationNumbers(context, three_generations, is_numbered=True)
    # (optimizer step, generation in it): in each epoch the first step has two, the second has one
    positions = (
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
    )
    keys = [StepKey(mode="train", step=step, micro=micro) for step, micro in positions]
    all_generations = [Generation(key=key, group_size=GROUP_SIZE) for key in keys]
    remaining = [generations.count_remaining(generation) for generation in all_generations]
    assert remaining == [6, 5, 4, 3, 2, 1], "each counts itself"
    for first, generation in enumerate(all_generations):
        for number in range(first, len(keys)):
            following = generations.generation_after(generation, distance=number - first)
            assert following is not None
            assert following.key == keys[number]
            assert following.number == number
        after_the_last = generations.generation_after(generation, distance=len(keys) - first)
        assert after_the_last is None


def test_the_automatic_budget_is_the_length_of_nine_answers_of_ten():
    assert automatic_budget([], min_budget=7) is None
    # Two generations of 50 lengths: 1 to 98 and twice 180. Nine of ten are at most 90.
    long_tailed = [[*range(1, 50), 180], [*range(50, 99), 180]]
    assert automatic_budget(long_tailed, min_budget=7) == 90
    assert automatic_budget(long_tailed, min_budget=90) == 90
    run = SimulatedRun(20, budget="auto").go_on()
    budgets = [metrics["adora/rollout_budget"] for metrics in run.metrics]
    lengths = [[len(tokens) for tokens in rollouts_of(generation)] for generation in run.learned]
    expected_budgets = []
    for step in range(20):
        remembered_lengths = lengths[max(0, step - 4) : step]  # of the last four generations
        # An answer may take five generations: the first, and four by the default of `staleness`.
        budget = automatic_budget(remembered_lengths, min_budget=MAX_TOKENS // 5)
        expected_budgets.append(budget or MAX_TOKENS)
    assert budgets == expected_budgets
    assert budgets[0] == MAX_TOKENS, "no lengths are known yet"
    assert sum(budget < MAX_TOKENS for budget in budgets) > 5


def test_the_automatic_budget_leaves_answers_whole_where_few_tokens_would_be_saved():
    """A budget delays groups, so there is none where the longest answers are hardly longer than it.

    In the demo, for example, answers have 35 to 50 tokens, and the limit is 60.
    """
    # Two generations of ten answers each. Nine of ten are at most 45, and the longest have 60.
    demo_lengths = [[9] * 9 + [60], [45] * 9 + [60]]
    assert automatic_budget(demo_lengths, min_budget=12) is None
    # Nine of ten are at most 40, and the longest of a generation have 60 tokens on average.
    long_tailed = [[9] * 9 + [75], [40] * 9 + [45]]
    assert automatic_budget(long_tailed, min_budget=12) == 40
    assert automatic_budget(long_tailed, min_budget=40) == 40
    assert automatic_budget(long_tailed, min_budget=41) is None


def run_on_two_ranks(run_rank: Callable[[int, Any], Any]) -> list[Any]:
    """Return what `run_rank(rank, accelerator)` returns on two ranks that run at once."""
    gathered_parts = [None, None]
    meeting = Barrier(2, timeout=60)
    results = [None, None]

    def work(rank: int) -> None:
        results[rank] = run_rank(rank, OneOfSeveral(rank, gathered_parts, meeting))

    threads = [Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_processes_learn_from_equally_many_groups():
    """Otherwise they would wait for each other, or take another rank's rewards for their own."""
    first, second = run_on_two_ranks(
        lambda rank, accelerator: SimulatedRun(30, accelerator).go_on()
    )
    assert first.sizes == second.sizes
    assert first.metrics == second.metrics
    assert first.engine.requests_of_calls[3] != second.engine.requests_of_calls[3]
    for run in (first, second):
        assert check_learned_once(run) <= 4
        assert sum(run.sizes[15:]) > 0.85 * 15 * MAX_GROUPS


def resume(
    run_before: SimulatedRun, folder: Path, step: int, max_steps: int | None = None, **keys: Any
) -> SimulatedRun:
    """Return a new run that goes on from the checkpoint in `folder`, at an optimizer step.

    `max_steps`: None: as many as `run_before` has.
    """
    run = SimulatedRun(max_steps or run_before.state.max_steps, **keys)
    run.state.global_step = step
    run.pool.load(folder)
    return run


def test_a_run_that_is_to_end_earlier_says_once_what_it_cannot_learn_from(tmp_path, capsys):
    """A run is saved at step 5 and resumed with 7 steps, which have room for two generations.

    The line names a number of steps with which a run learns from all groups, and prints nothing.
    """
    run = SimulatedRun(12, budget=20).go_on(until=5)
    run.pool.save(tmp_path)
    waiting = len(run.pool.state.waiting_groups)
    assert 2 * MAX_GROUPS < waiting <= 4 * MAX_GROUPS, (
        "one generation has no room for them, and four have"
    )
    shorter = resume(run, tmp_path, 5, max_steps=7, budget=20).go_on()
    line = capsys.readouterr().err
    assert line.startswith(
        f"max_steps: 7 ends the run before {waiting - 2 * MAX_GROUPS} of the {waiting} groups"
    )
    assert line.count("\n") == 1
    assert len(shorter.pool.state.waiting_groups) == waiting - 2 * MAX_GROUPS
    named_steps = int(line.split("; ")[1].split()[0])
    longer = resume(run, tmp_path, 5, max_steps=named_steps, budget=20).go_on()
    assert not longer.pool.state.waiting_groups
    assert capsys.readouterr().err == ""


def test_another_number_of_processes_cannot_go_on(tmp_path):
    run = SimulatedRun(12).go_on(until=5)
    run.pool.save(tmp_path)

    def load(rank: int, accelerator: Any) -> str:
        """Return the line with which a rank refuses the checkpoint."""
        with pytest.raises(UserError) as refused:
            SimulatedRun(12, accelerator).pool.load(tmp_path)
        return str(refused.value)

    for line in run_on_two_ranks(load):
        assert "has unfinished rollouts (adora_rollouts.budget) of 1 processes, now 2" in line
        assert "\n" not in line


def test_where_nothing_is_unfinished_other_processes_go_on_with_problems_of_their_own(tmp_path):
    run = SimulatedRun(30).go_on()
    assert run.pool.state.drawn_problems
    assert not run.pool.state.waiting_groups
    run.pool.save(tmp_path)

    def problems_of_longer(rank: int, accelerator: Any) -> list[str]:
        """Return the problems of a run that goes on for three steps."""
        longer = resume(run, tmp_path, 30, max_steps=33, accelerator=accelerator).go_on()
        return [rollout.problem for rollout in longer.learned_rollouts[::GROUP_SIZE]]

    for rank, problems in enumerate(run_on_two_ranks(problems_of_longer)):
        first = 30 * MAX_GROUPS
        numbers = range(first, first + len(problems))
        assert sorted(problems) == [f"{rank}/{number}" for number in numbers]


def test_a_checkpoint_of_a_run_without_a_budget_has_nothing_to_restore(tmp_path):
    assert resume(SimulatedRun(3), tmp_path, 0).go_on().sizes[-1] == MAX_GROUPS


def test_what_tools_wrote_into_an_answer_is_told_from_what_the_policy_said(tmp_path):
    """A tool's answer is a segment without log-probabilities, also after a checkpoint.

    The seed of the next segment counts only the policy's segments before it. A picture of two
    rollouts is written once.
    """
    segments = (
        Segment(tokens=(5, 6), logps=(-0.5, None), step=3),
        Segment(tokens=(9, 9, 9), logps=None, step=3),
        Segment(tokens=(7,), logps=(-0.25,), step=4),
    )
    image = as_kept_image(Image.effect_noise((40, 30), 50).convert("RGB"))
    picture = Picture(digest=image.digest, image=image, segment_number=1)
    call = Call(
        name="zoom",
        arguments="{}",
        text="<image>",
        seconds=0.5,
        failed=False,
        segment_number=1,
    )
    whole_rollout = Rollout(
        segments=segments, finish_reason=FinishReason.STOP, pictures=(picture,), calls=(call,)
    )
    group = RolloutGroup(
        problem=DrawnProblem(row_number=2, key=StepKey(mode="train", step=3, micro=0), slot=1),
        row=Row(),
        start_generation=3,
        rollouts=(
            whole_rollout,
            replace(whole_rollout, segments=segments[:2], finish_reason=FinishReason.RUNNING),
        ),
    )
    PoolState(waiting_groups=(group,)).save(tmp_path, rank=0)
    (loaded,) = PoolState.load(tmp_path, rank=0, num_ranks=1).waiting_groups
    assert loaded == group
    assert not loaded.complete
    whole, part = loaded.rollouts
    assert whole.pictures[0].image is part.pictures[0].image
    assert content_digest(whole.pictures[0].image) == image.digest
    assert whole.tokens == [5, 6, 9, 9, 9, 7]
    assert [int(is_sampled) for is_sampled in whole.policy_mask] == [1, 1, 0, 0, 0, 1]
    assert whole.policy_tokens == [5, 6, 7]
    assert whole.last_turn_tokens == [7]
    assert part.last_turn_tokens == []
    assert whole.logps == [-0.5, None, None, None, None, -0.25]
    assert whole.stale_tokens(step=4) == 5
    assert part.stale_tokens(step=3) == 0
    assert loaded.seed(7, 1, part) == rollout_seed(7, "train/3/0/segment-1", 1, 1)


def signal_with_chance(chance: float) -> Callable[[int, int], bool]:
    """Return a function that says whether a problem's group has signal.

    About a share `chance` of the problems has it, and a problem has it always or never.
    """

    def has_signal(row_number: int, rank: int) -> bool:
        return random.Random(row_number).random() < chance

    return has_signal


def rounds_with_new_groups(run: SimulatedRun) -> set[int]:
    """Return the rounds of the first generation in which groups have begun.

    Round 0 samples the generation itself, and the later ones further problems.
    """
    rounds = set()
    for request in run.engine.all_requests:
        is_new = len(request.prompt_ids) == 1  # one that goes on has tokens behind its prompt
        if is_new:
            problem: Any = request.group
            rounds.add(problem.key.attempt)
    return rounds


@pytest.mark.parametrize(("refill", "signal_share"), [(4, 0.3), (2, 0.75)])
def test_groups_without_signal_are_replaced_by_those_of_further_problems(refill, signal_share):
    """Further rounds are sampled until all groups have signal, or `refill` rounds are over.

    A round has half as many groups again as are enough on average, and at most a generation's. With
    four of six groups with signal, for example, three further groups are enough for the missing
    two, so 4.5 groups begin, rounded up.
    """
    has_signal = signal_with_chance(signal_share)
    run = SimulatedRun(3, budget=None, refill=refill, has_signal=has_signal)
    learned = run.sample_next()
    row_numbers = learned.row_numbers
    assert len(row_numbers) == MAX_GROUPS
    assert all(has_signal(number, 0) for number in row_numbers)
    assert [row["id"] for row in learned.rows[::GROUP_SIZE]] == [f"0/{row}" for row in row_numbers]
    assert run.log["adora/refilled_groups"] > 0
    further_rounds = len(run.engine.requests_of_calls) - 1
    assert further_rounds <= refill
    assert rounds_with_new_groups(run) == set(range(further_rounds + 1))
    with_signal = [has_signal(number, 0) for number in range(MAX_GROUPS)].count(True)
    missing = MAX_GROUPS - with_signal
    groups_of_first_round = min(MAX_GROUPS, math.ceil(1.5 * missing * MAX_GROUPS / with_signal))
    assert len(run.engine.requests_of_calls[1]) == groups_of_first_round * GROUP_SIZE
    if signal_share > 0.5:
        assert groups_of_first_round < MAX_GROUPS, "few are missing"
    # The seed names the run's seed, step, micro-batch, round and rank.
    seed = f"{RUN_SEED}/0/0/1/0"
    drawn_rows = draw_refill_rows(len(run.pool.rows), groups_of_first_round, seed)
    assert {*row_numbers} & {*drawn_rows}


@pytest.mark.parametrize(("refill", "signal_share"), [(2, 0.0), (0, 0.3)])
def test_no_group_is_replaced_where_nothing_has_signal_or_no_round_is_allowed(refill, signal_share):
    has_signal = signal_with_chance(signal_share)
    run = SimulatedRun(3, budget=None, refill=refill, has_signal=has_signal)
    assert run.sample_next().row_numbers == list(range(MAX_GROUPS))
    assert len(run.engine.requests_of_calls) == 1 + refill
    assert rounds_with_new_groups(run) == set(range(refill + 1))
    assert run.log.get("adora/refilled_groups", 0) == 0


def test_with_a_budget_groups_that_a_round_has_not_ended_go_on_later():
    run = SimulatedRun(3, budget=60, refill=4, has_signal=signal_with_chance(0.3))
    row_numbers = run.sample_next().row_numbers
    assert {0, 1} <= rounds_with_new_groups(run), "later rounds may only continue groups"
    assert run.pool.state.waiting_groups
    further_numbers = {*row_numbers} - {*range(MAX_GROUPS)}
    assert further_numbers, "some further problems have ended already"


def test_processes_that_lack_different_numbers_of_groups_ask_for_equally_many_further_ones():
    def has_signal(number: int, rank: int) -> bool:
        """More groups of the first rank have signal."""
        return random.Random(number).random() < 0.9 - 0.5 * rank

    def counts_and_shares(rank: int, accelerator: Any) -> tuple[list[int], list[float]]:
        """Return the requests of each call, and the share of groups that each step replaced."""
        run = SimulatedRun(5, accelerator, budget=None, refill=3, has_signal=has_signal).go_on()
        request_counts = [len(requests) for requests in run.engine.requests_of_calls]
        shares = [metrics["adora/refilled_groups"] for metrics in run.metrics]
        return request_counts, shares

    first_rank, second_rank = run_on_two_ranks(counts_and_shares)
    assert first_rank == second_rank, "the share of replaced groups is that of all processes"
    request_counts, shares = first_rank
    assert len({*request_counts}) > 2
    assert max(shares) > 0
