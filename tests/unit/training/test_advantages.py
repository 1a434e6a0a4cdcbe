"""The advantages of a generation: what grading hands over, and what table, log, record and loss get
from them.
"""

import json
import math
import shutil
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import GenerationMixin

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups
from adora_vl.advantage.adora import Adora, weigh_groups
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.blocks import RolloutOptions
from adora_vl.models.load import PRETRAINED
from adora_vl.packing.prompts import PromptBatch
from adora_vl.record.rollout_figures import assessment_figures, learned_figures
from adora_vl.record.rollouts import criteria_columns
from adora_vl.record.trackers import add_rows
from adora_vl.rollout.rollouts import (
    DrawnProblem,
    FinishReason,
    Rollout,
    RolloutGroup,
    Segment,
    StepKey,
)
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.advantages import AdvantageComputer, Advantages, GroupAssessment
from adora_vl.training.generation import BuiltGroups, ScoredGroups
from adora_vl.training.guards import RewardGuard
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.training.schedule import fill_slots
from adora_vl.training.scoring import FunctionScores, Scorer, surprisal
from adora_vl.types import Row
from tests.support.examples import example
from tests.support.facts import rollout_facts
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train

END = 2
PAD = 0


def test_a_completion_has_ended_where_its_last_token_ends_a_turn():
    calls = []

    def gather(tensor):
        calls.append(tensor)
        return tensor

    context = step_context(
        accelerator=SimpleNamespace(device="cpu", gather=gather, num_processes=2)
    )
    completions = [[5, 6, END], [5, 6], [], [END, 5]]
    texts = ["Wait, wait.", "no", "", "I verify"]
    ended = [
        StopCriteria(frozenset({END, PAD})).ended(*each)
        for each in zip(completions, texts, strict=True)
    ]
    rollouts = [
        Rollout(
            segments=(Segment(tokens=tuple(ids), logps=(-0.5,) * len(ids), step=0),),
            finish_reason=FinishReason.STOP,
        )
        for ids in completions
    ]
    problem = DrawnProblem(row_number=0, key=StepKey(mode="train", step=0, micro=0), slot=0)
    built = BuiltGroups(
        groups=[RolloutGroup(problem=problem, row=Row(), began=0, rollouts=tuple(rollouts))],
        prompts=PromptBatch([], [[1] * 9] * 4, None, {}),
        completions=texts,
        completion_texts=texts,
        ended_by_itself=ended,
        thinking_opened=[False] * 4,
        batch={"completion_mask": torch.ones(4, 3)},
    )
    scorer = Scorer(context, RewardGuard(context), torch.ones(1), ["accuracy"])
    scores = FunctionScores(torch.zeros(4, 1), {"note": [*"abcd"]}, {"own": [0.5, 1.5]})
    facts = scorer.score(built, scores, 4, 0)
    assert facts.length_N.tolist() == [3, 2, 0, 2]
    assert facts.has_no_end_N.tolist() == [False, True, False, True]
    assert facts.reflective_words_N.tolist() == [2, 0, 0, 1]
    assert facts.reflective_per_1000_tokens == pytest.approx(1000 * 3 / 7)
    assert (facts.tokens, facts.extra_columns, facts.logged_metrics) == (
        43,
        {"note": [*"abcd"]},
        {"own": 1.0},
    )
    assert len(calls) == 1, "rewards, lengths, ends, words and calls are gathered together"


def test_an_answer_has_ended_where_its_last_token_completes_a_string_to_stop_at(subtests):
    """Of characters as tokens.

    A string that is there before, as behind vLLM's `min_tokens`, has ended nothing.
    """
    ends = StopCriteria.of(
        {0}, {"stop": "</a>", "stop_token_ids": [33]}, lambda ids: "".join(map(chr, ids))
    )
    cases = {
        "so </a>": True,
        "so </a> and on": False,
        "so": False,
        "so!": True,
        "</a> </a>": False,
        "": True,
    }
    for text, ended in cases.items():
        with subtests.test(text):
            assert ends.ended([ord(one) for one in text], text) is ended
    assert StopCriteria.of({0}, {"stop": ["x", "y"]}, str).strings == ("x", "y")
    assert StopCriteria.of({0}, {}, str).strings == ()


