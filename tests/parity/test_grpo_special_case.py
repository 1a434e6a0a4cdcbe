"""With weights of 1 a step with ADORA is stock GRPO's, on the same rollouts.

Losses, gradients and advantages are equal to the bit.
"""

from typing import Any, get_args

import pytest
import torch
from trl import GRPOTrainer

from adora_vl.advantage import AdvantagePipeline, Groups, Schedule, group_advantages
from adora_vl.advantage.adora import Adora
from adora_vl.advantage.daro import Daro
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.keys import StepPart
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.record.metrics_logger import MetricsLogger
from adora_vl.rewards import reward_function
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.synthetic.generate import generate
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.rollout_facts import RolloutFacts
from tests.support.parity import GradientRecorder, training_data_set
from tests.support.reward_groups import final_advantages

pytestmark = [pytest.mark.slow, pytest.mark.core]


def reward_with_a_constant_group(
    completions: list[Any], answer: list[str], **columns: Any
) -> list[float]:
    """Return the preset, but for the batch's first two groups, whatever the tiny model says.

    The first group is boxed and wrong throughout: stock TRL's mean of 0.1 is not exact. Of the
    second, two rollouts are right: it has signal, and an easy problem's pass rate.
    """
    graded: list[float] = reward_function("boxed_accuracy")(
        completions=completions, answer=answer, **columns
    )
    return [0.1] * 8 + [1.0] * 2 + graded[10:]


def train_two_steps(trainer_class: type, tmp_path: Any, **settings: Any) -> dict[str, Any]:
    """Train two steps of two micro-batches that Transformers samples for, by the seed alone.

    `settings`: keys of the config. Returns losses, gradients, batches and the log.
    """
    processor = load_processor(str(PRETRAINED_FOLDER))
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "max_completion_length": 28,
        "max_steps": 2,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 2,
        # what ours adds by itself, so that the same tokens are sampled
        "generation_kwargs": {"suppress_tokens": never_sampled_ids(processor.tokenizer)},
        "adora_stock_step": [part for part in get_args(StepPart) if part != "seeded_rollouts"],
    }
    args = AdoraGRPOConfig(**{**defaults, **settings})
    batches: list[dict[str, Any]] = []

    class RecordedTrainer(trainer_class):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            batches.append({key: output[key].clone() for key in ("completion_ids", "advantages")})
            return output

    gradients = GradientRecorder()
    trainer = RecordedTrainer(
        model=str(PRETRAINED_FOLDER),
        reward_funcs=reward_with_a_constant_group,
        args=args,
        train_dataset=training_data_set(list(generate(16, seed=6))),
        processing_class=processor,
        callbacks=[gradients],
    )
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "gradients": gradients.steps,
        "batches": batches,
        "log": trainer.state.log_history,
        "facts": trainer._metadata() if hasattr(trainer, "_metadata") else {},
    }


@pytest.fixture(scope="module")
def stock_result(tmp_path_factory):
    """Train two steps with stock TRL."""
    result = train_two_steps(GRPOTrainer, tmp_path_factory.mktemp("stock"))
    assert any(batch["advantages"].any() for batch in result["batches"]), "no group had any signal"
    return result


def assert_same_steps(ours, stock_result):
    """Assert that two runs have the same losses, rollouts, advantages and gradients, to the bit."""
    assert ours["losses"] == stock_result["losses"]
    for our_batch, stock_batch in zip(ours["batches"], stock_result["batches"], strict=True):
        assert torch.equal(our_batch["completion_ids"], stock_batch["completion_ids"])
        assert torch.equal(our_batch["advantages"], stock_batch["advantages"])
    assert len(ours["gradients"]) == len(stock_result["gradients"]) == len(stock_result["losses"])
    for our_step, stock_step in zip(ours["gradients"], stock_result["gradients"], strict=True):
        assert our_step.keys() == stock_step.keys()
        assert all(torch.equal(our_step[name], stock_step[name]) for name in stock_step)


@pytest.mark.parametrize(
    "settings",
    [{"adora_method": {"adora": {"mode": "off"}}}, {"adora_method": "grpo"}],
    ids=["off", "method"],
)
def test_with_weights_of_one_the_step_is_stock_grpo(tmp_path, stock_result, settings):
    """ADORA with mode "off", and the method "grpo", change nothing of stock TRL's two steps."""
    assert_same_steps(train_two_steps(AdoraGRPOTrainer, tmp_path, **settings), stock_result)


