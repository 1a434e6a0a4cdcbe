"""The pool of groups: every group is learned from once and in order, however long its rollouts are.

With a token budget a rollout may take several generations of sampling. Its group then waits in the
pool until all its rollouts have ended. The tests train with a fake engine, whose answers
have random lengths, and without a policy.
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
from adora_vl.data.shared_images import as_image_with_digest, content_digest
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
from tests.support.stand_ins import FakeAccelerator
from tests.support.step_context import step_context

GROUPS_PER_GENERATION = 6  # of each rank
GROUP_SIZE = 4  # rollouts of a group
MAX_TOKENS = 400  # of a rollout
RUN_SEED = 7
IMAGE_TOKEN = 4
LARGEST_TOKEN = 2**31 - 1  # that a checkpoint takes
# In its first generations a run fills the pool with unfinished groups, so slots stay free.
WARM_UP_GENERATIONS = 15
# Groups that wait take slots, so at the end of a run problems of a few generations have not begun.
MAX_SKIPPED_GENERATIONS = 4


def accelerator_of_thread(rank: int, parts: list[Any], meeting: Barrier) -> FakeAccelerator:
    """Return the fake Accelerator of one of several processes, which are threads of the test.

    Args:
        rank: the number of the process.
        parts: a place for the tensor of each process. All processes share the list.
        meeting: lets no process pass before all have come to it.
    """

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts[rank] = tensor
        meeting.wait()  # until all tensors are there
        gathered = torch.cat(parts)
        meeting.wait()  # until all have read them, since the next call replaces them
        return gathered

    return FakeAccelerator(process_index=rank, num_processes=len(parts), gather=gather)


def draw_length(seed: int) -> int:
    """Draw the length of the answer that begins with this seed.

    The distribution has a long tail, and some answers run to the limit.
    """
    rng = random.Random(seed & LARGEST_TOKEN)
    if rng.random() < 0.02:
        return MAX_TOKENS
    return min(MAX_TOKENS, max(3, int(60 * rng.lognormvariate(0, 0.7))))


class CountingEngine:
    """A fake engine, whose tokens tell which weights sampled them.

    The first token of a request is its seed. Each further token is the optimizer step of the
    weights that sample it, and minus the step is its log-probability. An answer that runs to the
    limit of `MAX_TOKENS` would never end by itself.
    """

    def __init__(self) -> None:
        self.step = 0  # the optimizer step of the present weights
        self.length = draw_length  # the length of an answer, by its first seed
        self.requests_of_calls: list[list[SamplingRequest]] = []
        self.forward_passes = 0

    @property
    def all_requests(self) -> list[SamplingRequest]:
        """The requests of all calls."""
        return [request for requests in self.requests_of_calls for request in requests]

    returns_logps = True
    reads_prompts = False
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
            tokens_left = 10 * MAX_TOKENS  # more than may be sampled: it never ends by itself
            if length < MAX_TOKENS:
                tokens_left = length - len(earlier_tokens)
            token_count = min(request.max_tokens, tokens_left)
            has_ended = tokens_left <= request.max_tokens
            results.append(
                SamplingResult(
                    tokens=[request.seed & LARGEST_TOKEN, *[self.step] * (token_count - 1)],
                    logps=[-float(self.step)] * token_count,
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
    """Fake servers that sample later generations ahead, with the weights of that time."""

    def __init__(self, ahead: int) -> None:
        CountingEngine.__init__(self)
        self.ahead = ahead

    def sync_weights(self, *, force: bool = False) -> None:
        pass

    def submit(self, requests: Any, settings: Any = None) -> PendingSamples:
        results = CountingEngine.sample(self, [*requests], prompts=None)
        return PendingSamples(step=self.step, join=lambda: results)

    def sample(
        self, requests: Any, prompts: Any = None, settings: Any = None
    ) -> list[SamplingResult]:
        return CountingEngine.sample(self, [*requests], prompts=prompts)

    def pop_seconds_waited(self) -> dict[str, float]:
        return {}


def rows_after(numbers: Sequence[int], distance: int) -> list[Row]:
    """Return the rows of the generation `distance` after the one with these row numbers.

    With six groups a generation, for example, the rows 12 to 17 come one generation after 6 to 11.
    """
    later = [number + distance * GROUPS_PER_GENERATION for number in numbers]
    rows: list[Any] = [{"id": f"0/{number}", ROW_NUMBER_COLUMN: number} for number in later]
    return rows


class PictureTools:
    """A fake tool loop, which answers most turns with a picture, up to three a rollout."""

    max_turn_tokens = None

    def __call__(
        self, rollout: Rollout, images: Any, *, max_length: int, step: int, seed: str, **_: Any
    ) -> Rollout:
        """Append a picture to the rollout, or end it."""
        rng = random.Random(f"{seed}/{len(rollout.pictures)}")
        # About a third of the turns calls no tool, or calls one in vain.
        if rng.random() < 0.3 or len(rollout.pictures) == 3:
            reason = FinishReason.STOP if rng.random() < 0.7 else FinishReason.CALLS
            return replace(rollout, finish_reason=reason)
        has_no_room = max_length - len(rollout.tokens) < 30  # tokens for a picture and a turn
        if has_no_room:
            return replace(rollout, finish_reason=FinishReason.CONTEXT)
        image = as_image_with_digest(Image.new("RGB", (28, 28 + rng.randrange(9))))
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
    """A fake tool loop that answers nothing."""

    max_turn_tokens = None

    def __call__(self, rollout: Rollout, images: Any, **_: Any) -> Rollout:
        return rollout


class StandInScorer:
    """A fake of the trainer's stages that build and score a batch.

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
        facts = replace(facts, missing_reward_reasons=(None,) * len(facts.rewards_NF))
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


