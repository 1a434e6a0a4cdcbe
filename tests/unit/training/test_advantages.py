"""The advantages of a generation.

The tests follow them from the scores of rollouts to all that gets them: TRL's table of completions,
the log, the record of rollouts, and the loss.
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
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.packing.prompts import PromptBatch
from adora_vl.record.rollout_metrics import assessment_metrics, learned_metrics
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
from adora_vl.training.generation import Generation, ScoredGroups, UnscoredGroups
from adora_vl.training.guards import RewardGuard
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.refill import Refill
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.training.schedule import fill_slots
from adora_vl.training.scoring import FunctionScores, Scorer, surprisal
from adora_vl.types import Row
from tests.support.examples import load_example
from tests.support.facts import rollout_facts
from tests.support.step_context import step_context
from tests.support.tiny_run import TINY_RUN_STEPS, train_tiny_run

END_TOKEN = 2
PAD_TOKEN = 0


def test_the_facts_of_rollouts_are_gathered_in_one_call():
    """Lengths, ends, words of reflection and what reward functions logged cost one gather.

    The four rollouts have 3, 2, 0 and 2 tokens. Two of them were cut off: the second has no end
    token, and the fourth has one that is not its last. "Wait" and "verify" are such words.
    """
    gathered_tensors = []

    def gather(tensor):
        """Record what is gathered; the other rank has nothing."""
        gathered_tensors.append(tensor)
        return tensor

    context = step_context(
        accelerator=SimpleNamespace(device="cpu", gather=gather, num_processes=2)
    )
    completions = [[5, 6, END_TOKEN], [5, 6], [], [END_TOKEN, 5]]
    texts = ["Wait, wait.", "no", "", "I verify"]
    stop_criteria = StopCriteria(frozenset({END_TOKEN, PAD_TOKEN}))
    ended_by_itself = [
        stop_criteria.has_stopped(ids, text) for ids, text in zip(completions, texts, strict=True)
    ]
    rollouts = [
        Rollout(
            segments=(Segment(tokens=tuple(ids), logps=(-0.5,) * len(ids), step=0),),
            finish_reason=FinishReason.STOP,
        )
        for ids in completions
    ]
    problem = DrawnProblem(row_number=0, key=StepKey(mode="train", step=0, micro=0), group_number=0)
    built = UnscoredGroups(
        groups=[
            RolloutGroup(problem=problem, row=Row(), start_generation=0, rollouts=tuple(rollouts))
        ],
        prompts=PromptBatch(messages=[], ids=[[1] * 9] * 4, images=None, fields={}),
        completions=texts,
        completion_texts=texts,
        ended_by_itself=ended_by_itself,
        thinking_opened=[False] * 4,
        batch={"completion_mask": torch.ones(4, 3)},
    )
    scorer = Scorer(
        context, RewardGuard(context), weights_F=torch.ones(1), function_names=["accuracy"]
    )
    scores = FunctionScores(
        rewards_BF=torch.zeros(4, 1),
        extra_columns={"note": [*"abcd"]},
        logged_metrics={"own": [0.5, 1.5]},
    )
    facts = scorer.score(built, scores, group_size=4, step=0)
    assert facts.length_N.tolist() == [3, 2, 0, 2]
    assert facts.has_no_end_N.tolist() == [False, True, False, True]
    assert facts.reflective_words_N.tolist() == [2, 0, 0, 1]
    completion_tokens = 3 + 2 + 0 + 2
    assert facts.reflective_per_1000_tokens == pytest.approx(1000 * 3 / completion_tokens)
    assert facts.tokens == 4 * 9 + completion_tokens, "with four prompts of nine tokens"
    assert facts.extra_columns == {"note": [*"abcd"]}
    assert facts.logged_metrics == {"own": 1.0}, "the mean"
    assert len(gathered_tensors) == 1, (
        "rewards, lengths, ends, words and calls are gathered together"
    )


def test_an_answer_has_ended_where_its_last_token_completes_a_string_to_stop_at(subtests):
    """An answer has ended if its last token is one to stop at, or completes the first stop string.

    An empty one has ended too. The tokens here are characters, with their codes as ids; "!" is a
    token to stop at. A stop string before the last token has not ended the answer: vLLM ignores it
    there where `min_tokens` is set. A second one at the end does not count either.
    """
    stop_criteria = StopCriteria.from_config(
        {0}, {"stop": "</a>", "stop_token_ids": [ord("!")]}, lambda ids: "".join(map(chr, ids))
    )
    cases = {
        "so </a>": True,
        "so </a> and on": False,
        "so": False,
        "so!": True,
        "</a> </a>": False,
        "": True,
    }
    for text, has_ended in cases.items():
        with subtests.test(text):
            token_ids = [ord(character) for character in text]
            assert stop_criteria.has_stopped(token_ids, text) is has_ended
    assert StopCriteria.from_config({0}, {"stop": ["x", "y"]}, str).strings == ("x", "y")
    assert StopCriteria.from_config({0}, {}, str).strings == ()


def test_cut_off_answers_are_masked_and_counted_by_how_they_ended_and_not_by_their_last_token(
    tmp_path, monkeypatch
):
    """Loss, record and log agree on which answers were cut off, as `StopCriteria` decides it.

    A stop string, for example, ends an answer without the end-of-turn token. Here answers whose
    last token has an even id have ended, whatever the token is.
    """
    monkeypatch.setattr(StopCriteria, "has_stopped", lambda self, ids, text=None: ids[-1] % 2 == 0)
    learned_batches = record_learned_batches(monkeypatch)
    keys: Any = {"mask_truncated_completions": True, "adora_truncated": "eos"}
    log = train_one_step(tmp_path, **keys).state.log_history[0]
    record = pd.read_parquet(next((tmp_path / "rollouts").glob("*.parquet")))
    is_learned_B = learned_batches[0]["completion_mask"].any(dim=1)

    assert 0 < is_learned_B.sum() < 32, "some of the 32 answers are cut off, and some are not"
    assert (~is_learned_B).tolist() == record["truncated"].tolist()
    assert log["completions/clipped_ratio"] == pytest.approx(record["truncated"].mean())
    lengths_of_ended = record["length"][~record["truncated"]]
    assert log["completions/mean_terminated_length"] == pytest.approx(lengths_of_ended.mean())
    assert learned_batches[0]["num_items_in_batch"] == lengths_of_ended.sum()


def test_the_generation_config_of_the_model_does_not_change_how_rollouts_are_sampled(
    tmp_path, monkeypatch
):
    """Rollouts are sampled without the `min_p` of the model's `generation_config.json`.

    Without vLLM, Transformers would fill in from that file what no key of the run sets. The model
    that is saved keeps the setting.
    """
    folder = shutil.copytree(PRETRAINED_FOLDER, tmp_path / "model")
    file = folder / "generation_config.json"
    generation_config = json.loads(file.read_text())
    file.write_text(json.dumps({**generation_config, "do_sample": True, "min_p": 0.99}))
    used_min_p = []
    stock_prepare = GenerationMixin._prepare_generation_config

    def prepare_and_record(self: Any, *args: Any, **keywords: Any) -> Any:
        """Call the stock method, and record the `min_p` of the config that it returns."""
        config, *rest = stock_prepare(self, *args, **keywords)
        used_min_p.append(config.min_p)
        return config, *rest

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", prepare_and_record)
    trainer = train_one_step(tmp_path / "run", model=folder)
    assert used_min_p == [None]
    assert trainer.model.generation_config.min_p == 0.99


def test_the_surprisal_of_a_rollout_is_known_of_all_ranks():
    """The surprisal of a rollout is the mean of minus the log-probability over its tokens.

    It is gathered as rewards are. The second of two ranks is fake: all of its numbers are one less
    than those of this rank.
    """
    two_ranks: Any = SimpleNamespace(
        num_processes=2, device="cpu", gather=lambda rows: torch.cat([rows, rows - 1])
    )
    computer = AdvantageComputer(
        step_context(accelerator=two_ranks), AdvantagePipeline({}), torch.ones(1)
    )
    batch: Any = {
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0], [-2.0, -9.0]]),
    }
    measured = rollout_facts(torch.tensor([[1.0], [0.0]]), surprisal_N=surprisal(batch))
    facts = RolloutFacts.gather_from_ranks(measured, two_ranks)

    assert facts.length_N.tolist() == [0, 0, -1, -1], "this rank's zeros, and one less"
    assert facts.has_no_end_N.dtype == torch.bool
    groups = computer.assess(facts, group_size=2, step=0).groups
    assert groups.surprisal_PG is not None
    assert groups.surprisal_PG.tolist() == [[1.5, 2.0], [0.5, 1.0]]


def test_the_net_claims_that_the_reward_steps_counts_reach_the_groups():
    """Groups and record get net claims from the claims that a reward has logged for each rollout.

    Net claims are a rollout's new true claims less its false ones, and at least 0. The criterion
    "working" compares groups by them. The second problem has no figure, so nothing is counted there
    and its net claims are NaN.
    """
    one_rank = SimpleNamespace(process_index=0, num_processes=1, gather=lambda rows: rows)
    methods = AdvantagePipeline({"adora": Adora(criteria=("working",))})
    computer = AdvantageComputer(step_context(accelerator=one_rank), methods, torch.ones(1))
    # The columns that the reward logs: 3 - 1 = 2 net claims, and 1 - 2, which counts as 0.
    claim_counts = {"new": [3, 1, None, None], "false": [1, 2, None, None]}
    rewards_NF = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    facts = rollout_facts(rewards_NF).with_logged(extra_columns=claim_counts, logged_metrics={})
    assessment = computer.assess(facts, group_size=2, step=0)
    groups = assessment.groups

    assert groups.net_claims_PG is not None
    assert groups.net_claims_PG[0].tolist() == [2.0, 0.0]
    assert groups.net_claims_PG[1].isnan().all()
    assert groups.has_net_claims_P.tolist() == [True, False]
    # Without net claims the second group is compared by length.
    assert assessment.weighting.tas_P.tolist() == [True, False]
    columns = criteria_columns(groups)
    assert columns["work_right"][0] == 2.0
    assert math.isnan(columns["work_right"][2])
    assert columns["work_wrong"][0] == 0.0


def test_a_run_without_the_reward_steps_has_no_net_claims():
    """Without the columns of that reward, groups and record have no net claims to compare by."""
    one_rank = SimpleNamespace(process_index=0, num_processes=1, gather=lambda rows: rows)
    computer = AdvantageComputer(
        step_context(accelerator=one_rank), AdvantagePipeline({}), torch.ones(1)
    )
    facts = rollout_facts(torch.tensor([[1.0], [0.0], [1.0], [0.0]]))
    groups = computer.assess(facts, group_size=2, step=0).groups
    assert groups.net_claims_PG is None
    assert "work_right" not in criteria_columns(groups)


METHOD_CASES: list[tuple[str, Any]] = [(name, METHODS[name]()) for name in METHODS]
METHOD_CASES += [("canon", load_example("canon.py:Canon")()), ("adora", Adora(assign="rate"))]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_of_several_batches_are_weighed_as_if_they_had_been_sampled_in_one(
    scale, aggregation, subtests
):
    """A refilled generation gives what one gives whose eight groups all had signal at once.

    A refill replaces groups of equal rewards, which have no signal. One group of the first batch
    has signal, and seven of the second have. Advantages, metrics and the state that a method such
    as DARO keeps are equal.
    """
    with_signal = [0.5, 0.0, 0.0, 0.0]  # the rewards of a group
    without_signal = [0.5] * 4
    first_batch = [with_signal, *[without_signal] * 7]
    second_batch = [*[with_signal] * 7, without_signal]

    def scored(computer: AdvantageComputer, groups: list[list[float]]) -> ScoredGroups:
        """Return groups with these rewards of two functions, and a batch that numbers the rows."""
        rewards_N = torch.tensor(groups).flatten()
        facts = rollout_facts(
            torch.stack([rewards_N, rewards_N], dim=1),
            length_N=rewards_N * 0 + 7,
            surprisal_N=2 - rewards_N,
        )
        ids = torch.arange(32)[:, None]
        batch: Any = {"prompt_ids": ids, "completion_ids": ids, "prompt_mask": ids * 0 + 1}
        batch |= {"completion_mask": ids * 0 + 1}
        groups_of_four: Any = [SimpleNamespace(rollouts=(None,) * 4)] * 8
        assessment = computer.assess(facts, group_size=4, step=0)
        return ScoredGroups(
            groups=groups_of_four,
            batch=batch,
            facts=facts,
            assessment=assessment,
        )

    for name, options in METHOD_CASES:
        with subtests.test(f"{name} {options}"):
            sums_rewards = aggregation == "sum_then_normalize"
            context = step_context(
                scale_rewards=scale, num_generations=4, adora_rollouts=RolloutOptions(refill=2)
            )
            # A method may keep a state, so each computer has a pipeline of its own.
            settings: Any = {"scale": scale, "sums_rewards": sums_rewards}
            refilled_pipeline = AdvantagePipeline({name: options}, **settings)
            whole_pipeline = AdvantagePipeline({name: options}, **settings)
            refilled = AdvantageComputer(context, refilled_pipeline, torch.ones(2))
            whole = AdvantageComputer(context, whole_pipeline, torch.ones(2))
            batch = scored(refilled, first_batch)
            refill = scored(refilled, second_batch)
            # The groups of the refill have the numbers 8 to 15, and rows 0 to 31 as the batch's.
            chosen = fill_slots(
                batch.assessment.has_signal_P.tolist(),
                refill.assessment.has_signal_P.tolist(),
                slots=8,
            )
            no_part: Any = None
            replacement = Refill(
                context=context,
                pool=no_part,
                generation_sampler=no_part,
                advantage_computer=refilled,
            )
            generation = Generation(key=StepKey(mode="train", step=0, micro=0), group_size=4)
            joined = replacement.take_chosen_groups(
                generation, batch, refill, chosen_by_rank=[chosen]
            )
            first_rows = torch.tensor([group % 8 for group in chosen]).repeat_interleave(4) * 4
            rows = first_rows + torch.arange(4).repeat(8)
            assert torch.equal(joined.batch["prompt_ids"][:, 0], rows)
            learned = refilled.compute(joined.assessment)
            expected = whole.compute(scored(whole, [with_signal] * 8).assessment)
            assert torch.equal(learned.final_PG, expected.final_PG)
            assert expected.final_PG.any()
            assert refilled_pipeline.state() == whole_pipeline.state()
            assert learned.metrics == expected.metrics


def test_advantages_before_the_methods_are_trls_to_the_bit(tmp_path, subtests, monkeypatch):
    """Assessment and loss start from the same advantages of TRL, however rewards are scaled.

    Advantages are computed twice: when groups are assessed (`AdvantageComputer.assess`), and after
    a refill for the loss (`compute`).
    """
    assessments = list[GroupAssessment]()
    final_advantages = list[Advantages]()
    stock_compute = AdvantageComputer.compute
    stock_assess = AdvantageComputer.assess

    def assess_and_record(self: Any, *args: Any) -> GroupAssessment:
        assessments.append(stock_assess(self, *args))
        return assessments[-1]

    def compute_and_record(self: Any, *args: Any) -> Advantages:
        final_advantages.append(stock_compute(self, *args))
        return final_advantages[-1]

    monkeypatch.setattr(AdvantageComputer, "assess", assess_and_record)
    monkeypatch.setattr(AdvantageComputer, "compute", compute_and_record)
    for scale, aggregation in product(
        ("group", "batch", "none"), ("sum_then_normalize", "normalize_then_sum")
    ):
        with subtests.test(f"{scale} {aggregation}"):
            train_one_step(
                tmp_path,
                scale_rewards=scale,
                multi_objective_aggregation=aggregation,
                adora_method="grpo",
            )
            trl_advantages_PG = final_advantages[-1].assessment.trl_advantages_PG
            assert torch.equal(trl_advantages_PG, assessments[-1].trl_advantages_PG)
            assert trl_advantages_PG.any()


def test_a_refilled_generation_reaches_the_loss_the_record_and_the_log_as_it_is_learned_from(
    tmp_path, monkeypatch
):
    """Loss, record and log agree on the advantages of a generation in which groups were replaced.

    Every fourth problem has signal, so 1 to 3 of 8 groups have it before the refill. DAPO gives all
    groups with signal the same weight.
    """
    learned_batches = record_learned_batches(monkeypatch)
    # DAPO would mask out answers that are cut off at the run's limit of 4 tokens.
    method: Any = {"adora_method": {"dapo": {"keep_settings": ["mask_truncated_completions"]}}}
    trainer = train_one_step(
        tmp_path, signal_every=4, adora_rollouts=RolloutOptions(refill=2), **method
    )
    (batch,) = learned_batches
    largest_P = batch["advantages"].view(8, 4).amax(dim=1)

    assert largest_P.max() == largest_P[largest_P > 0].min(), "all weigh alike"
    assert (largest_P > 0).sum() > 3, "more groups have signal than before the refill"
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    record = pd.read_parquet(next((tmp_path / "rollouts").glob("*.parquet")))
    # The 32 rollouts of the generation, and as many in each of the two rounds of the refill.
    assert len(record) == 32 * (1 + 2), "what was replaced is recorded too"
    recorded_by_number = dict(enumerate(record["advantage"].tolist()))
    learned_by_number = dict(
        zip(batch["rollout_number"].tolist(), batch["advantages"].tolist(), strict=True)
    )
    assert recorded_by_number.items() >= learned_by_number.items()
    replaced_numbers = recorded_by_number.keys() - learned_by_number.keys()
    assert not any(recorded_by_number[number] for number in replaced_numbers)
    assert list(trainer._logs["advantages"]) == record["advantage"].tolist()[-32:]
    log = trainer.state.log_history[0]
    assert log["adora/learned_reward"] > log["reward"], "the reward is that of all rollouts"


def record_learned_batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Patch the trainer, and return a list to which it adds the batch of each generation."""
    learned_batches: list[Any] = []
    stock_split = MicroBatcher.split

    def split_and_record(self: MicroBatcher, batch: Any, key: str) -> Any:
        learned_batches.append(batch)
        return stock_split(self, batch, key)

    monkeypatch.setattr(MicroBatcher, "split", split_and_record)
    return learned_batches