def test_cut_off_answers_are_masked_and_counted_by_how_they_ended_and_not_by_their_last_token(
    tmp_path, monkeypatch
):
    """As where a string ends them, without the end-of-turn token.

    Here answers whose last token is even have ended.
    """
    monkeypatch.setattr(StopCriteria, "ended", lambda self, ids, text: ids[-1] % 2 == 0)
    learned = noted_batches(monkeypatch)
    keys: Any = {"mask_truncated_completions": True, "adora_truncated": "eos"}
    log = run_from_python(tmp_path, **keys).state.log_history[0]
    record = pd.read_parquet(next((tmp_path / "rollouts").glob("*.parquet")))
    mask_B = learned[0]["completion_mask"].any(dim=1)
    assert 0 < mask_B.sum() < 32
    assert (~mask_B).tolist() == record["truncated"].tolist()
    assert log["completions/clipped_ratio"] == pytest.approx(record["truncated"].mean())
    ended = record["length"][~record["truncated"]]
    assert log["completions/mean_terminated_length"] == pytest.approx(ended.mean())
    assert learned[0]["num_items_in_batch"] == ended.sum()


def test_what_the_models_folder_says_of_sampling_stays_out_of_it(tmp_path, monkeypatch):
    """Without vLLM, Transformers fills in what no key says. The model that is saved keeps it."""
    folder = shutil.copytree(PRETRAINED, tmp_path / "model")
    used = []
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True, "min_p": 0.99}))
    prepare = GenerationMixin._prepare_generation_config

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        found = prepare(self, *args, **more)
        used.append(found[0].min_p)
        return found

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", noted)
    trainer = run_from_python(tmp_path / "run", model=folder)
    assert used == [None]
    assert trainer.model.generation_config.min_p == 0.99


def test_how_sure_the_policy_was_is_known_of_the_rollouts_of_all_ranks():
    """As their rewards are: the groups are those of all ranks.

    The other one's are a nat likelier.
    """
    two: Any = SimpleNamespace(
        num_processes=2, device="cpu", gather=lambda own: torch.cat([own, own - 1])
    )
    computer = AdvantageComputer(
        step_context(accelerator=two), AdvantagePipeline({}), torch.ones(1)
    )
    batch: Any = {
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0], [-2.0, -9.0]]),
    }
    measured = rollout_facts(torch.tensor([[1.0], [0.0]]), surprisal_N=surprisal(batch))
    facts = RolloutFacts.gathered(measured, two)
    assert facts.length_N.tolist() == [0, 0, -1, -1]
    assert facts.has_no_end_N.dtype == torch.bool
    groups = computer.assess(facts, 2, 0).groups
    assert groups.surprisal_PG is not None
    assert groups.surprisal_PG.tolist() == [[1.5, 2.0], [0.5, 1.0]]


def test_work_that_the_reward_steps_counts_reaches_the_groups():
    """It is new claims less errors, at least 0, and NaN where a row has no figure."""
    lone = SimpleNamespace(process_index=0, num_processes=1, gather=lambda rows: rows)
    methods = AdvantagePipeline({"adora": Adora(criteria=("working",))})
    computer = AdvantageComputer(step_context(accelerator=lone), methods, torch.ones(1))
    counts = {"new": [3, 1, None, None], "false": [1, 2, None, None]}
    facts = rollout_facts(torch.tensor([[1.0], [0.0], [1.0], [0.0]])).with_logged(counts, {})
    assessment = computer.assess(facts, 2, 0)
    groups = assessment.groups
    assert groups.work_PG is not None
    assert groups.work_PG[0].tolist() == [2.0, 0.0]
    assert groups.work_PG[1].isnan().all()
    assert groups.has_work_P.tolist() == [True, False]
    assert assessment.weighting.tas_P.tolist() == [True, False]  # the second by length
    columns = criteria_columns(groups)
    assert columns["work_right"][0] == 2.0
    assert math.isnan(columns["work_right"][2])
    assert columns["work_wrong"][0] == 0.0


def test_a_run_without_the_reward_steps_has_no_work():
    lone = SimpleNamespace(process_index=0, num_processes=1, gather=lambda rows: rows)
    computer = AdvantageComputer(
        step_context(accelerator=lone), AdvantagePipeline({}), torch.ones(1)
    )
    facts = rollout_facts(torch.tensor([[1.0], [0.0], [1.0], [0.0]]))
    groups = computer.assess(facts, 2, 0).groups
    assert groups.work_PG is None
    assert "work_right" not in criteria_columns(groups)


