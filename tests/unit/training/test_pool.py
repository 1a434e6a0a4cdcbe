"""Partial rollouts with a stand-in for the engine whose answers have drawn lengths: nothing is
lost, and in order.
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
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from PIL import Image
from transformers import TrainerState

from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.dataloader import ROW_NUMBER
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
from adora_vl.training.generation_sampler import GenerationSampler, LateDriftCheck
from adora_vl.training.group_sampler import GroupSampler, PromptReader
from adora_vl.training.pool import Pool
from adora_vl.training.pool_state import PoolState
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.training.schedule import (
    automatic_budget,
    further_rows,
    groups_to_complete,
    how_many_begin,
)
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import UserError
from adora_vl.utils.seeding import rollout_seed
from tests.support.facts import rollout_facts
from tests.support.step_context import step_context

# groups of a rank and generation, rollouts of a group, tokens
PLACES = 6
SIZE = 4
LONGEST = 400
IMAGE = 4  # the token of one
TOKEN = 2**31 - 1  # the largest that a checkpoint takes


class Alone:
    """One process."""

    process_index = 0
    num_processes = 1
    device = torch.device("cpu")

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Together(Alone):
    """One of several processes, which are threads here."""

    def __init__(self, rank: int, parts: list[Any], meeting: Barrier) -> None:
        self.process_index = rank
        self.num_processes = len(parts)
        self._parts = parts
        self._meeting = meeting

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._parts[self.process_index] = tensor
        self._meeting.wait()
        gathered = torch.cat(self._parts)
        self._meeting.wait()
        return gathered


def drawn(seed: int) -> int:
    """The whole length of the answer that begins with this seed: a long tail, and some that run to
    the limit.
    """
    rng = random.Random(seed & TOKEN)
    return (
        LONGEST
        if rng.random() < 0.02
        else min(LONGEST, max(3, int(60 * rng.lognormvariate(0, 0.7))))
    )


class Engine:
    """An answer's first token is its seed, and each further one the weights that sample it, as its
    log-probability. One that runs to the limit would never end by itself.
    """

    def __init__(self) -> None:
        self.step = 0
        self.length = drawn  # of the answer that begins with a seed
        self.asked: list[Any] = []  # the asks of every call
        self.steps = 0

    scores = True
    awake = staticmethod(nullcontext)

    def sample(self, asks: list[SamplingRequest], prompts: Any) -> list[SamplingResult]:
        self.asked.append(asks)
        answers = []
        for one in asks:
            assert one.seed is not None
            assert one.max_tokens is not None
            begun = one.prompt_ids[1:]  # behind a prompt of one token
            whole = self.length(begun[0] if begun else one.seed & TOKEN)
            left = whole - len(begun) if whole < LONGEST else 10 * LONGEST
            new = [one.seed & TOKEN, *[self.step] * (min(one.max_tokens, left) - 1)]
            reason = FinishReason.LENGTH if left > one.max_tokens else FinishReason.STOP
            answers.append(
                SamplingResult(
                    tokens=new, logps=[-float(self.step)] * len(new), finish_reason=reason
                )
            )
        self.steps += max((len(answer.tokens) for answer in answers), default=0)
        return answers


class TurnsEngine(Engine):
    """What it samples at a time, a turn or a part of one, has the length that is drawn from its own
    seed.
    """

    def sample(self, asks: list[SamplingRequest], prompts: Any) -> list[SamplingResult]:
        self.asked.append(asks)
        answers = []
        for one in asks:
            assert one.seed is not None
            assert one.max_tokens is not None
            assert one.max_tokens > 0
            assert sum(token == IMAGE for token in one.prompt_ids) == len(one.images)
            length = min(one.max_tokens, drawn(one.seed))
            is_whole = drawn(one.seed) <= one.max_tokens
            reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
            answers.append(
                SamplingResult(
                    tokens=[one.seed & TOKEN] * length, logps=[-1.0] * length, finish_reason=reason
                )
            )
        return answers


class EngineAhead(Engine, AsyncServerSampler):
    """Answers what is asked for ahead when it is needed, by the weights of when it was asked."""

    def __init__(self, ahead: int) -> None:
        Engine.__init__(self)
        self.ahead = ahead

    def sync_weights(self, *, force: bool = False) -> None:
        pass

    def begin(self, asks: Any, settings: Any = None) -> PendingSamples:
        answers = Engine.sample(self, [*asks], None)
        return PendingSamples(self.step, lambda: answers)

    def sample(self, asks: Any, prompts: Any = None, settings: Any = None) -> list[SamplingResult]:
        return Engine.sample(self, [*asks], prompts)

    def pop_seconds_waited(self) -> dict[str, float]:
        return {}


def rows_after(numbers: Sequence[int], distance: int) -> list[Row]:
    """The rows of the generation so many after the one with these numbers."""
    later = [number + distance * PLACES for number in numbers]
    rows: list[Any] = [{"id": f"0/{number}", ROW_NUMBER: number} for number in later]
    return rows


class Answered:
    """Answers most turns with a picture, up to three of a rollout."""

    turn_tokens = None

    def __call__(
        self, rollout: Rollout, images: Any, *, max_length: int, step: int, seed: str, **_: Any
    ) -> Rollout:
        draw = random.Random(f"{seed}/{len(rollout.pictures)}")
        place = len(rollout.segments)
        if draw.random() < 0.3 or len(rollout.pictures) == 3:
            return replace(
                rollout,
                finish_reason=FinishReason.STOP if draw.random() < 0.7 else FinishReason.CALLS,
            )
        if max_length - len(rollout.tokens) < 30:
            return replace(rollout, finish_reason=FinishReason.CONTEXT)
        image = as_kept_image(Image.new("RGB", (28, 28 + draw.randrange(9))))
        return replace(
            rollout,
            finish_reason=FinishReason.RUNNING,
            segments=(*rollout.segments, Segment(tokens=(5, IMAGE, 6), logps=None, step=step)),
            pictures=(*rollout.pictures, Picture(digest=image.digest, image=image, span=place)),
        )


class Silent:
    """Answers nothing."""

    turn_tokens = None

    def __call__(self, rollout: Rollout, images: Any, **_: Any) -> Rollout:
        return rollout


class Judges:
    """Notes the groups of a generation in its batch. It scores nothing: every group has signal."""

    def __init__(self, accelerator: Any, has_signal: Callable[[int, int], bool]) -> None:
        """`has_signal(number, rank)`: whether the group of a problem has signal."""
        self.accelerator = accelerator
        self.has_signal = has_signal

    def score(self, generation: Generation, groups: Any) -> ScoredGroups:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        problems = torch.tensor(
            [group.problem.row_number for group in groups for _ in group.rollouts]
        )
        ages = [generation.number - group.began for group in groups for _ in group.rollouts]
        wide = problems[:, None]
        batch: Any = dict.fromkeys(("prompt_ids", "completion_ids"), wide)
        batch |= dict.fromkeys(("prompt_mask", "completion_mask"), torch.ones_like(wide))
        batch["age"] = torch.tensor(ages)
        lengths = torch.tensor([float(len(rollout.tokens)) for rollout in rollouts])
        ranks = torch.full((len(rollouts),), float(self.accelerator.process_index))
        facts = rollout_facts(wide.float(), length_N=lengths, prompt_length_N=ranks)
        facts = RolloutFacts.gathered(facts, self.accelerator)
        facts = replace(facts, missing_reasons=(None,) * len(facts.rewards_NF))
        assessment = self.assess(facts, SIZE, 0)
        return ScoredGroups(
            groups=groups,
            batch=batch,
            facts=facts,
            assessment=assessment,
        )

    def assess(self, facts: RolloutFacts, group_size: int, step: int) -> GroupAssessment:
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
class Learned:
    """A generation that was learned from."""

    generation: Generation
    groups: Any
    batch: Any

    @property
    def rows(self) -> list[Row]:
        return [group.row for group in self.groups for _ in group.rollouts]


def groups_in(learned: Learned) -> list[RolloutGroup]:
    """Those that the generation has learned from."""
    return list(learned.groups)


def rollouts_of(learned: Learned) -> list[list[int]]:
    return [rollout.tokens for group in groups_in(learned) for rollout in group.rollouts]


def stages(run: Any, context: StepContext, judges: Judges) -> Any:
    """A trainer that has no policy and goes through the stages of a generation all the same."""
    trainer: Any = AdoraGRPOTrainer.__new__(AdoraGRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer.state = run.state
    trainer.args = context.config
    trainer.accelerator = context.accelerator
    trainer.context = context
    trainer.layout = run.pool.layout
    trainer.num_generations = SIZE
    trainer.pool = run.pool
    trainer.rollouts = run.rollouts
    trainer.prefetch = SimpleNamespace(start=lambda: None, finish=lambda: None)
    trainer.unfinished = SimpleNamespace(begins=lambda *_: None)
    trainer.advantages = judges
    trainer.log_figure = run.log.__setitem__
    trainer._facts = dict
    trainer._logs = {}
    trainer._step = 0
    trainer._score = judges.score
    trainer._weigh = lambda generation, scored: Learned(generation, scored.groups, scored.batch)
    return trainer


class Run:
    """A training of so many optimizer steps, without a policy.

    `updates`: those that learn from one generation.
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
        self.state, self.log = TrainerState(max_steps=steps), {}  # type: ignore[var-annotated]
        self.updates = updates
        options = RolloutOptions(**{"budget": 60, **rollouts})
        self.engine = EngineAhead(options.ahead) if options.ahead else Engine()
        context = step_context(
            self.log,
            accelerator=accelerator or Alone(),
            state=self.state,
            num_generations=SIZE,
            per_device_train_batch_size=PLACES * SIZE,
            steps_per_generation=updates,
            gradient_accumulation_steps=1,
            max_completion_length=LONGEST,
            use_vllm=True,
            seed=7,
            vllm_importance_sampling_mode="token_truncate",
            adora_rollouts=options,
        )
        self.rank = context.accelerator.process_index
        rows = [{"id": f"{self.rank}/{number}"} for number in range((steps + updates) * PLACES)]
        images: Any = SimpleNamespace(
            prompts=lambda rows, *_, **__: PromptBatch([], [[1]] * len(rows), None, {})
        )
        guard: Any = SimpleNamespace(check=lambda *_: None, watching=nullcontext)
        judges = Judges(context.accelerator, has_signal)
        stop: Any = SimpleNamespace(ends=lambda *_: True)
        if tools:
            self.engine = TurnsEngine()
        tool_loop: Any = Answered() if tools else None
        self.pool = Pool(context, rows, tools=tools)
        groups = GroupSampler(
            context=context,
            prompt_reader=PromptReader(images),
            sampler=self.engine,  # type: ignore[arg-type]
            stop_criteria=stop,
            extensions=[],
            tool_loop=tool_loop,
        )
        pair: Any = SimpleNamespace(
            read_prompts=list,
            begin_sampling=lambda *_, **__: None,
            join_sampling=lambda *_: SimpleNamespace(logps_BC=None, mask_BC=None),
            policy_logps=lambda _: None,
            images=SimpleNamespace(vision=SimpleNamespace(unshared=nullcontext)),
        )
        self.rollouts = GenerationSampler(
            context=context,
            pool=self.pool,
            group_sampler=groups,
            guard=guard,
            phase=lambda _: nullcontext(),
            environments=None,
            rows_ahead=rows_after,
            drift_check=LateDriftCheck(pair, check=lambda *_: None),
        )
        self.trainer = stages(self, context, judges)
        self.learned: list[Learned] = []
        self.figures: list[dict[str, float]] = []

    def sampled(self) -> Learned:
        """The next generation, sampled and scored."""
        step = self.engine.step = self.state.global_step
        rows: list[Any] = [
            {"id": f"{self.rank}/{number}", ROW_NUMBER: number}
            for number in range(step * PLACES, (step + self.updates) * PLACES)
            for _ in range(SIZE)
        ]
        return self.trainer._generate_and_score_completions(rows)

    def go_on(self, until: int | None = None) -> Run:
        while self.state.global_step < (until or self.state.max_steps):
            self.learned.append(self.sampled())
            self.figures.append(dict(self.log))
            self.state.global_step += self.updates
        return self

    @property
    def answers(self) -> list[tuple[str, list[int]]]:
        """Of every rollout that was learned from, its problem and its tokens, in their order."""
        return [
            (row["id"], tokens)
            for generation in self.learned
            for row, tokens in zip(generation.rows, rollouts_of(generation), strict=True)
        ]

    @property
    def sizes(self) -> list[int]:
        """Groups of each generation."""
        return [len(generation.rows) // SIZE for generation in self.learned]


def whole_lengths(problem: str, updates: int = 1) -> list[int]:
    """Those of the group that begins with this row, as any run draws them."""
    rank, number = map(int, problem.split("/"))
    generation, place = divmod(number, PLACES * updates)
    where = f"train/{generation * updates}/0"
    place = place + rank * PLACES * updates
    return [drawn(rollout_seed(7, where, place, member)) for member in range(SIZE)]


def check_learned(run: Run, ended: bool = True) -> int:
    """Every group once and whole, in no other order than they were drawn but for those that wait.

    Returns how many generations of problems have not begun.
    """
    problems = [problem for problem, _ in run.answers[::SIZE]]
    lengths = [len(tokens) for _, tokens in run.answers]
    assert lengths == [
        length for problem in problems for length in whole_lengths(problem, run.updates)
    ]
    waiting = [int(group.row["id"].split("/")[1]) for group in run.pool.state.waiting]
    numbers = sorted([*(int(problem.split("/")[1]) for problem in problems), *waiting])
    assert numbers == list(range(len(numbers)))
    assert not (ended and waiting)
    return len(run.learned) - math.ceil(len(numbers) / PLACES / run.updates)


@pytest.mark.parametrize("budget", [20, 60, 150, "auto"])
def test_what_began_is_learned_from_once_and_at_its_whole_length(budget):
    """So the lengths learned from have the distribution of whole rollouts, whatever the budget."""
    run = Run(40, budget=budget).go_on()
    assert check_learned(run) <= 4
    assert max(run.sizes) == PLACES
    assert min(run.sizes) >= PLACES // 2
    assert sum(run.sizes[15:]) > 0.95 * 25 * PLACES, (
        "after a while there is hardly a place without a group"
    )


def test_a_run_of_any_shape_that_is_stopped_and_goes_on_learns_from_every_group_once(tmp_path):
    """However often it is killed, also where a generation fails and is sampled again; and to the
    bit.
    """
    draw = random.Random(0)
    for number in range(12):
        updates = draw.choice((1, 1, 2, 3))
        staleness = draw.randint(1, 6)
        keys: dict[str, Any] = {"budget": draw.choice((5, 30, 100, 250, "auto"))}
        keys["staleness"] = staleness
        generations = draw.randint(1, 30)
        killed = 0
        run = Run(generations * updates, updates=updates, **keys)
        while run.state.global_step < run.state.max_steps:
            run.go_on(
                until=min(run.state.max_steps, run.state.global_step + updates * draw.randint(1, 5))
            )
            check_learned(run, ended=run.state.global_step == run.state.max_steps)
            if run.state.global_step < run.state.max_steps and draw.random() < 0.5:
                run.sampled()
            folder = tmp_path / f"{number}-{(killed := killed + 1)}"
            run.pool.save(folder)
            again = resumed(
                run,
                folder,
                run.state.global_step,
                updates=updates,
                **keys,
            )
            again.learned = run.learned
            again.figures = run.figures
            run = again
        whole = Run(generations * updates, updates=updates, **keys).go_on()
        assert run.answers == whole.answers, (
            updates,
            keys,
            generations,
        )
        assert run.figures == whole.figures, (
            updates,
            keys,
            generations,
        )
        sampled = [[groups_in(generation) for generation in one.learned] for one in (run, whole)]
        assert sampled[0] == sampled[1], (updates, keys, generations)


@pytest.mark.parametrize("budget", [None, 40])
def test_a_run_with_tools_that_is_killed_within_a_turn_goes_on_to_the_bit(tmp_path, budget):
    """Tools are not called again for what is saved, and each part of a turn has random numbers of
    its own.
    """
    whole = Run(12, tools=True, budget=budget).go_on()
    run = Run(12, tools=True, budget=budget)
    for step in (3, 7):
        run.go_on(until=step).sampled()
        run.pool.save(tmp_path / str(step))
        again = resumed(
            run,
            tmp_path / str(step),
            step,
            tools=True,
            budget=budget,
        )
        again.learned = run.learned
        run = again
    run.go_on()
    found = [[groups_in(generation) for generation in one.learned] for one in (run, whole)]
    assert found[0] == found[1]
    rollouts = [rollout for groups in found[1] for group in groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "calls", "length", "room"}
    assert {len(rollout.pictures) for rollout in rollouts} == {0, 1, 2, 3}
    seeds = [one.seed for asks in whole.engine.asked for one in asks]
    assert len(set(seeds)) == len(seeds)
    paused = [
        group
        for one in whole.learned
        for group in groups_in(one)
        if group.began < one.generation.number
    ]
    assert bool(paused) is (budget is not None)


def test_where_nothing_is_called_a_run_with_tools_is_the_run_without():
    runs = [Run(4, tools=True, budget=None) for _ in range(2)]
    runs[0].rollouts.group_sampler.tool_loop = None
    silent: Any = Silent()
    runs[1].rollouts.group_sampler.tool_loop = silent
    assert runs[0].go_on().answers == runs[1].go_on().answers
    assert runs[0].engine.asked == runs[1].engine.asked


def test_processes_whose_rollouts_have_other_numbers_of_turns_make_the_same_calls():
    def part(rank: int, accelerator: Any) -> list[int]:
        run = Run(4, accelerator, tools=True, budget=None)
        if rank:
            silent: Any = Silent()
            run.rollouts.group_sampler.tool_loop = silent
        run.go_on()
        return [len(asks) for asks in run.engine.asked]

    several, one = on_two(part)
    assert len(several) == len(one) > 4
    assert one.count(0) == len(one) - 4
    assert several.count(0) == 0


@pytest.mark.parametrize(("tools", "budget"), [(True, None), (True, 40), (False, 40)])
def test_the_engine_stays_awake_through_a_generation(tools, budget):
    """However many turns and parts it samples: asleep, it would need all weights again."""
    run = Run(4, tools=tools, budget=budget)
    noted = list[str]()
    sample = run.engine.sample

    def noted_sample(requests: Any, prompts: Any) -> list[SamplingResult]:
        noted.append("turn")
        return sample(requests, prompts)

    @contextmanager
    def noted_awake() -> Iterator[None]:
        noted.append("awake")
        yield
        noted.append("asleep")

    engine: Any = run.engine
    engine.sample = noted_sample
    engine.awake = noted_awake
    run.go_on()
    generations = " ".join(noted).split("awake ")[1:]
    assert len(generations) == 4
    assert max(generation.count("turn") for generation in generations) > 1
    assert all(generation.split()[-1] == "asleep" for generation in generations)
    assert noted.count("asleep") == 4


def test_when_answers_get_short_again_no_group_waits_for_long():
    """Groups that are complete and have no place make room: fewer begin, and those that were drawn
    come later.
    """
    run = Run(70, budget=60)
    known = dict[int, int]()
    run.engine.length = lambda seed: known.setdefault(
        seed, drawn(seed) if run.engine.step < 30 else 10
    )
    run.go_on()
    staleness = [figures["adora/staleness"] for figures in run.figures]
    assert sum(staleness[15:30]) / 15 > 1.5
    assert max(staleness[45:]) <= 0.5
    assert run.sizes[45:] == [PLACES] * 25
    assert not run.pool.state.waiting


def test_a_budget_shortens_generations():
    """Else nothing is gained: the engine makes as many steps as its longest answer has tokens."""
    steps_per_rollout = []
    for budget in (120, LONGEST):
        run = Run(30, budget=budget).go_on()
        steps_per_rollout.append(run.engine.steps / len(run.answers))
    assert steps_per_rollout[0] < 0.6 * steps_per_rollout[1]


def test_a_budget_that_no_answer_reaches_changes_nothing():
    run = Run(5, budget=LONGEST).go_on()
    assert run.sizes == [PLACES] * 5
    assert [problem for problem, _ in run.answers[::SIZE]] == [
        f"0/{number}" for number in range(5 * PLACES)
    ]
    for generation, asks in zip(run.learned, run.engine.asked, strict=True):
        seeds = [
            rollout_seed(7, generation.generation.key.name, *divmod(row, SIZE))
            for row in range(PLACES * SIZE)
        ]
        assert [one.seed for one in asks] == seeds
        assert len({one.group for one in asks}) == PLACES
        assert len(merge_requests(asks)) == PLACES


def test_each_token_keeps_the_log_probability_of_the_weights_that_sampled_it():
    run = Run(20).go_on()
    mixed = 0
    for generation in run.learned:
        for rollout, age in zip(
            [one for group in groups_in(generation) for one in group.rollouts],
            generation.batch["age"],
            strict=True,
        ):
            tokens = rollout.tokens
            logps = rollout.logps
            assert all(
                -logp == token for token, logp in zip(tokens, logps, strict=True) if token < 1000
            )
            stale = sum(
                -logp != generation.generation.key.step for logp in logps if logp is not None
            )
            assert stale == rollout.stale_tokens(generation.generation.key.step)
            assert len({*logps}) <= len(rollout.segments)
            assert len({*logps}) <= age + 1
            mixed += 0 < stale < len(tokens)
    assert mixed > 20


def test_segments_have_random_numbers_of_their_own_and_those_that_go_on_come_first_and_share_no_request():
    asked = Run(20).go_on().engine.asked
    seeds = [one.seed for segments in asked for one in segments]
    assert len(set(seeds)) == len(seeds)
    for segments in asked:
        begun = [len(one.prompt_ids) > 1 for one in segments]
        assert begun == sorted(begun, reverse=True)
        alone, others = (
            [one.group for one in segments if (len(one.prompt_ids) > 1) is had]
            for had in (True, False)
        )
        assert len(set(alone)) == len(alone)
        assert not {*alone} & {*others}


def test_no_answer_is_older_than_it_may_be():
    for bound in (1, 2):
        run = Run(40, budget=20, staleness=bound).go_on()
        groups = [group for generation in run.learned for group in groups_in(generation)]
        segments = [len(rollout.segments) for group in groups for rollout in group.rollouts]
        assert bound + 1 <= max(segments) <= bound + 2


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_every_generation_that_is_asked_for_ahead_has_groups_of_its_own(ahead):
    """What is complete when a generation is asked for may be used up before its turn. Without any
    group there is nothing to learn from, and the run ends.
    """
    for budget in (20, 60, 150):
        for steps in (9, 24):
            run = Run(steps, budget=budget, ahead=ahead).go_on()
            assert min(run.sizes) >= PLACES // 2, (budget, steps, run.sizes)
            check_learned(run, ended=False)
            assert len(run.pool.state.waiting) <= PLACES, "little is sampled in vain"


@given(
    mode=sampled_from(["train", "eval"]),
    step=integers(0, 10**6),
    micro=integers(0, 999),
    attempt=integers(0, 9),
)
def test_the_texts_that_seed_a_run_stay_what_they_are(mode, step, micro, attempt):
    """Else a run that resumes would draw other random numbers, and learn from other rollouts."""
    key = StepKey(
        mode=mode,
        step=step,
        micro=micro,
        attempt=attempt,
    )
    assert key.position == f"{step}/{micro}"
    assert key.name == (f"{mode}/{step}/{micro}/{attempt}" if attempt else f"{mode}/{step}/{micro}")


def test_the_figures_of_a_generation():
    run = Run(20).go_on()
    for generation, figures in zip(run.learned, run.figures, strict=True):
        ages = generation.batch["age"].tolist()
        assert figures["adora/staleness"] == pytest.approx(sum(ages) / len(ages), rel=1e-6)
        assert figures["adora/staleness_max"] == max(ages)
        assert figures["adora/rollout_budget"] == 60
    assert run.figures[5]["adora/unfinished"] > 0
    assert run.figures[-1]["adora/unfinished"] == 0


def test_how_many_begin_and_have_to_be_complete():
    waits = (
        (0, 0, 9),
        (3, 3, 9),
        (3, 0, 1),
        (8, 0, 1),
        (12, 0, 2),
        (9, 4, 9),
        (9, 6, 9),
        (14, 13, 9),
        (12, 6, 2),
    )
    begun = []
    begun_at_least_4 = []
    for waiting, complete, remaining in waits:
        begun.append(how_many_begin(waiting, complete, 8, remaining))
        begun_at_least_4.append(how_many_begin(waiting, complete, 8, remaining, min_begun=4))
    assert begun == [8, 8, 5, 0, 4, 8, 6, 0, 4]
    assert begun_at_least_4 == [8, 8, 5, 4, 4, 8, 6, 4, 4]
    # groups in progress, remaining generations, and how many groups have to be complete now
    for groups, remaining, to_complete in (
        (8, 9, 2),
        (8, 1, 8),
        (11, 2, 3),
        (16, 2, 8),
        (1, 9, 1),
    ):
        assert groups_to_complete(groups, 8, remaining, 2) == to_complete


def test_generations_are_counted_and_named_where_an_epochs_last_step_has_fewer():
    """Else answers would be set aside there for a generation that does not come, and lost; and
    rollouts that are asked for ahead would count as older than they are.
    """
    context = step_context(
        accelerator=Alone(),
        state=TrainerState(max_steps=4),
        num_generations=SIZE,
        per_device_train_batch_size=PLACES * SIZE,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
    )
    three_generations = range(3 * PLACES)  # the rows of an epoch
    generations = GenerationNumbers(context, three_generations, is_numbered=True)
    positions = (
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
    )
    keys = [StepKey(mode="train", step=step, micro=micro) for step, micro in positions]
    ahead = [Generation(key=key, group_size=SIZE) for key in keys]
    assert [generations.left(generation) for generation in ahead] == [6, 5, 4, 3, 2, 1]
    for first, generation in enumerate(ahead):
        later = [generations.after(generation, distance) for distance in range(7 - first)]
        assert later.pop() is None
        for number, following in enumerate(later, start=first):
            assert following is not None
            assert following.key == keys[number]
            assert following.number == number


def test_the_automatic_budget_is_the_length_of_nine_answers_of_ten():
    assert automatic_budget([], 7) is None
    tailed = [
        [*range(1, 50), 180],
        [*range(50, 99), 180],
    ]  # nine of ten had 90 at most
    assert automatic_budget(tailed, 7) == automatic_budget(tailed, 90) == 90
    run = Run(20, budget="auto").go_on()
    budgets = [figures["adora/rollout_budget"] for figures in run.figures]
    lengths = [[len(tokens) for tokens in rollouts_of(generation)] for generation in run.learned]
    expected = [
        automatic_budget(lengths[max(0, step - 4) : step], LONGEST // 5) or LONGEST
        for step in range(20)
    ]
    assert budgets == expected, "of the first generation nothing is known yet"
    assert budgets[0] == LONGEST, "of the first generation nothing is known yet"
    assert sum(budget < LONGEST for budget in budgets) > 5


def test_the_automatic_budget_leaves_answers_whole_where_few_tokens_would_be_saved():
    """Groups that end later are learned from later.

    The demo's workings have 35 to 50 tokens, and its limit is 60.
    """
    assert automatic_budget([[9] * 9 + [60], [45] * 9 + [60]], 12) is None
    tailed = [[9] * 9 + [75], [40] * 9 + [45]]  # the longest are 60 tokens on average
    assert automatic_budget(tailed, 12) == automatic_budget(tailed, 40) == 40
    assert automatic_budget(tailed, 41) is None


def on_two(part: Callable[[int, Any], Any]) -> list[Any]:
    """What `part(rank, accelerator)` returns on two processes that run at once."""
    parts = [None, None]
    meeting = Barrier(2, timeout=60)
    found = [None, None]

    def work(rank: int) -> None:
        found[rank] = part(rank, Together(rank, parts, meeting))

    threads = [Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_processes_learn_from_equally_many_groups():
    """Else they would wait for each other forever, or take others' rewards for their own."""
    first, second = on_two(lambda rank, accelerator: Run(30, accelerator).go_on())
    assert first.sizes == second.sizes
    assert first.figures == second.figures
    assert first.engine.asked[3] != second.engine.asked[3]
    for run in (first, second):
        assert check_learned(run) <= 4
        assert sum(run.sizes[15:]) > 0.85 * 15 * PLACES


def resumed(
    whole: Run, folder: Path, step: int, generations: int | None = None, **keys: Any
) -> Run:
    """A new run that goes on from the checkpoint in `folder`.

    `generations`: of the training, if not as before.
    """
    run = Run(generations or whole.state.max_steps, **keys)
    run.state.global_step = step
    run.pool.load(folder)
    return run


def test_a_run_that_is_to_end_earlier_says_once_what_it_cannot_learn_from(tmp_path, capsys):
    """With the steps that it names it learns from all of them, and says nothing."""
    run = Run(12, budget=20).go_on(until=5)
    run.pool.save(tmp_path)
    waiting = len(run.pool.state.waiting)
    assert 2 * PLACES < waiting <= 4 * PLACES, "one generation has no room for them, and four have"
    shorter = resumed(run, tmp_path, 5, 7, budget=20).go_on()
    line = capsys.readouterr().err
    assert line.startswith(
        f"max_steps: 7 ends the run before {waiting - 2 * PLACES} of the {waiting} groups"
    )
    assert line.count("\n") == 1
    assert len(shorter.pool.state.waiting) == waiting - 2 * PLACES
    enough = int(line.split("; ")[1].split()[0])
    longer = resumed(run, tmp_path, 5, enough, budget=20).go_on()
    assert not longer.pool.state.waiting
    assert capsys.readouterr().err == ""


def test_another_number_of_processes_cannot_go_on(tmp_path):
    run = Run(12).go_on(until=5)
    run.pool.save(tmp_path)

    def load(rank: int, accelerator: Any) -> str:
        with pytest.raises(UserError) as refused:
            Run(12, accelerator).pool.load(tmp_path)
        return str(refused.value)

    for line in on_two(load):
        assert "has unfinished rollouts (adora_rollouts.budget) of 1 processes, now 2" in line
        assert "\n" not in line


def test_where_nothing_is_unfinished_other_processes_go_on_with_problems_of_their_own(tmp_path):
    run = Run(30).go_on()
    assert run.pool.state.drawn
    assert not run.pool.state.waiting
    run.pool.save(tmp_path)

    def longer(rank: int, accelerator: Any) -> list[str]:
        again = resumed(run, tmp_path, 30, 33, accelerator=accelerator).go_on()
        return [problem for problem, _ in again.answers[::SIZE]]

    for rank, problems in enumerate(on_two(longer)):
        assert sorted(problems) == [
            f"{rank}/{number}" for number in range(30 * PLACES, 30 * PLACES + len(problems))
        ]


def test_a_checkpoint_of_a_run_without_a_budget_has_nothing_to_restore(tmp_path):
    assert resumed(Run(3), tmp_path, 0).go_on().sizes[-1] == PLACES


def test_what_tools_wrote_into_an_answer_is_told_from_what_the_policy_said(tmp_path):
    """A tool's answer is a span without log-probabilities, also after a checkpoint; it counts for
    no seed. A picture is written once.
    """
    spans = (
        Segment(tokens=(5, 6), logps=(-0.5, None), step=3),
        Segment(tokens=(9, 9, 9), logps=None, step=3),
        Segment(tokens=(7,), logps=(-0.25,), step=4),
    )
    image = as_kept_image(Image.effect_noise((40, 30), 50).convert("RGB"))
    picture = Picture(digest=image.digest, image=image, span=1)
    call = Call(
        name="zoom",
        arguments="{}",
        text="<image>",
        seconds=0.5,
        failed=False,
        span=1,
    )
    done = Rollout(
        segments=spans, finish_reason=FinishReason.STOP, pictures=(picture,), calls=(call,)
    )
    group = RolloutGroup(
        problem=DrawnProblem(row_number=2, key=StepKey(mode="train", step=3, micro=0), slot=1),
        row=Row(),
        began=3,
        rollouts=(
            done,
            replace(done, segments=spans[:2], finish_reason=FinishReason.RUNNING),
        ),
    )
    PoolState(waiting=(group,)).save(tmp_path, 0)
    (again,) = PoolState.load(tmp_path, 0, 1).waiting
    assert again == group
    assert not again.complete
    whole, part = again.rollouts
    assert whole.pictures[0].image is part.pictures[0].image
    assert content_digest(whole.pictures[0].image) == image.digest
    assert whole.tokens == [5, 6, 9, 9, 9, 7]
    assert whole.policy_mask == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert (whole.policy_tokens, whole.last_turn_tokens, part.last_turn_tokens) == (
        [5, 6, 7],
        [7],
        [],
    )
    assert whole.logps == [-0.5, None, None, None, None, -0.25]
    assert (
        whole.stale_tokens(4),
        part.stale_tokens(3),
    ) == (5, 0)
    assert again.seed(7, 1, part) == rollout_seed(7, "train/3/0/segment-1", 1, 1)


@pytest.mark.parametrize(
    ("budget", "refill", "live"),
    [(None, 4, 0.3), (None, 2, 0.0), (60, 4, 0.3), (None, 0, 0.3), (None, 2, 0.75)],
)
def test_groups_without_signal_are_replaced_by_those_of_further_problems(budget, refill, live):
    """Until all have signal, or the tries are over; with a budget too, where those that have not
    ended go on later. A round has half as many again as are likely to be enough.
    """

    def has_signal(number: int, rank: int = 0) -> bool:
        return random.Random(number).random() < live

    run = Run(3, budget=budget, refill=refill, has_signal=has_signal)
    generation = run.sampled()
    numbers = generation.batch["prompt_ids"][::SIZE, 0].tolist()
    rounds = len(run.engine.asked) - 1
    places = {
        one.group.key.name for asks in run.engine.asked for one in asks if len(one.prompt_ids) == 1
    }
    assert {
        f"train/0/0/{attempt}" for attempt in range(1, rounds + 1 if budget is None else 2)
    } <= places or not refill
    if budget:
        assert run.pool.state.waiting
        assert rounds >= 1
        assert {*numbers} - {*range(PLACES)}, "of a further problem that has ended already"
    elif live and refill:
        assert all(map(has_signal, numbers))
        assert len(numbers) == PLACES
        assert run.log["adora/refilled_groups"] > 0
        assert rounds < refill + 1
        signal = [*map(has_signal, range(PLACES))].count(True)
        first = min(PLACES, math.ceil(1.5 * (PLACES - signal) * PLACES / signal))
        assert len(run.engine.asked[1]) == first * SIZE
        assert live < 0.5 or first < PLACES
        drawn_first = further_rows(len(run.pool.rows), first, "7/0/0/1/0")
        assert {*numbers} & {*drawn_first}
        assert [row["id"] for row in generation.rows[::SIZE]] == [
            f"0/{number}" for number in numbers
        ]
    else:
        assert numbers == list(range(PLACES))
        assert rounds == refill
        assert run.log.get("adora/refilled_groups", 0) == 0


def test_processes_that_lack_different_numbers_of_groups_ask_for_equally_many_further_ones():
    def part(rank: int, accelerator: Any) -> tuple[list[int], list[float]]:
        def has_signal(number: int, rank: int) -> bool:
            return random.Random(number).random() < 0.9 - 0.5 * rank

        run = Run(
            5,
            accelerator,
            budget=None,
            refill=3,
            has_signal=has_signal,
        )
        run.go_on()
        shares = [figures["adora/refilled_groups"] for figures in run.figures]
        return [len(asks) for asks in run.engine.asked], shares

    first_rank, second_rank = on_two(part)
    assert first_rank == second_rank, "the share of replaced groups is that of all processes"
    request_counts, shares = first_rank
    assert len({*request_counts}) > 2
    assert max(shares) > 0