def train_one_step(
    folder: Path, *, signal_every: int = 1, model: Path = PRETRAINED_FOLDER, **keys: Any
) -> AdoraGRPOTrainer:
    """Train a tiny model for one step of 8 groups of 4 rollouts, on texts.

    Args:
        folder: the `output_dir`.
        signal_every: 4: in every fourth problem the first reward function calls one of four
            rollouts right, so that the group has signal. With 1 that is so in every problem, and
            the second function gives rewards too.
        model: the folder of the model.
        keys: further training arguments.
    """
    problems = [
        {
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "has_signal": number % signal_every == 0,
        }
        for number in range(64)
    ]

    def first_is_right(completions: Any, has_signal: list[bool], **columns: Any) -> list[float]:
        """Reward the first rollout of each group that is to have signal."""
        return [float(useful and row % 4 == 0) for row, useful in enumerate(has_signal)]

    def by_row(completions: Any, **columns: Any) -> list[Any]:
        """Reward rollouts by their row, except those of the third group.

        Where only some groups are to have signal, it rewards none.
        """
        rewards: list[Any] = []
        for row in range(len(completions)):
            is_scored = signal_every == 1 and row // 4 != 2
            rewards.append(row % 7 / 10 if is_scored else None)
        return rewards

    trainer = AdoraGRPOTrainer(
        str(model),
        [first_is_right, by_row],
        train_dataset=Dataset.from_list(problems),
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
    trainer.train()
    return trainer


def advantages_of_two_groups() -> Advantages:
    """Return advantages of two groups of two rollouts.

    The first group has a right and a wrong answer, the second two wrong ones.
    """
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
        final_PG=trl_advantages_PG * weighting.weights_P[:, None],
        metrics={"own": 3.0},
    )