def tokens_of_rollouts(learned: LearnedGeneration) -> list[list[int]]:
    """Return the tokens of each rollout that a generation has learned from."""
    return [rollout.tokens for group in learned.groups for rollout in group.rollouts]


def groups_by_generation(run: SimulatedRun) -> list[list[RolloutGroup]]:
    """Return the groups of each generation that a run has learned from."""
    return [list(learned.groups) for learned in run.learned]


def staged_trainer(run: Any, context: StepContext, scorer: StandInScorer) -> Any:
    """Return a trainer without a policy that goes through the stages of a generation.

    Sampling, the pool and the refill are the real ones. The stages after them are fakes: a
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


def group_sampler_with(
    engine: CountingEngine, tools: PictureTools | None, context: StepContext
) -> GroupSampler:
    """Return a sampler of groups with a fake engine, to which every prompt is the one token 1."""
    images: Any = SimpleNamespace(
        prompts=lambda rows, *_, **__: PromptBatch([], [[1]] * len(rows), None, {})
    )
    # An answer that is shorter than its limit has ended by itself.
    stop: Any = SimpleNamespace(has_stopped=lambda *_: True)
    return GroupSampler(
        context=context,
        prompt_reader=PromptReader(images),
        sampler=engine,  # type: ignore[arg-type]
        stop_criteria=stop,
        extensions=[],
        tool_loop=tools,  # type: ignore[arg-type]
    )


def drift_check_without_policy() -> LateDriftCheck:
    """Return a check that measures no drift, since there are no log-probabilities of a policy."""
    engine_and_policy: Any = SimpleNamespace(
        read_prompts=list,
        begin_sampling=lambda *_, **__: None,
        join_sampling=lambda *_: SimpleNamespace(logps_BC=None, mask_BC=None),
        policy_logps=lambda _: None,
        images=SimpleNamespace(vision=SimpleNamespace(unshared=nullcontext)),
    )
    drift_guard: Any = SimpleNamespace(check=lambda *_: None)
    return LateDriftCheck(engine_and_policy, drift_guard)


class SimulatedRun:
    """A training with a fake engine and without a policy.

    Its generations are sampled and scored. `learned` has what it would have learned from, and
    `metrics` what it has logged at each step.
    """

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
            accelerator=accelerator or FakeAccelerator(),
            state=self.state,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=GROUPS_PER_GENERATION * GROUP_SIZE,
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
        rows = [
            {"id": f"{self.rank}/{number}"}
            for number in range((steps + updates) * GROUPS_PER_GENERATION)
        ]
        guard: Any = SimpleNamespace(
            refuse_unusable=lambda *_: None, ending_run_if_no_server_is_left=nullcontext
        )
        scorer = StandInScorer(context.accelerator, has_signal)
        tool_loop = None
        if tools:
            self.engine = TurnsEngine()
            tool_loop = PictureTools()
        self.pool = Pool(context, rows, has_tools=tools)
        self.generation_sampler = GenerationSampler(
            context=context,
            pool=self.pool,
            group_sampler=group_sampler_with(self.engine, tool_loop, context),
            guard=guard,
            phase=lambda _: nullcontext(),
            environments=None,
            upcoming_rows=rows_after,
            drift_check=drift_check_without_policy(),
        )
        self.trainer = staged_trainer(self, context, scorer)
        self.learned: list[LearnedGeneration] = []
        self.metrics: list[dict[str, float]] = []

    def sample_next(self) -> LearnedGeneration:
        """Sample and score the next generation, and return it. The step does not go on."""
        step = self.state.global_step
        self.engine.step = step
        rows: list[Any] = [
            {"id": f"{self.rank}/{number}", ROW_NUMBER_COLUMN: number}
            for number in range(
                step * GROUPS_PER_GENERATION, (step + self.updates) * GROUPS_PER_GENERATION
            )
            for _ in range(GROUP_SIZE)
        ]
        return self.trainer._generate_and_score_completions(rows)

    def train(self, until: int | None = None) -> SimulatedRun:
        """Train until an optimizer step, by default the last one, and return the run itself."""
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
            for row, tokens in zip(generation.rows, tokens_of_rollouts(generation), strict=True)
        ]

    @property
    def group_counts(self) -> list[int]:
        """The number of groups of each generation that was learned from."""
        return [len(generation.rows) // GROUP_SIZE for generation in self.learned]

    @property
    def waiting_problems(self) -> list[str]:
        """The problems whose groups have begun and wait in the pool."""
        return [group.row["id"] for group in self.pool.state.waiting_groups]


def lengths_without_budget(problem: str, updates: int = 1) -> list[int]:
    """Return the lengths of a problem's rollouts, as a run without a token budget samples them.

    Args:
        problem: rank and row number. With six groups a generation, for example, `0/8` is the
            third problem of generation 1 on rank 0.
        updates: optimizer steps on a generation, which has so many times six groups.
    """
    rank, number = map(int, problem.split("/"))
    generation, number_on_rank = divmod(number, GROUPS_PER_GENERATION * updates)
    position = f"train/{generation * updates}/0"
    group_number = number_on_rank + rank * GROUPS_PER_GENERATION * updates  # counted over all ranks
    lengths = []
    for member in range(GROUP_SIZE):
        first_seed = rollout_seed(RUN_SEED, position, group_number, member)
        lengths.append(draw_length(first_seed))
    return lengths


def assert_learned_once(run: SimulatedRun, ended: bool = True) -> None:
    """Assert that a run has learned from every group that began once, and from whole rollouts.

    `ended`: whether the run is at its end, where no group may wait any more.
    """
    learned_problems = [rollout.problem for rollout in run.learned_rollouts[::GROUP_SIZE]]
    lengths = [len(rollout.tokens) for rollout in run.learned_rollouts]
    expected_lengths = []
    for problem in learned_problems:
        expected_lengths += lengths_without_budget(problem, run.updates)
    assert lengths == expected_lengths
    begun_problems = [*learned_problems, *run.waiting_problems]
    numbers = sorted(int(problem.split("/")[1]) for problem in begun_problems)
    assert numbers == list(range(len(numbers)))
    if ended:
        assert not run.waiting_problems


def skipped_generations(run: SimulatedRun) -> int:
    """Return how many generations' worth of problems did not begin.

    Unfinished groups took their slots. In 40 generations of six groups, for example, 222 groups
    have begun: they fill 37 generations, so the result is 3.
    """
    begun_groups = len(run.learned_rollouts) // GROUP_SIZE + len(run.waiting_problems)
    filled_generations = math.ceil(begun_groups / GROUPS_PER_GENERATION / run.updates)
    return len(run.learned) - filled_generations


@pytest.mark.parametrize("budget", [20, 60, 150, "auto"])
def test_what_began_is_learned_from_once_and_at_its_whole_length(budget):
    """Every group that begins is learned from once and whole, whatever the token budget.

    Nearly all slots of a generation are filled: `group_counts` are the groups of each generation.
    """
    run = SimulatedRun(steps=40, budget=budget).train()
    assert_learned_once(run)
    assert skipped_generations(run) <= MAX_SKIPPED_GENERATIONS
    assert max(run.group_counts) == GROUPS_PER_GENERATION
    assert min(run.group_counts) >= GROUPS_PER_GENERATION // 2
    counts_after_warm_up = run.group_counts[WARM_UP_GENERATIONS:]
    mean_count = sum(counts_after_warm_up) / len(counts_after_warm_up)
    assert mean_count > 0.95 * GROUPS_PER_GENERATION, "hardly a slot is free"


@pytest.mark.slow
def test_a_run_of_any_shape_that_is_stopped_and_goes_on_learns_from_every_group_once(tmp_path):
    """A run that is killed and resumed again and again equals an uninterrupted one to the bit.

    Twelve runs with random options are saved after a few steps each, and resumed in a new run. In
    half of the cases the killed run has sampled the next generation already, and the resumed run
    samples it again.
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
            run.train(until=min(steps, run.state.global_step + updates * rng.randint(1, 5)))
            step = run.state.global_step
            assert_learned_once(run, ended=step == steps)
            if step < steps and rng.random() < 0.5:
                run.sample_next()  # and is killed before it learns from the generation
            folder = tmp_path / f"{case}-{step}"
            run.pool.save(folder)
            resumed_run = resume(run, folder, step, **keys)
            resumed_run.learned = run.learned
            resumed_run.metrics = run.metrics
            run = resumed_run
        uninterrupted = SimulatedRun(steps, **keys).train()
        assert run.learned_rollouts == uninterrupted.learned_rollouts, (keys, steps)
        assert run.metrics == uninterrupted.metrics, (keys, steps)
        assert groups_by_generation(run) == groups_by_generation(uninterrupted), (keys, steps)