CASES: list[tuple[str, Any]] = [(name, METHODS[name]()) for name in METHODS]
CASES += [("canon", example("canon.py:Canon")()), ("adora", Adora(assign="rate"))]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_of_several_batches_are_weighed_as_if_they_had_been_sampled_in_one(
    scale, aggregation, subtests
):
    """One of eight groups of the first batch has signal, and seven of the second: in the end each
    weighs the same, and DARO has learned once.
    """
    mixed = [0.5, 0.0, 0.0, 0.0]
    dead = [0.5] * 4
    first = [mixed, *[dead] * 7]
    second = [mixed] * 7 + [dead]

    def scored(computer: AdvantageComputer, groups: list[list[float]]) -> ScoredGroups:
        rewards_N = torch.tensor(groups).flatten()
        facts = rollout_facts(
            torch.stack([rewards_N, rewards_N], dim=1),
            length_N=rewards_N * 0 + 7,
            surprisal_N=2 - rewards_N,
        )
        ids = torch.arange(32)[:, None]
        batch: Any = {"prompt_ids": ids, "completion_ids": ids, "prompt_mask": ids * 0 + 1}
        batch |= {"completion_mask": ids * 0 + 1}
        members: Any = [SimpleNamespace(rollouts=(None,) * 4)] * 8
        assessment = computer.assess(facts, 4, 0)
        return ScoredGroups(
            groups=members,
            batch=batch,
            facts=facts,
            assessment=assessment,
        )

    for name, options in CASES:
        with subtests.test(f"{name} {options}"):
            sums = aggregation == "sum_then_normalize"
            context = step_context(
                scale_rewards=scale, num_generations=4, adora_rollouts=RolloutOptions(refill=2)
            )
            runs = [
                AdvantagePipeline({name: options}, scale=scale, sums_rewards=sums) for _ in range(2)
            ]
            refilled, at_once = (AdvantageComputer(context, run, torch.ones(2)) for run in runs)
            before = scored(refilled, first)
            refill = scored(refilled, second)
            chosen = fill_slots(before.assessment.signal_of(0), refill.assessment.signal_of(0), 8)
            both = before.exchanged(refill, [chosen], pad_id=0, rank=0)
            ids = torch.tensor([number % 8 for number in chosen]).repeat_interleave(4) * 4
            assert torch.equal(both.batch["prompt_ids"][:, 0], ids + torch.arange(4).repeat(8))
            learned = refilled.compute(refilled.assess(both.facts, 4, 0))
            expected = at_once.compute(scored(at_once, [mixed] * 8).assessment)
            assert torch.equal(learned.final_PG, expected.final_PG)
            assert expected.final_PG.any()
            assert runs[0].state() == runs[1].state()
            assert learned.figures == expected.figures


def test_advantages_before_the_methods_are_trls_to_the_bit(tmp_path, subtests, monkeypatch):
    """They are made again of the groups that are learned from; without a refill these are those
    that TRL had.
    """
    assessment = list[GroupAssessment]()
    learned = list[Advantages]()
    compute = AdvantageComputer.compute
    assess = AdvantageComputer.assess

    def noted(self: Any, *args: Any) -> GroupAssessment:
        assessment.append(assess(self, *args))
        return assessment[-1]

    def computed(self: Any, *args: Any) -> Advantages:
        learned.append(compute(self, *args))
        return learned[-1]

    monkeypatch.setattr(AdvantageComputer, "assess", noted)
    monkeypatch.setattr(AdvantageComputer, "compute", computed)
    for scale, how in product(
        ("group", "batch", "none"), ("sum_then_normalize", "normalize_then_sum")
    ):
        with subtests.test(f"{scale} {how}"):
            run_from_python(
                tmp_path, scale_rewards=scale, multi_objective_aggregation=how, adora_method="grpo"
            )
            trl_advantages_PG = learned[-1].assessment.trl_advantages_PG
            assert torch.equal(trl_advantages_PG, assessment[-1].trl_advantages_PG)
            assert trl_advantages_PG.any()