# Four optimizer steps a generation, then one of the next; the rate is high enough for ratios to
# leave the clip range.
FOUR_STEPS_A_GENERATION = {
    "steps_per_generation": 8,
    "max_steps": 5,
    "learning_rate": 1e-3,
    "beta": 0.01,
}


def test_several_steps_a_generation_are_stock_grpos(tmp_path):
    """Four optimizer steps learn from one generation, and the fifth from the next."""
    stock_result = train_two_steps(GRPOTrainer, tmp_path / "stock", **FOUR_STEPS_A_GENERATION)
    ours = train_two_steps(
        AdoraGRPOTrainer, tmp_path / "ours", adora_method="grpo", **FOUR_STEPS_A_GENERATION
    )
    assert len(stock_result["batches"]) == 2
    assert_same_steps(ours, stock_result)
    our_clip_ratios, stock_clip_ratios = [
        [entry["clip_ratio/region_mean"] for entry in run["log"] if "loss" in entry]
        for run in (ours, stock_result)
    ]
    assert our_clip_ratios == stock_clip_ratios
    assert our_clip_ratios[0] == our_clip_ratios[4] == 0, "the first step of a generation"
    assert max(our_clip_ratios) > 0


def test_attenuation_changes_the_advantages_of_the_marked_groups_only(tmp_path, stock_result):
    """Attenuation multiplies the advantages of marked groups by 0.1, and leaves others as TRL's.

    This also shows that the comparison with stock TRL above can fail.
    """
    ours = train_two_steps(
        AdoraGRPOTrainer, tmp_path, adora_method={"adora": {"criteria": ["difficulty"], "tau": 0.2}}
    )
    stock_advantages = stock_result["batches"][0]["advantages"].view(-1, 8)
    our_advantages = ours["batches"][0]["advantages"].view(-1, 8)

    assert torch.equal(
        ours["batches"][0]["completion_ids"], stock_result["batches"][0]["completion_ids"]
    )
    assert not torch.equal(stock_advantages, our_advantages)
    has_advantage = stock_advantages != 0
    ratios_of_groups = (our_advantages / stock_advantages)[has_advantage].tolist()
    ratios = {round(ratio, 4) for ratio in ratios_of_groups}
    assert 0.1 in ratios
    # 0: the rounding noise of the constant group
    assert ratios <= {0.0, 0.1, 1.0}
    assert our_advantages[0].tolist() == [0.0] * 8
    shares = [entry["adora/tds_share"] for entry in ours["log"] if "adora/tds_share" in entry]
    assert shares[0] > 0


def test_the_trainer_hands_whole_groups_to_the_method_and_its_state_to_the_checkpoint(
    tmp_path, stock_result, monkeypatch
):
    """The trainer's advantages are those that the method computes outside of any trainer.

    Recorded rewards and lengths go in, step after step, and DARO's learned state is taken along.
    """
    log_scored = MetricsLogger.log_scored
    facts_of_steps = list[RolloutFacts]()

    def log_and_record(log: MetricsLogger, generation: Any, built: Any, scored: Any) -> None:
        facts_of_steps.append(scored.facts)
        log_scored(log, generation, built, scored)

    monkeypatch.setattr(MetricsLogger, "log_scored", log_and_record)
    method_options = {"daro": {}, "adora": {"criteria": ["difficulty"], "tau": 0.2}}
    ours = train_two_steps(AdoraGRPOTrainer, tmp_path, adora_method=method_options)
    options = Adora(criteria=("difficulty",), tau=Schedule(start=0.2))
    method = AdvantagePipeline({"daro": Daro(), "adora": options})
    for step, (batch, facts) in enumerate(zip(ours["batches"], facts_of_steps, strict=True)):
        rewards = facts.rewards_NF[:, 0].view(-1, 8)
        lengths = facts.length_N.view(-1, 8)
        # an answer is truncated from two tokens below the limit of 28 on
        groups = Groups(rewards, lengths, lengths >= 26, step=step)
        assert torch.equal(
            batch["advantages"],
            final_advantages(method, groups, group_advantages(rewards)).flatten(),
        )
    assert ours["facts"]["methods"] == method.state()
    assert torch.equal(
        ours["batches"][0]["completion_ids"], stock_result["batches"][0]["completion_ids"]
    )
    assert not torch.equal(
        ours["batches"][0]["advantages"], stock_result["batches"][0]["advantages"]
    )
    assert all(f"adora/daro/weight_{n}_of_8" in ours["log"][0] for n in range(1, 8))