@pytest.mark.parametrize("budget", [None, 40])
def test_a_run_with_tools_that_is_killed_within_a_turn_goes_on_to_the_bit(tmp_path, budget):
    """A run that is killed and resumed twice learns from the same groups as an uninterrupted one.

    It is killed in the fourth and in the eighth of 12 steps, when the next generation is sampled
    and not learned from. No two requests of a run have the same seed.
    """
    uninterrupted = SimulatedRun(steps=12, tools=True, budget=budget).train()
    run = SimulatedRun(steps=12, tools=True, budget=budget)
    for step in (3, 7):
        run.train(until=step).sample_next()
        run.pool.save(tmp_path / str(step))
        resumed_run = resume(run, tmp_path / str(step), step, tools=True, budget=budget)
        resumed_run.learned = run.learned
        run = resumed_run
    run.train()

    assert groups_by_generation(run) == groups_by_generation(uninterrupted)
    groups = [group for groups in groups_by_generation(uninterrupted) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    # The run has rollouts of every kind: all reasons to end, and none to three pictures of tools.
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
    """Tools that answer nothing change neither the requests to the engine nor the rollouts."""
    without_tools = SimulatedRun(steps=4, tools=True, budget=None)
    without_tools.generation_sampler.group_sampler.tool_loop = None
    silent_tools: Any = SilentTools()
    with_silent_tools = SimulatedRun(steps=4, tools=True, budget=None)
    with_silent_tools.generation_sampler.group_sampler.tool_loop = silent_tools
    without_tools.train()
    with_silent_tools.train()
    assert without_tools.learned_rollouts == with_silent_tools.learned_rollouts
    assert without_tools.engine.requests_of_calls == with_silent_tools.engine.requests_of_calls


def test_processes_whose_rollouts_have_other_numbers_of_turns_make_the_same_calls():
    """A rank whose rollouts have ended goes on calling the engine, with no requests.

    All ranks call the engine equally often, since it may be divided among them.
    """

    def request_counts(rank: int, accelerator: Any) -> list[int]:
        """Train on a rank; the tools of rank 1 answer nothing, so its rollouts have one turn."""
        run = SimulatedRun(steps=4, accelerator=accelerator, tools=True, budget=None)
        if rank == 1:
            silent_tools: Any = SilentTools()
            run.generation_sampler.group_sampler.tool_loop = silent_tools
        run.train()
        return [len(requests) for requests in run.engine.requests_of_calls]

    several_turns_counts, one_turn_counts = run_on_two_ranks(request_counts)
    generations = 4  # one for each step
    assert len(several_turns_counts) == len(one_turn_counts) > generations
    further_turns = len(one_turn_counts) - generations
    assert one_turn_counts.count(0) == further_turns, "it takes part with no request"
    assert several_turns_counts.count(0) == 0


@pytest.mark.parametrize(("tools", "budget"), [(True, None), (True, 40), (False, 40)])
def test_the_engine_stays_awake_through_a_generation(tools, budget):
    """The engine is awake for all calls of a generation, and sleeps once, at its end.

    An engine that has slept needs all weights again. A generation has several calls where rollouts
    have several turns, or where a budget cuts them into parts.
    """
    run = SimulatedRun(steps=4, tools=tools, budget=budget)
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
    run.train()
    # A generation is the events from one "awake" to the next.
    events_by_generation = [text.split() for text in " ".join(events).split("awake ")[1:]]
    assert len(events_by_generation) == 4
    assert max(generation.count("turn") for generation in events_by_generation) > 1
    assert all(generation[-1] == "asleep" for generation in events_by_generation)
    assert events.count("asleep") == 4


def test_when_answers_get_short_again_no_group_waits_for_long():
    """Groups that wait are learned from within 15 steps when answers become short.

    All new answers have 10 tokens from step 30 on, so more groups end than a generation takes. Then
    fewer groups begin, and the problems that were drawn for the others come later.
    """
    run = SimulatedRun(steps=70, budget=60)
    length_by_seed = dict[int, int]()

    def length_by_step(seed: int) -> int:
        """Return the length of an answer, which does not change while it is sampled in parts."""
        length = draw_length(seed) if run.engine.step < 30 else 10
        return length_by_seed.setdefault(seed, length)

    run.engine.length = length_by_step
    run.train()
    # The age of a rollout is how many generations after its begin it is learned from.
    mean_ages = [metrics["adora/staleness"] for metrics in run.metrics]
    ages_of_long_answers = mean_ages[WARM_UP_GENERATIONS:30]
    assert sum(ages_of_long_answers) / len(ages_of_long_answers) > 1.5
    # By step 45 the groups that began with long answers have been learned from.
    assert max(mean_ages[45:]) <= 0.5
    assert run.group_counts[45:] == [GROUPS_PER_GENERATION] * (70 - 45)
    assert not run.waiting_problems


def test_a_budget_shortens_generations():
    """With a budget of 120 tokens a rollout costs less than 0.6 of the forward passes without one.

    In each call the engine makes as many forward passes as its longest answer has tokens.
    """
    passes_per_rollout = {}
    for budget in (120, MAX_TOKENS):
        run = SimulatedRun(steps=30, budget=budget).train()
        passes_per_rollout[budget] = run.engine.forward_passes / len(run.learned_rollouts)
    assert passes_per_rollout[120] < 0.6 * passes_per_rollout[MAX_TOKENS]


def test_a_budget_that_no_answer_reaches_changes_nothing():
    """With a budget of `MAX_TOKENS` generations are learned from whole, in the order of the data.

    Their requests have the seeds of a run without a budget, and each group is one request of vLLM.
    """
    run = SimulatedRun(steps=5, budget=MAX_TOKENS).train()
    assert run.group_counts == [GROUPS_PER_GENERATION] * 5
    assert [rollout.problem for rollout in run.learned_rollouts[::GROUP_SIZE]] == [
        f"0/{number}" for number in range(5 * GROUPS_PER_GENERATION)
    ]
    for learned, requests in zip(run.learned, run.engine.requests_of_calls, strict=True):
        position = learned.generation.key.name
        seeds = [
            rollout_seed(RUN_SEED, position, group_number, member)
            for group_number in range(GROUPS_PER_GENERATION)
            for member in range(GROUP_SIZE)
        ]
        assert [request.seed for request in requests] == seeds
        assert len({request.merge_key for request in requests}) == GROUPS_PER_GENERATION
        assert len(merge_requests(requests)) == GROUPS_PER_GENERATION


def test_each_token_keeps_the_log_probability_of_the_weights_that_sampled_it():
    """Rollouts that were sampled by several weights keep the log-probabilities of each.

    The fake engine's token is the optimizer step of the weights that sampled it, and minus the step
    its log-probability. Only the first token of each request is a seed, which is above 1000.
    """
    run = SimulatedRun(steps=20).train()
    rollouts_of_several_weights = 0
    for learned in run.learned:
        step = learned.generation.key.step
        rollouts = [rollout for group in learned.groups for rollout in group.rollouts]
        for rollout, age in zip(rollouts, learned.batch["age"], strict=True):
            tokens = rollout.tokens
            logps = [logp for logp in rollout.logps if logp is not None]
            for token, logp in zip(tokens, logps, strict=True):
                is_seed = token >= 1000
                assert -logp == token or is_seed
            stale_tokens = [logp for logp in logps if -logp != step]
            assert len(stale_tokens) == rollout.stale_tokens(step)
            distinct_weights = len({*logps})
            assert distinct_weights <= len(rollout.segments)
            assert distinct_weights <= age + 1
            if 0 < len(stale_tokens) < len(tokens):
                rollouts_of_several_weights += 1
    assert rollouts_of_several_weights > 20, "there are enough of them for the test to prove it"


def test_a_continued_rollout_has_a_seed_and_a_request_of_its_own_and_comes_first():
    """No two requests have the same seed, also where they continue the same rollout.

    In each call continued rollouts come first. Requests with the same `group` are merged, so each
    continued rollout has one of its own. Its prompt is longer than the one token of a problem.
    """
    engine = SimulatedRun(steps=20).train().engine
    seeds = [request.seed for request in engine.all_requests]
    assert len(set(seeds)) == len(seeds)
    for requests in engine.requests_of_calls:
        is_continued = [len(request.prompt_ids) > 1 for request in requests]
        assert is_continued == sorted(is_continued, reverse=True), "continued ones come first"
        continued_keys = [request.merge_key for request in requests if len(request.prompt_ids) > 1]
        new_keys = [request.merge_key for request in requests if len(request.prompt_ids) == 1]
        assert len(set(continued_keys)) == len(continued_keys)
        assert not {*continued_keys} & {*new_keys}


def test_no_answer_is_older_than_it_may_be():
    """An answer takes at most `staleness` generations after its first one.

    Each generation samples one segment of it. The last adds two where it has too few complete
    groups: it samples some unfinished ones up to the budget, and then to their ends.
    """
    for staleness in (1, 2):
        run = SimulatedRun(steps=40, budget=20, staleness=staleness).train()
        groups = [group for learned in run.learned for group in learned.groups]
        segment_counts = [len(rollout.segments) for group in groups for rollout in group.rollouts]
        assert staleness + 1 <= max(segment_counts) <= staleness + 2


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_every_generation_that_is_asked_for_ahead_has_groups_of_its_own(ahead):
    """While the policy learns, servers sample the next `ahead` generations: each begins new groups.

    Groups that are complete when a generation is requested may be used up before its turn. Without
    new groups it would then have nothing to learn from, and the run would end.
    """
    for budget in (20, 60, 150):
        for steps in (9, 24):
            run = SimulatedRun(steps, budget=budget, ahead=ahead).train()
            assert min(run.group_counts) >= GROUPS_PER_GENERATION // 2, (
                budget,
                steps,
                run.group_counts,
            )
            assert_learned_once(run, ended=False)
            assert len(run.waiting_problems) <= GROUPS_PER_GENERATION, "little is sampled in vain"