def test_a_refilled_generation_reaches_the_loss_the_record_and_the_log_as_it_is_learned_from(
    tmp_path, monkeypatch
):
    """Every fourth problem is mixed: of 8 groups 1 to 3, until further batches bring more.

    DAPO weighs them alike.
    """
    learned = noted_batches(monkeypatch)
    method: Any = {"adora_method": {"dapo": {"keep_settings": ["mask_truncated_completions"]}}}
    trainer = run_from_python(tmp_path, share=4, adora_rollouts=RolloutOptions(refill=2), **method)
    (batch,) = learned
    largest = batch["advantages"].view(8, 4).amax(dim=1)
    assert largest.max() == largest[largest > 0].min()
    assert (largest > 0).sum() > 3
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    record = pd.read_parquet(next((tmp_path / "rollouts").glob("*.parquet")))
    assert len(record) == 32 * (1 + 2), "what was replaced is recorded too"
    recorded = dict(enumerate(record["advantage"].tolist()))
    loss = dict(zip(batch["rollout_number"].tolist(), batch["advantages"].tolist(), strict=True))
    assert {number: recorded[number] for number in loss} == loss
    assert not any(recorded[number] for number in recorded.keys() - loss.keys())
    assert list(trainer._logs["advantages"]) == record["advantage"].tolist()[-32:]
    log = trainer.state.log_history[0]
    assert log["adora/learned_reward"] > log["reward"], "the reward is that of all rollouts"