def test_the_table_shows_what_each_function_said_and_advantages_of_trl_and_of_the_loss():
    """TRL prints a table of completions, which gets columns of ours: rewards, weights, verdicts.

    The table keeps the newest rows, here three of four. These rollouts have left their groups
    (`counted_rewards_NF` is NaN). The table shows all the same what the reward functions said.
    """
    facts = rollout_facts(
        torch.tensor([[1.0], [0.0], [0.25], [0.0]]),
        counted_rewards_NF=torch.full((4, 1), torch.nan),
        extra_columns={"verdict": [*"abcd"]},
    )
    built: Any = SimpleNamespace(
        prompts=SimpleNamespace(messages=["a problem"] * 4), completions=[*"wxyz"]
    )
    for max_rows, is_training in ((4, False), (3, True)):
        column: Any = partial(deque, maxlen=max_rows)
        # TRL's own container of the table: a deque for each column.
        table: Any = {name: column() for name in ("prompt", "completion", "images", "advantages")}
        table |= {name: defaultdict(column) for name in ("extra", "rewards")}
        advantages = advantages_of_two_groups()
        trl_advantages = advantages.assessment.trl_advantages_PG.flatten().tolist()
        scored: Any = SimpleNamespace(facts=facts, assessment=advantages.assessment)
        add_rows(table, built, scored, [], ["accuracy"], is_training=is_training)
        # In a training the final advantages are filled in later.
        shown_advantages = [0.0] * 4 if is_training else trl_advantages
        weights = advantages.assessment.weighting.weights_P.repeat_interleave(2).tolist()
        assert list(table["advantages"]) == shown_advantages[-max_rows:]
        assert list(table["extra"]["advantage_raw"]) == trl_advantages[-max_rows:]
        assert list(table["extra"]["adora_length"]) == [10, 20, 30, 40][-max_rows:]
        assert list(table["extra"]["adora_weight"]) == weights[-max_rows:]
        assert list(table["extra"]["verdict"]) == [*"abcd"][-max_rows:]
        assert list(table["completion"]) == [*"wxyz"][-max_rows:]
        assert list(table["rewards"]["accuracy"]) == [1.0, 0.0, 0.25, 0.0][-max_rows:]


