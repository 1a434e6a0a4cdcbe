"""With weights of 1 ADORA's step is stock GRPO's: losses, gradients and advantages to the bit, on
the same rollouts.
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
from adora_vl.record.recorder import MetricsLogger
from adora_vl.rewards import reward_function
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.synthetic.generate import generate
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.rollout_facts import RolloutFacts
from tests.support.parity import Gradients, training_data_set

pytestmark = [pytest.mark.slow, pytest.mark.core]


def reward_with_a_constant_group(
    completions: list[Any], answer: list[str], **columns: Any
) -> list[float]:
    """Return the preset, but for the batch's first two groups, whatever the tiny model says.

    The first group is boxed and wrong throughout: stock TRL's mean of 0.1 is not exact. Of the
    second, two rollouts are right: it has signal, and an easy problem's pass rate.
    """
    graded: list[float] = reward_function("adora")(
        completions=completions, answer=answer, **columns
    )
    return [0.1] * 8 + [1.0] * 2 + graded[10:]


def two_steps(trainer_class: type, tmp_path: Any, **settings: Any) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches with `transformers` generation; everything is
    decided by the seed.
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

    class Recorded(trainer_class):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            batches.append({key: output[key].clone() for key in ("completion_ids", "advantages")})
            return output

    gradients = Gradients()
    trainer = Recorded(
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
        "facts": trainer._facts() if hasattr(trainer, "_facts") else {},
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    result = two_steps(GRPOTrainer, tmp_path_factory.mktemp("stock"))
    assert any(batch["advantages"].any() for batch in result["batches"]), "no group had any signal"
    return result


def assert_same(ours, stock):
    assert ours["losses"] == stock["losses"]
    for our_batch, stock_batch in zip(ours["batches"], stock["batches"], strict=True):
        assert torch.equal(our_batch["completion_ids"], stock_batch["completion_ids"])
        assert torch.equal(our_batch["advantages"], stock_batch["advantages"])
    assert len(ours["gradients"]) == len(stock["gradients"]) == len(stock["losses"])
    for our_step, stock_step in zip(ours["gradients"], stock["gradients"], strict=True):
        assert our_step.keys() == stock_step.keys()
        assert all(torch.equal(our_step[name], stock_step[name]) for name in stock_step)


@pytest.mark.parametrize(
    "settings",
    [{"adora_method": {"adora": {"mode": "off"}}}, {"adora_method": "grpo"}],
    ids=["off", "method"],
)
def test_with_weights_of_one_the_step_is_stock_grpo(tmp_path, stock, settings):
    assert_same(two_steps(AdoraGRPOTrainer, tmp_path, **settings), stock)


# Four optimizer steps a generation, then one of the next; the rate is high enough for ratios to
# leave the clip range.
SEVERAL = {"steps_per_generation": 8, "max_steps": 5, "learning_rate": 1e-3, "beta": 0.01}


def test_several_steps_a_generation_are_stock_grpos(tmp_path):
    stock = two_steps(GRPOTrainer, tmp_path / "stock", **SEVERAL)
    ours = two_steps(AdoraGRPOTrainer, tmp_path / "ours", adora_method="grpo", **SEVERAL)
    assert len(stock["batches"]) == 2
    assert_same(ours, stock)
    clipped = [
        [entry["clip_ratio/region_mean"] for entry in run["log"] if "loss" in entry]
        for run in (ours, stock)
    ]
    assert clipped[0] == clipped[1]
    assert clipped[0][0] == clipped[0][4] == 0 < max(clipped[0])


def test_attenuation_changes_the_advantages_of_the_marked_groups_only(tmp_path, stock):
    """A factor below 1 shows that the comparison above can fail, and that the trainer uses the pure
    functions.
    """
    ours = two_steps(
        AdoraGRPOTrainer, tmp_path, adora_method={"adora": {"criteria": ["difficulty"], "tau": 0.2}}
    )
    raw = stock["batches"][0]["advantages"].view(-1, 8)
    weighted = ours["batches"][0]["advantages"].view(-1, 8)
    assert torch.equal(ours["batches"][0]["completion_ids"], stock["batches"][0]["completion_ids"])
    assert not torch.equal(raw, weighted)
    has_advantage = raw != 0
    ratios = {round(ratio, 4) for ratio in (weighted / raw)[has_advantage].tolist()}
    assert 0.1 in ratios
    assert ratios <= {
        0.0,
        0.1,
        1.0,
    }  # 0: the rounding noise of the constant group
    assert weighted[0].tolist() == [0.0] * 8
    shares = [entry["adora/tds_share"] for entry in ours["log"] if "adora/tds_share" in entry]
    assert shares[0] > 0


def test_the_trainer_hands_whole_groups_to_the_method_and_its_state_to_the_checkpoint(
    tmp_path, stock, monkeypatch
):
    """The advantages of stock TRL's rollouts are those of the pure functions, step after step."""
    log_scored = MetricsLogger.log_scored
    scores_of_steps = list[RolloutFacts]()

    def noted(log: MetricsLogger, generation: Any, built: Any, scored: Any) -> None:
        scores_of_steps.append(scored.facts)
        log_scored(log, generation, built, scored)

    monkeypatch.setattr(MetricsLogger, "log_scored", noted)
    chosen = {"daro": {}, "adora": {"criteria": ["difficulty"], "tau": 0.2}}
    ours = two_steps(AdoraGRPOTrainer, tmp_path, adora_method=chosen)
    options = Adora(criteria=("difficulty",), tau=Schedule(0.2))
    method = AdvantagePipeline({"daro": Daro(), "adora": options})
    for step, (batch, facts) in enumerate(zip(ours["batches"], scores_of_steps, strict=True)):
        rewards = facts.rewards_NF[:, 0].view(-1, 8)
        lengths = facts.length_N.view(-1, 8)
        groups = Groups(rewards, lengths, lengths >= 26, step=step)
        assert torch.equal(batch["advantages"], method(groups, group_advantages(rewards)).flatten())
    assert ours["facts"]["methods"] == method.state()
    assert torch.equal(ours["batches"][0]["completion_ids"], stock["batches"][0]["completion_ids"])
    assert not torch.equal(ours["batches"][0]["advantages"], stock["batches"][0]["advantages"])
    assert all(f"adora/daro/weight_{n}_of_8" in ours["log"][0] for n in range(1, 8))