def noted_batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets the generations of a run as they are learned from."""
    learned: list[Any] = []
    split = MicroBatcher.split

    def noted(self: MicroBatcher, batch: Any, key: str) -> Any:
        learned.append(batch)
        return split(self, batch, key)

    monkeypatch.setattr(MicroBatcher, "split", noted)
    return learned


def run_from_python(
    folder: Path, *, share: int = 1, model: Path = PRETRAINED, **keys: Any
) -> AdoraGRPOTrainer:
    """One step of 8 groups of texts.

    In every `share`-th problem one rollout of four is right by the first function.
    """
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{number}?"}], "live": number % share == 0}
            for number in range(64)
        ]
    )

    def right(completions: Any, live: list[bool], **columns: Any) -> list[float]:
        return [float(mixed and row % 4 == 0) for row, mixed in enumerate(live)]

    def short(completions: Any, **columns: Any) -> list[Any]:
        return [
            None if share > 1 or row // 4 == 2 else row % 7 / 10 for row in range(len(completions))
        ]

    made = AdoraGRPOTrainer(
        str(model),
        [right, short],
        train_dataset=data,
        args=AdoraGRPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            num_generations=4,
            per_device_train_batch_size=32,
            max_completion_length=4,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            seed=1,
            logging_steps=1,
            **keys,
        ),
    )
    made.train()
    return made


def weighed() -> Advantages:
    """Two groups of two: one with a right and a wrong answer, one that is wrong throughout."""
    groups = Groups(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        truncated_PG=torch.zeros(2, 2, dtype=torch.bool),
        tokens_PG=torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        surprisal_PG=None,
        correct_above=0.5,
        step=0,
    )
    weighting = weigh_groups(replace(groups, truncated_PG=torch.zeros_like(groups.truncated_PG)))
    trl_advantages_PG = torch.tensor([[0.7, -0.7], [0.0, 0.0]])
    assessment = GroupAssessment(
        groups=groups,
        weighting=weighting,
        trl_advantages_PG=trl_advantages_PG,
        has_signal_P=torch.tensor([True, False]),
        equal_reward_share=0.5,
        num_ranks=1,
    )
    return Advantages(
        assessment=assessment,
        weighting=weighting,
        final_PG=trl_advantages_PG * weighting.weights_P[:, None],
        figures={"own": 3.0},
    )


def test_the_table_shows_what_each_function_said_and_advantages_of_trl_and_of_the_loss():
    """It keeps the newest rows, as TRL's does; a rollout that has left its group shows what was
    said of it.
    """
    facts = rollout_facts(
        torch.tensor([[1.0], [0.0], [0.25], [0.0]]),
        counted_rewards_NF=torch.full((4, 1), torch.nan),
        extra_columns={"verdict": [*"abcd"]},
    )
    built: Any = SimpleNamespace(
        prompts=SimpleNamespace(messages=["a problem"] * 4), completions=[*"wxyz"]
    )
    for size in (4, 3):
        column: Any = partial(deque, maxlen=size)
        shown: Any = {name: column() for name in ("prompt", "completion", "images", "advantages")}
        shown |= {name: defaultdict(column) for name in ("extra", "rewards")}
        of_the_loss = weighed()
        trl_advantages_PG = of_the_loss.assessment.trl_advantages_PG
        scored: Any = SimpleNamespace(facts=facts, assessment=of_the_loss.assessment)
        add_rows(shown, built, scored, [], ["accuracy"], is_training=size == 3)
        expected = torch.zeros(4) if size == 3 else trl_advantages_PG.flatten()
        assert list(shown["advantages"]) == expected.tolist()[-size:]
        assert torch.equal(
            torch.tensor(shown["extra"]["advantage_raw"]), trl_advantages_PG.flatten()[-size:]
        )
        assert list(shown["extra"]["adora_length"]) == [10, 20, 30, 40][-size:]
        weights = of_the_loss.weighting.weights_P.repeat_interleave(2).tolist()
        assert list(shown["extra"]["adora_weight"]) == weights[-size:]
        assert list(shown["extra"]["verdict"]) == [*"abcd"][-size:]
        assert list(shown["completion"]) == [*"wxyz"][-size:]
        assert list(shown["rewards"]["accuracy"]) == [1.0, 0.0, 0.25, 0.0][-size:]


def test_the_log_has_the_figures_of_adora_and_of_the_method():
    lengths_B = torch.tensor([10.0, 20.0, 30.0, 40.0])
    facts = rollout_facts(
        torch.zeros(4, 1), length_N=lengths_B, reflective_words_N=torch.tensor([0.0, 1.0, 0.0, 1.0])
    )
    assert learned_figures(weighed()) == {"adora/learned_reward": 0.25, "adora/own": 3.0}
    figures = assessment_figures(weighed().assessment, facts, ["accuracy"])
    assert figures["adora/reflective_per_1000_tokens"] == 20.0
    assert figures["adora/pass_rate"] == 0.25
    assert figures["rewards/missing"] == 0.0
    assert figures["completions/max_length"] == 40.0


@dataclass(frozen=True)
class Recorded:
    rollouts: pd.DataFrame  # in the order in which they were sampled
    of_the_loss: dict[tuple[int, int], float]  # advantage by step and number of the rollout in it


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """The real training command, which notes the advantage of every row that the loss gets."""
    of_the_loss: dict[tuple[int, int], float] = {}
    stock = AdoraGRPOTrainer._compute_loss

    def noted(self: AdoraGRPOTrainer, model: Any, inputs: Any) -> Any:
        numbers = inputs["rollout_number"].tolist()
        advantages = inputs["advantages"].tolist()
        step = self.state.global_step + 1
        of_the_loss.update(
            {
                (step, number): advantage
                for number, advantage in zip(numbers, advantages, strict=True)
            }
        )
        return stock(self, model, inputs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(AdoraGRPOTrainer, "_compute_loss", noted)
        # so that groups with right and wrong answers are attenuated too
        criteria = {"adora_method": "{adora: {criteria: [difficulty], tau: 0.25}}"}
        folder: Path = train(
            tmp_path_factory.mktemp("recorded") / "run", save_strategy="no", **criteria
        )
    rollouts = pd.read_parquet(folder / "rollouts").sort_values(["step", "group", "rollout"])
    yield Recorded(rollouts.reset_index(drop=True), of_the_loss)


@pytest.mark.slow
@pytest.mark.core
def test_a_recorded_advantage_is_the_raw_one_times_the_recorded_weight(run):
    rollouts = run.rollouts
    mixed = rollouts.groupby(["step", "group"])["reward"].transform("nunique") > 1
    product = rollouts["weight"].astype(float) * rollouts["advantage_raw"].astype(float)
    gap = (rollouts["advantage"].astype(float) - product).abs()
    assert (gap <= 1e-6 * product.abs())[
        mixed
    ].all()  # one product in float32 is right to 6e-8 of itself
    assert (rollouts["advantage"][~mixed] == 0).all(), "a group of equal rewards teaches nothing"
    assert set(rollouts["weight"].astype(float).round(4)) == {0.1, 1.0}, (
        "the run has to have weights of both kinds"
    )


@pytest.mark.slow
@pytest.mark.core
def test_a_recorded_advantage_is_the_one_that_the_loss_got(run):
    rollouts = run.rollouts
    assert set(rollouts["step"]) == set(range(1, STEPS + 1))
    numbers = rollouts.groupby("step").cumcount()
    recorded = {
        (step, number): advantage
        for step, number, advantage in zip(
            rollouts["step"], numbers, rollouts["advantage"], strict=True
        )
    }
    assert run.of_the_loss
    assert run.of_the_loss.keys() <= recorded.keys()
    assert {place: recorded[place] for place in run.of_the_loss} == run.of_the_loss
    assert all(recorded[place] == 0 for place in recorded.keys() - run.of_the_loss.keys())