@given(
    mode=sampled_from(["train", "eval"]),
    step=integers(0, 10**6),
    micro=integers(0, 999),
    refill_round=integers(0, 9),
)
def test_the_texts_that_seed_a_run_stay_what_they_are(mode, step, micro, refill_round):
    """A `StepKey` seeds random numbers by its text, so with other texts a resumed run would differ.

    `refill_round` counts the rounds in which groups without signal are replaced.
    """
    key = StepKey(mode=mode, step=step, micro=micro, refill_round=refill_round)
    assert key.position == f"{step}/{micro}"
    expected_name = f"{mode}/{step}/{micro}"
    if refill_round:
        expected_name += f"/{refill_round}"
    assert key.name == expected_name


def test_the_metrics_of_a_generation():
    """The log has the mean and the largest age of its rollouts, the budget, and unfinished ones."""
    budget = 60
    run = SimulatedRun(steps=20, budget=budget).train()
    for generation, metrics in zip(run.learned, run.metrics, strict=True):
        ages = generation.batch["age"].tolist()
        assert metrics["adora/staleness"] == pytest.approx(sum(ages) / len(ages), rel=1e-6)
        assert metrics["adora/staleness_max"] == max(ages)
        assert metrics["adora/rollout_budget"] == budget
    assert run.metrics[5]["adora/unfinished"] > 0
    assert run.metrics[-1]["adora/unfinished"] == 0