def test_the_log_has_the_metrics_of_adora_and_of_the_method():
    """The log has ADORA's metrics of all rollouts and the method's own, here `adora/own`.

    One of four rollouts is right; two have a word of reflection, in 100 tokens of all four.
    """
    lengths_B = torch.tensor([10.0, 20.0, 30.0, 40.0])
    facts = rollout_facts(
        torch.zeros(4, 1), length_N=lengths_B, reflective_words_N=torch.tensor([0.0, 1.0, 0.0, 1.0])
    )
    advantages = advantages_of_two_groups()
    assert learned_metrics(advantages) == {"adora/learned_reward": 0.25, "adora/own": 3.0}
    metrics = assessment_metrics(advantages.assessment, facts, ["accuracy"])
    assert metrics["adora/reflective_per_1000_tokens"] == 20.0
    assert metrics["adora/pass_rate"] == 0.25
    assert metrics["rewards/missing"] == 0.0
    assert metrics["completions/max_length"] == 40.0


@dataclass(frozen=True)
class RecordedRun:
    """A run's record of its rollouts, and the advantages that its loss got."""

    rollouts: pd.DataFrame  # in the order in which they were sampled
    loss_advantages: dict[tuple[int, int], float]  # by step and number of the rollout in it


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """Run the real training command, and record the advantage of every row that the loss gets."""
    loss_advantages: dict[tuple[int, int], float] = {}
    stock_loss = AdoraGRPOTrainer._compute_loss

    def record_and_compute(self: AdoraGRPOTrainer, model: Any, inputs: Any) -> Any:
        numbers = inputs["rollout_number"].tolist()
        advantages = inputs["advantages"].tolist()
        step = self.state.global_step + 1
        for number, advantage in zip(numbers, advantages, strict=True):
            loss_advantages[step, number] = advantage
        return stock_loss(self, model, inputs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(AdoraGRPOTrainer, "_compute_loss", record_and_compute)
        # With this criterion groups with right and wrong answers are attenuated too.
        criteria = {"adora_method": "{adora: {criteria: [difficulty], tau: 0.25}}"}
        folder: Path = train_tiny_run(
            tmp_path_factory.mktemp("recorded") / "run", save_strategy="no", **criteria
        )
    rollouts = pd.read_parquet(folder / "rollouts").sort_values(["step", "group", "rollout"])
    yield RecordedRun(rollouts.reset_index(drop=True), loss_advantages)


@pytest.mark.slow
@pytest.mark.core
def test_a_recorded_advantage_is_the_raw_one_times_the_recorded_weight(run):
    """`advantage_raw` is TRL's, and `weight` that of ADORA for the rollout's group."""
    rollouts = run.rollouts
    has_signal = rollouts.groupby(["step", "group"])["reward"].transform("nunique") > 1
    product = rollouts["weight"].astype(float) * rollouts["advantage_raw"].astype(float)
    gap = (rollouts["advantage"].astype(float) - product).abs()
    # One product in float32 is right to 6e-8 of itself.
    is_close = gap <= 1e-6 * product.abs()
    assert is_close[has_signal].all()
    advantages_without_signal = rollouts["advantage"][~has_signal]
    assert (advantages_without_signal == 0).all(), "a group of equal rewards teaches nothing"
    # ADORA attenuates a group to the weight 0.1 by default.
    assert set(rollouts["weight"].astype(float).round(4)) == {0.1, 1.0}, (
        "the run has to have weights of both kinds"
    )


@pytest.mark.slow
@pytest.mark.core
def test_a_recorded_advantage_is_the_one_that_the_loss_got(run):
    """The record has the advantages that the loss got, and 0 for rollouts that it did not get.

    The loss does not get groups without signal.
    """
    rollouts = run.rollouts
    assert set(rollouts["step"]) == set(range(1, TINY_RUN_STEPS + 1))
    numbers = rollouts.groupby("step").cumcount()
    # By step and number of the rollout in it.
    recorded_advantages = {
        (step, number): advantage
        for step, number, advantage in zip(
            rollouts["step"], numbers, rollouts["advantage"], strict=True
        )
    }
    assert run.loss_advantages
    assert recorded_advantages.items() >= run.loss_advantages.items()
    not_learned = recorded_advantages.keys() - run.loss_advantages.keys()
    assert all(recorded_advantages[rollout] == 0 for rollout in not_learned)