def test_how_many_groups_begin_in_a_generation_and_how_many_have_to_be_complete():
    """A generation begins as many groups as it has slots, here 8, unless too many wait already.

    With 9 waiting groups of which 6 are complete, for example, two complete groups are more than
    half of the slots, so only 6 groups begin. With 2 generations left there is room for 16 groups;
    12 wait, so at most 4 begin.

    A generation needs `min_groups` complete groups, or more if later ones have no room for the
    rest: of 11 groups with 2 generations left, the last one takes 8, so 3 have to be complete now.
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


@pytest.mark.parametrize("processes", [1, 2])
def test_generations_are_counted_and_named_where_an_epochs_last_step_has_fewer(processes):
    """The generations of a run are numbered through, also where a step has fewer than others.

    A step has two generations here, and an epoch three, so every other step has only one. Two
    processes draw twice as many problems for each generation. With a wrong count groups would wait
    for a generation that does not come, and rollouts that are requested ahead would count as older
    than they are.
    """
    context = step_context(
        accelerator=FakeAccelerator(num_processes=processes),
        state=TrainerState(max_steps=4),
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUPS_PER_GENERATION * GROUP_SIZE,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
    )
    three_generations = range(3 * GROUPS_PER_GENERATION * processes)  # the rows of an epoch
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
    """The budget is the length that nine of ten answers of the last four generations do not exceed.

    It is at least `min_budget`, and there is none (None) before any length is known.
    """
    assert automatic_budget([], min_budget=7) is None
    # Two generations of 50 lengths: 1 to 98 and twice 180. Nine of ten are at most 90.
    long_tailed = [[*range(1, 50), 180], [*range(50, 99), 180]]
    assert automatic_budget(long_tailed, min_budget=7) == 90
    assert automatic_budget(long_tailed, min_budget=90) == 90
    # A run has the budgets that the function gives for what the run has learned from before.
    run = SimulatedRun(steps=20, budget="auto").train()
    budgets = [metrics["adora/rollout_budget"] for metrics in run.metrics]
    lengths = [
        [len(tokens) for tokens in tokens_of_rollouts(generation)] for generation in run.learned
    ]
    expected_budgets = []
    for step in range(20):
        recent_lengths = lengths[max(0, step - 4) : step]  # of the last four generations
        # An answer may take five generations: the first, and four by the default of `staleness`.
        budget = automatic_budget(recent_lengths, min_budget=MAX_TOKENS // 5)
        expected_budgets.append(budget or MAX_TOKENS)
    assert budgets == expected_budgets
    assert budgets[0] == MAX_TOKENS, "no lengths are known yet"
    assert sum(budget < MAX_TOKENS for budget in budgets) > 5


def test_the_automatic_budget_leaves_answers_whole_where_few_tokens_would_be_saved():
    """There is no budget (None) where the longest answers are hardly longer than it would be.

    It would delay groups and save little. In the demo, for example, answers have 35 to 50 tokens,
    and the limit is 60.
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
        results[rank] = run_rank(rank, accelerator_of_thread(rank, gathered_parts, meeting))

    threads = [Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_processes_learn_from_equally_many_groups():
    """Two ranks learn from equally many groups in each generation, and log the same metrics.

    Otherwise they would wait for each other, or take another rank's rewards for their own. Their
    problems differ, so their requests do too.
    """
    first, second = run_on_two_ranks(
        lambda rank, accelerator: SimulatedRun(steps=30, accelerator=accelerator).train()
    )
    assert first.group_counts == second.group_counts
    assert first.metrics == second.metrics
    assert first.engine.requests_of_calls[3] != second.engine.requests_of_calls[3]
    for run in (first, second):
        assert_learned_once(run)
        assert skipped_generations(run) <= MAX_SKIPPED_GENERATIONS
        counts_after_warm_up = run.group_counts[WARM_UP_GENERATIONS:]
        mean_count = sum(counts_after_warm_up) / len(counts_after_warm_up)
        assert mean_count > 0.85 * GROUPS_PER_GENERATION, "few slots are free"


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
    """A run that is resumed with too few steps prints one line with the groups that it leaves out.

    It is saved at step 5 and resumed with 7 steps, which have room for two generations. The line
    names a larger number of steps; with this one the run learns from all groups and prints nothing.
    """
    run = SimulatedRun(steps=12, budget=20).train(until=5)
    run.pool.save(tmp_path)
    waiting = len(run.pool.state.waiting_groups)

    assert 2 * GROUPS_PER_GENERATION < waiting <= 4 * GROUPS_PER_GENERATION, (
        "one generation has no room for them, and four have"
    )
    shorter = resume(run, tmp_path, step=5, max_steps=7, budget=20).train()
    line = capsys.readouterr().err
    assert line.startswith(
        f"max_steps: 7 ends the run before {waiting - 2 * GROUPS_PER_GENERATION} of the {waiting} groups"
    )
    assert line.count("\n") == 1
    assert len(shorter.pool.state.waiting_groups) == waiting - 2 * GROUPS_PER_GENERATION
    named_steps = int(line.split("; ")[1].split()[0])
    longer = resume(run, tmp_path, step=5, max_steps=named_steps, budget=20).train()
    assert not longer.pool.state.waiting_groups
    assert capsys.readouterr().err == ""


def test_another_number_of_processes_cannot_go_on(tmp_path):
    """Two processes refuse a checkpoint of one process with unfinished groups, in one line."""
    run = SimulatedRun(steps=12).train(until=5)
    run.pool.save(tmp_path)

    def load(rank: int, accelerator: Any) -> str:
        """Return the line with which a rank refuses the checkpoint."""
        with pytest.raises(UserError) as refused:
            SimulatedRun(steps=12, accelerator=accelerator).pool.load(tmp_path)
        return str(refused.value)

    for line in run_on_two_ranks(load):
        assert "has unfinished rollouts (adora_rollouts.budget) of 1 processes, now 2" in line
        assert "\n" not in line


def test_where_nothing_is_unfinished_other_processes_go_on_with_problems_of_their_own(tmp_path):
    """A checkpoint without unfinished groups may be resumed by another number of processes.

    A run of one process has ended, and two processes go on for three steps. Each learns from its
    own problems of those steps, and not from problems that the one process had drawn and not begun.
    """
    steps = 30
    run = SimulatedRun(steps).train()
    assert run.pool.state.drawn_problems
    assert not run.waiting_problems
    run.pool.save(tmp_path)

    def problems_of_longer(rank: int, accelerator: Any) -> list[str]:
        """Return the problems of a run that goes on for three steps."""
        longer = resume(run, tmp_path, steps, max_steps=steps + 3, accelerator=accelerator).train()
        return [rollout.problem for rollout in longer.learned_rollouts[::GROUP_SIZE]]

    for rank, problems in enumerate(run_on_two_ranks(problems_of_longer)):
        first = steps * GROUPS_PER_GENERATION
        numbers = range(first, first + len(problems))
        assert sorted(problems) == [f"{rank}/{number}" for number in numbers]


def test_a_checkpoint_of_a_run_without_a_budget_has_nothing_to_restore(tmp_path):
    """The checkpoint has no file of the pool, and the resumed run begins with an empty one."""
    resumed_run = resume(SimulatedRun(steps=3), tmp_path, step=0).train()
    assert resumed_run.group_counts[-1] == GROUPS_PER_GENERATION


def test_what_tools_wrote_into_an_answer_is_told_from_what_the_policy_said(tmp_path):
    """A checkpoint keeps which segments of a rollout the policy sampled, and which a tool wrote.

    A tool's segment has no log-probabilities. The seed of the next segment counts only the policy's
    segments before it. A picture of two rollouts is written once, so both have the same object.
    """
    segments = (
        Segment(tokens=(5, 6), logps=(-0.5, None), step=3),
        Segment(tokens=(9, 9, 9), logps=None, step=3),
        Segment(tokens=(7,), logps=(-0.25,), step=4),
    )
    image = as_image_with_digest(Image.effect_noise((40, 30), 50).convert("RGB"))
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
        problem=DrawnProblem(
            row_number=2, key=StepKey(mode="train", step=3, micro=0), group_number=1
        ),
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
    complete_rollout, begun_rollout = loaded.rollouts
    assert complete_rollout.pictures[0].image is begun_rollout.pictures[0].image
    assert content_digest(complete_rollout.pictures[0].image) == image.digest
    assert complete_rollout.tokens == [5, 6, 9, 9, 9, 7]
    assert [int(is_sampled) for is_sampled in complete_rollout.policy_mask] == [1, 1, 0, 0, 0, 1]
    assert complete_rollout.policy_tokens == [5, 6, 7]
    assert complete_rollout.last_turn_tokens == [7]
    assert begun_rollout.last_turn_tokens == []
    assert complete_rollout.logps == [-0.5, None, None, None, None, -0.25]
    assert complete_rollout.stale_tokens(step=4) == 5
    assert begun_rollout.stale_tokens(step=3) == 0
    # `begun_rollout` has one segment of the policy, so the next one has the number 1.
    assert loaded.seed(7, 1, begun_rollout) == rollout_seed(7, "train/3/0/segment-1", 1, 1)


def signal_in_share(share: float) -> Callable[[int, int], bool]:
    """Return a function that tells by row number and rank whether a problem's group has signal.

    About this share of the problems has it, and a problem has it always or never.
    """

    def has_signal(row_number: int, rank: int) -> bool:
        return random.Random(row_number).random() < share

    return has_signal


def refill_rounds_of_new_groups(run: SimulatedRun) -> set[int]:
    """Return the rounds of the first generation in which new groups were sampled.

    Round 0 samples the generation itself, and the later ones further problems.
    """
    rounds = set()
    for request in run.engine.all_requests:
        # A prompt is one token. A rollout that is continued has its earlier tokens behind it.
        is_new = len(request.prompt_ids) == 1
        if is_new:
            assert isinstance(request.merge_key, DrawnProblem)
            rounds.add(request.merge_key.key.refill_round)
    return rounds


@pytest.mark.parametrize(("refill", "signal_share"), [(4, 0.3), (2, 0.75)])
def test_groups_without_signal_are_replaced_by_those_of_further_problems(refill, signal_share):
    """Groups of further problems replace those without signal until all have it.

    A group has signal if its advantages are not all 0; here `has_signal` decides that. Further
    problems are sampled in at most `refill` rounds. The first has half as many groups again as are
    enough on average, and at most a generation's. With four of six groups with signal, for example,
    three further groups are enough for the missing two, so 4.5 groups begin, rounded up.
    """
    has_signal = signal_in_share(signal_share)
    run = SimulatedRun(steps=3, budget=None, refill=refill, has_signal=has_signal)
    learned = run.sample_next()
    row_numbers = learned.row_numbers

    assert len(row_numbers) == GROUPS_PER_GENERATION
    rank = 0
    assert all(has_signal(number, rank) for number in row_numbers)
    assert [row["id"] for row in learned.rows[::GROUP_SIZE]] == [f"0/{row}" for row in row_numbers]
    assert run.log["adora/refilled_groups"] > 0
    further_rounds = len(run.engine.requests_of_calls) - 1
    assert further_rounds <= refill
    assert refill_rounds_of_new_groups(run) == set(range(further_rounds + 1))
    have_signal = [has_signal(number, rank) for number in range(GROUPS_PER_GENERATION)]
    with_signal = have_signal.count(True)
    missing = GROUPS_PER_GENERATION - with_signal
    groups_of_first_round = min(
        GROUPS_PER_GENERATION, math.ceil(1.5 * missing * GROUPS_PER_GENERATION / with_signal)
    )
    assert len(run.engine.requests_of_calls[1]) == groups_of_first_round * GROUP_SIZE
    if signal_share > 0.5:
        assert groups_of_first_round < GROUPS_PER_GENERATION, "few are missing"
    # The seed names the run's seed, step, micro-batch, round and rank.
    seed = f"{RUN_SEED}/0/0/1/0"
    drawn_rows = draw_refill_rows(len(run.pool.rows), groups_of_first_round, seed)
    assert {*row_numbers} & {*drawn_rows}


@pytest.mark.parametrize(("refill", "signal_share"), [(2, 0.0), (0, 0.3)])
def test_no_group_is_replaced_where_nothing_has_signal_or_no_round_is_allowed(refill, signal_share):
    """A generation keeps its own groups if `refill` is 0, or if no further group has signal.

    All rounds that `refill` allows are sampled nevertheless.
    """
    has_signal = signal_in_share(signal_share)
    run = SimulatedRun(steps=3, budget=None, refill=refill, has_signal=has_signal)
    assert run.sample_next().row_numbers == list(range(GROUPS_PER_GENERATION))
    assert len(run.engine.requests_of_calls) == 1 + refill
    assert refill_rounds_of_new_groups(run) == set(range(refill + 1))
    assert run.log.get("adora/refilled_groups", 0) == 0


def test_with_a_budget_groups_that_a_round_has_not_ended_go_on_later():
    """Groups of further problems that the budget cuts off wait in the pool; others replace at once.

    Some of the generation's groups are replaced by further groups that have ended in time.
    """
    run = SimulatedRun(steps=3, budget=60, refill=4, has_signal=signal_in_share(0.3))
    row_numbers = run.sample_next().row_numbers
    assert {0, 1} <= refill_rounds_of_new_groups(run), "later rounds may only continue groups"
    assert run.pool.state.waiting_groups
    further_numbers = {*row_numbers} - {*range(GROUPS_PER_GENERATION)}
    assert further_numbers, "some further problems have ended already"


def test_processes_that_lack_different_numbers_of_groups_ask_for_equally_many_further_ones():
    """Both ranks make the same calls with equally many requests, however many groups each lacks.

    A call may be collective, so a rank that makes another one would leave the other waiting.
    """

    def has_signal(number: int, rank: int) -> bool:
        """More groups of the first rank have signal."""
        return random.Random(number).random() < 0.9 - 0.5 * rank

    def counts_and_shares(rank: int, accelerator: Any) -> tuple[list[int], list[float]]:
        """Return the requests of each call, and the share of groups that each step replaced."""
        run = SimulatedRun(
            steps=5, accelerator=accelerator, budget=None, refill=3, has_signal=has_signal
        ).train()
        request_counts = [len(requests) for requests in run.engine.requests_of_calls]
        shares = [metrics["adora/refilled_groups"] for metrics in run.metrics]
        return request_counts, shares

    first_rank, second_rank = run_on_two_ranks(counts_and_shares)
    assert first_rank == second_rank, "the share of replaced groups is that of all processes"
    request_counts, shares = first_rank
    assert len({*request_counts}) > 2
    assert max(shares) > 0
