"""A pass for the old log-probabilities is made only where the loss needs it.

The old log-probabilities are those of the policy that sampled. The loss divides by them, so they
are needed where an earlier optimizer step on the same generation has changed the policy. Stock TRL
makes a pass over the whole generation. Ours leaves most of it out, and has to learn the same. The
tests compare the gradients of all optimizer steps on one generation. The policy is a table of
logits in float64, and the loss is TRL's.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.blocks import RolloutOptions
from adora_vl.training.batch_rows import to_cpu
from adora_vl.training.old_logps import OldLogps
from adora_vl.types import Batch
from adora_vl.utils.errors import RolloutError
from tests.support.stand_ins import FakeAccelerator
from tests.support.step_context import FIRST_GENERATION, step_context
from tests.support.table_policy import (
    TABLE_VOCABULARY,
    LogitsTable,
    TableTrainer,
    table_trainer,
)

COMPLETION_LENGTHS = torch.tensor([2, 9, 3, 7, 9, 1, 5, 6, 8, 8, 4, 9, 7, 2, 6, 5])
ROWS = len(COMPLETION_LENGTHS)
GROUP_SIZE = 2
GROUPS_WITHOUT_SIGNAL = (1, 6)  # numbers of the groups whose advantages are all 0
# An update learns from half of the generation, and each half has one of the groups without signal.
ROLLOUTS_WITH_SIGNAL_PER_UPDATE = (ROWS - len(GROUPS_WITHOUT_SIGNAL) * GROUP_SIZE) // 2
# Gradient descent makes steps so large that the ratios of the second update leave the clip range.
LEARNING_RATE = 4.0
# A generation is cut into four micro-batches of two groups, and an update learns from two of them.
TWO_UPDATE_KEYS: dict[str, Any] = {
    "num_generations": GROUP_SIZE,
    "per_device_train_batch_size": 2 * GROUP_SIZE,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_completion_length": 9,
}
# Each of two updates learns from all four micro-batches.
TWO_ITERATION_KEYS = {**TWO_UPDATE_KEYS, "gradient_accumulation_steps": 4, "num_iterations": 2}
# An update learns from three micro-batches, so it may begin at any of a generation's four.
UNEVEN_UPDATE_KEYS = {**TWO_UPDATE_KEYS, "gradient_accumulation_steps": 3}
ENGINE_KEYS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.2,
    "adora_max_drift": 5.0,
}
# A KL term to the policy as it began. Because of it groups without signal are learned from too.
REFERENCE_KEYS: dict[str, Any] = {"beta": 0.5, "use_bias_correction_kl": False}
# Distances of gradients are relative to their norm. The rounding of float64 makes them about 1e-14.
MAX_RELATIVE_DISTANCE = 1e-9


@dataclass
class GenerationUpdates:
    """The optimizer steps that a trainer has made on one generation: their gradients and passes."""

    trainer: Any
    gradients: list[Tensor] = field(default_factory=list)
    """The gradient of each optimizer step."""

    @property
    def scored_rollouts(self) -> int:
        """The number of rollouts in passes that only compute log-probabilities."""
        return int(self.trainer.model.rows_without_gradient)


def logits_table() -> LogitsTable:
    """Return a new policy, always the same one.

    Its rows share a part, so learning from one rollout changes the probabilities of all.
    """
    return LogitsTable(rows=ROWS, tokens=int(COMPLETION_LENGTHS.max()), shared=0.3)


def make_generation(engine_gap: float = 0.3) -> Batch:
    """Return a generation of 8 groups of 2 rollouts, two of which have no signal.

    `engine_gap`: the standard deviation of the engine's log-probabilities around the policy's.
    """
    mask_BC = (torch.arange(int(COMPLETION_LENGTHS.max())) < COMPLETION_LENGTHS[:, None]).long()
    generator = torch.Generator().manual_seed(5)
    numbers_B = torch.arange(ROWS)
    advantages_B = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    for group in GROUPS_WITHOUT_SIGNAL:
        advantages_B[group * GROUP_SIZE : (group + 1) * GROUP_SIZE] = 0
    ids_BC = torch.randint(TABLE_VOCABULARY, mask_BC.shape, generator=generator) * mask_BC
    with torch.no_grad():
        logps_BC, _ = logits_table().scores(numbers_B, ids_BC)
    gaps_BC = engine_gap * torch.randn(mask_BC.shape, generator=generator, dtype=torch.float64)
    return {
        "prompt_ids": numbers_B[:, None],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": ids_BC,
        "completion_mask": mask_BC,
        "advantages": advantages_B,
        "num_items_in_batch": mask_BC.sum(),
        "rollout_number": numbers_B,
        "sampling_per_token_logps": (logps_BC + gaps_BC) * mask_BC,
    }


def cut_into_micro_batches(trainer: TableTrainer, engine_gap: float) -> list[Batch]:
    """Return the micro-batches of a generation, with all log-probabilities that need a pass.

    These are the passes over the whole generation, if there are any, and then those for the
    micro-batches of later updates.
    """
    batch = make_generation(engine_gap)
    if not trainer.use_vllm:
        del batch["sampling_per_token_logps"]
    generation_logps = trainer.parts.generation_logps
    generation_logps.add_to_generation(batch, "train")
    micro_batches: list[Batch] = trainer.parts.micro_batcher.split(batch, FIRST_GENERATION)
    generation_logps.add_to_later_updates(micro_batches)
    return micro_batches


def descend(policy: LogitsTable) -> Tensor:
    """Make a step of gradient descent, and return the gradient that it took."""
    assert policy.logits.grad is not None
    gradient = policy.logits.grad.clone()
    with torch.no_grad():
        policy.logits.sub_(LEARNING_RATE * gradient)
    policy.logits.grad.zero_()
    return gradient


def learn_from_generation(
    *,
    engine_gap: float = 0.3,
    resumes: bool = False,
    breaks_second_update: bool = False,
    **keys: object,
) -> GenerationUpdates:
    """Make all optimizer steps on a generation, by gradient descent.

    Args:
        engine_gap: as in `make_generation`.
        resumes: whether to go on from a copy of the micro-batches after each step, as a run does
            that resumes from a checkpoint.
        breaks_second_update: whether to take the old log-probabilities from the second step.
        keys: the keys of the run.
    """
    policy = logits_table()
    policy.train()
    trainer = table_trainer(policy, **keys)
    updates = GenerationUpdates(trainer=trainer)
    micro_batches = cut_into_micro_batches(trainer, engine_gap)
    layout = trainer.layout
    for micro_step in range(layout.micro_batches_per_generation):
        trainer._step = micro_step
        ends_step = (micro_step + 1) % layout.gradient_accumulation_steps == 0
        trainer.accelerator.sync_gradients = ends_step
        # With two iterations the micro-batches of the generation are gone through again.
        micro_batch = micro_batches[micro_step % layout.steps_per_generation]
        # A micro-batch is empty where leaving out groups without signal has left it no rollout.
        if micro_batch:
            if breaks_second_update and updates.gradients:
                micro_batch.pop("old_per_token_logps", None)
            trainer._compute_loss(policy, micro_batch).backward()
        if ends_step:
            updates.gradients.append(descend(policy))
            if resumes:
                micro_batches = to_cpu(micro_batches)
    return updates


def rollouts_of_second_update(**keys: object) -> list[int]:
    """Return the numbers of the rollouts that the second optimizer step learns from."""
    trainer = table_trainer(logits_table(), **keys)
    micro_batches = trainer.parts.micro_batcher.split(make_generation(), FIRST_GENERATION)
    later = micro_batches[trainer.layout.micro_batches_before_update :]
    return [row for micro_batch in later for row in micro_batch["rollout_number"].tolist()]


def learn_like_trl(**keys: object) -> GenerationUpdates:
    """Make the same steps after a pass over the whole generation, as stock TRL does.

    `adora_stock_step` names the optimisations to switch off: prompts are not shared, and the pass
    over the whole generation is not skipped.
    """
    settings: dict[str, Any] = {"adora_stock_step": ["share_prompt", "skip_old_pass"]}
    settings |= keys
    return learn_from_generation(**settings)


def relative_distances(ours: GenerationUpdates, theirs: GenerationUpdates) -> list[float]:
    """Return for each step the distance of the two gradients, relative to the norm of `theirs`."""
    assert len(ours.gradients) == len(theirs.gradients)
    distances = []
    for our_gradient, their_gradient in zip(ours.gradients, theirs.gradients, strict=True):
        distances.append(float((our_gradient - their_gradient).norm() / their_gradient.norm()))
    return distances


KEYS_BY_CASE = {
    "two updates": TWO_UPDATE_KEYS,
    "two updates, engine": {**TWO_UPDATE_KEYS, **ENGINE_KEYS},
    "twice over the generation": TWO_ITERATION_KEYS,
    "twice over the generation, engine": {**TWO_ITERATION_KEYS, **ENGINE_KEYS},
    "updates and generations apart": {**UNEVEN_UPDATE_KEYS, **ENGINE_KEYS},
    "two updates, reference": {**TWO_UPDATE_KEYS, **REFERENCE_KEYS},
    "two updates, reference, engine": {**TWO_UPDATE_KEYS, **REFERENCE_KEYS, **ENGINE_KEYS},
    "twice over the generation, reference": {**TWO_ITERATION_KEYS, **REFERENCE_KEYS, **ENGINE_KEYS},
    "two updates, KL corrected": {
        **TWO_UPDATE_KEYS,
        **REFERENCE_KEYS,
        "use_bias_correction_kl": True,
    },
}


@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "vespo"])
def test_each_update_has_the_gradients_of_trl(loss, subtests):
    """The gradients of all optimizer steps on a generation are TRL's, for many keys of a run."""
    for name, keys in KEYS_BY_CASE.items():
        with subtests.test(name):
            ours = learn_from_generation(loss_type=loss, **keys)
            theirs = learn_like_trl(loss_type=loss, **keys)
            assert theirs.scored_rollouts == ROWS
            assert max(relative_distances(ours, theirs)) < MAX_RELATIVE_DISTANCE
            smallest_norm = min(float(gradient.norm()) for gradient in theirs.gradients)
            assert smallest_norm > 1e-3, "gradients of 0 would be equal whatever is learned"


def test_without_the_old_logps_the_second_update_would_learn_something_else():
    """The comparison above can fail: here the second update lacks its old log-probabilities."""
    keys = {"loss_type": "grpo", **TWO_UPDATE_KEYS}
    first, second = relative_distances(
        learn_from_generation(breaks_second_update=True, **keys), learn_like_trl(**keys)
    )
    assert first < MAX_RELATIVE_DISTANCE
    assert second > 1e-3


def test_the_pass_is_over_the_later_updates_rollouts_with_signal_alone():
    """A pass for old log-probabilities is over the later updates' rollouts with signal alone.

    The rollouts of the first update need none, and those without signal have no gradient.
    """
    two_updates = learn_from_generation(loss_type="grpo", **TWO_UPDATE_KEYS)
    assert two_updates.scored_rollouts == ROLLOUTS_WITH_SIGNAL_PER_UPDATE
    with_engine = learn_from_generation(loss_type="grpo", **TWO_UPDATE_KEYS, **ENGINE_KEYS)
    assert with_engine.scored_rollouts == ROLLOUTS_WITH_SIGNAL_PER_UPDATE
    # With two iterations the passes of the first one have the old log-probabilities of the second.
    two_iterations = learn_from_generation(loss_type="grpo", **TWO_ITERATION_KEYS, **ENGINE_KEYS)
    assert two_iterations.scored_rollouts == 0


def test_the_kl_term_asks_no_pass_of_groups_without_signal():
    """Groups without signal, which the KL term learns from, need no old log-probabilities.

    With an advantage of 0 their ratio to the old policy has no effect on the loss.
    """
    keys = {"loss_type": "grpo", **TWO_UPDATE_KEYS, **REFERENCE_KEYS}
    in_later_update = rollouts_of_second_update(**keys)
    without_signal = [row for row in in_later_update if row // GROUP_SIZE in GROUPS_WITHOUT_SIGNAL]
    assert without_signal
    with_signal = len(in_later_update) - len(without_signal)
    assert learn_from_generation(**keys).scored_rollouts == with_signal
    # TRL's corrected KL term multiplies by the ratio, which needs the old log-probabilities.
    corrected = learn_from_generation(**{**keys, "use_bias_correction_kl": True})
    assert corrected.scored_rollouts == len(in_later_update)


def test_where_no_group_of_an_update_has_signal_no_pass_is_made():
    """Without a pass, the old log-probabilities stay unknown (NaN).

    The engine is not compared later either: the weights then are not those that sampled the
    rollouts.
    """
    trainer = table_trainer(
        logits_table(),
        loss_type="grpo",
        **TWO_UPDATE_KEYS,
        **REFERENCE_KEYS,
        **ENGINE_KEYS,
    )
    batch = make_generation()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    micro_batches = trainer.parts.micro_batcher.split(batch, FIRST_GENERATION)
    trainer.parts.generation_logps.add_to_later_updates(micro_batches)

    assert trainer.parts.recorder.measured_rows == []
    for micro_batch in micro_batches[trainer.layout.micro_batches_before_update :]:
        assert micro_batch["old_per_token_logps"].isnan().all()
        assert not trainer.parts.generation_logps.importance_ratio.needs_ratio(micro_batch)


def test_sampling_metrics_are_weighted_by_the_tokens_of_the_rows_with_signal():
    """Metrics that compare a pass with the engine weigh it by the tokens that the pass is over.

    The pass for old log-probabilities leaves out rows without signal. So metrics that compare its
    log-probabilities with the engine's have the tokens of the other rows as their weight. With the
    tokens of the whole micro-batch, the rows that were left out would count too.
    """
    trainer = table_trainer(
        logits_table(), loss_type="grpo", **TWO_UPDATE_KEYS, **REFERENCE_KEYS, **ENGINE_KEYS
    )
    weights_by_figure = defaultdict[str, list[float]](list)

    def keep_weight(name: str, value: float, weight: float) -> None:
        weights_by_figure[name].append(weight)

    generation_logps = trainer.parts.generation_logps
    context = replace(generation_logps.context, log_weighted=keep_weight)
    micro_batches = trainer.parts.micro_batcher.split(make_generation(), FIRST_GENERATION)
    replace(generation_logps, context=context).add_to_later_updates(micro_batches)
    compared_rows = trainer.parts.recorder.measured_rows
    assert len(compared_rows) < ROWS // 2, "some rows of the second update have no signal"
    for name in ("importance_sampling_ratio/mean", "sampling_logp_difference/mean"):
        weights = weights_by_figure[f"sampling/{name}"]
        assert sum(weights) == COMPLETION_LENGTHS[compared_rows].sum()


def test_a_rank_without_signal_makes_the_pass_of_the_others():
    """A rank without signal makes a pass over one group where another rank has signal.

    With sharded weights the other rank would wait for ever if this one left the pass out.
    """

    def with_signal_elsewhere(has_signal: Tensor) -> Tensor:
        """Return this rank's flags, then those of a rank with signal in each micro-batch."""
        return torch.cat([has_signal, torch.ones_like(has_signal)])

    keys = {**TWO_UPDATE_KEYS, **REFERENCE_KEYS}
    context = step_context(accelerator=FakeAccelerator(gather=with_signal_elsewhere), **keys)
    old_logps = OldLogps(context, has_dropout=False)
    trainer = table_trainer(logits_table(), **keys)
    micro_batches = trainer.parts.micro_batcher.split(make_generation(), FIRST_GENERATION)
    for micro_batch in micro_batches:
        micro_batch["advantages"] = torch.zeros_like(micro_batch["advantages"])
    passes = old_logps.passes_to_make(micro_batches)
    # The two micro-batches of the second update get a pass, each over its first group.
    assert [old_pass.rows for old_pass in passes] == [list(range(GROUP_SIZE))] * 2


def test_a_run_that_goes_on_after_the_first_update_does_so_to_the_bit():
    """A checkpoint's micro-batches have the old log-probabilities, so both runs learn the same."""
    for keys in (
        {**TWO_UPDATE_KEYS, **ENGINE_KEYS},
        {**TWO_ITERATION_KEYS, **ENGINE_KEYS},
        {**TWO_UPDATE_KEYS, **REFERENCE_KEYS, **ENGINE_KEYS},
    ):
        uninterrupted = learn_from_generation(loss_type="dapo", **keys)
        resumed = learn_from_generation(loss_type="dapo", resumes=True, **keys)
        for expected, gradient in zip(uninterrupted.gradients, resumed.gradients, strict=True):
            assert torch.equal(gradient, expected)


def test_every_rollout_that_is_learned_from_is_compared_with_the_engine_once():
    """Each comparison gives the drift of the engine; rollouts without signal are not compared."""
    with_signal = [row for row in range(ROWS) if row // GROUP_SIZE not in GROUPS_WITHOUT_SIGNAL]
    for keys in (TWO_UPDATE_KEYS, TWO_ITERATION_KEYS):
        updates = learn_from_generation(loss_type="grpo", **keys, **ENGINE_KEYS)
        assert sorted(updates.trainer.parts.recorder.measured_rows) == with_signal


def test_an_engine_that_drifts_ends_the_run_before_the_first_update():
    """An engine that drifts in the second update's rollouts ends the run before the first update.

    Its log-probabilities are off by about 0.3 nats, which is above the bound of 0.01.
    """
    keys = {**TWO_UPDATE_KEYS, **ENGINE_KEYS, "adora_max_drift": 0.01}
    trainer = table_trainer(logits_table(), **keys)
    trainer.parts.generation_logps.drift_guard.save_now = lambda: "none"
    micro_batches = trainer.parts.micro_batcher.split(make_generation(), FIRST_GENERATION)
    with pytest.raises(RolloutError, match="adora_max_drift is 0.01"):
        trainer.parts.generation_logps.add_to_later_updates(micro_batches)


def test_with_dropout_every_micro_batch_that_is_compared_gets_a_pass_without(subtests):
    """A pass without dropout is made for each micro-batch, except those of the first update.

    These get one too where their log-probabilities are compared with the engine's, or with those
    of a second iteration.
    """
    ids_BC = torch.ones(GROUP_SIZE, 3, dtype=torch.long)

    def micro_batch() -> Batch:
        """Return one group with signal."""
        return {
            "advantages": torch.tensor([1.0, -1.0]),
            "completion_ids": ids_BC,
            "completion_mask": ids_BC,
        }

    micro_batches = [Batch(), micro_batch(), micro_batch(), micro_batch()]
    for name, keys, count in (
        ("ratio to the engine", {**TWO_UPDATE_KEYS, **ENGINE_KEYS}, 3),
        ("in one update", {**TWO_UPDATE_KEYS, **ENGINE_KEYS, "gradient_accumulation_steps": 4}, 3),
        ("without an engine", TWO_UPDATE_KEYS, 2),
        ("without an engine, twice", TWO_ITERATION_KEYS, 3),
    ):
        with subtests.test(name):
            old_logps = OldLogps(step_context(**keys), has_dropout=True)
            assert len(old_logps.passes_to_make(micro_batches)) == count
            # Nothing has changed the weights, so the ratio is 1 whatever dropout draws.
            assert old_logps.come_from_training_pass(0)


def test_how_many_micro_batches_come_before_the_first_update(subtests):
    """The first update's micro-batches are counted, which need no pass for old log-probabilities.

    The policy that learns from them is still the one that sampled. With four micro-batches a
    generation and two a step, for example, they are the first two.
    """
    # (steps_per_generation, num_iterations, gradient_accumulation_steps): micro-batches
    counts = {
        (4, 1, 4): 4,
        (4, 1, 8): 4,
        (4, 1, 2): 2,
        (4, 2, 4): 4,
        (3, 2, 2): 2,
        (4, 1, 3): 1,  # an optimizer step may begin at any of the four micro-batches
    }
    for (steps, iterations, accumulated), count in counts.items():
        with subtests.test(f"{steps}, {iterations}, {accumulated}"):
            layout = BatchLayout(
                micro_batch_rows=1,
                num_generations=2,
                steps_per_generation=steps,
                num_iterations=iterations,
                gradient_accumulation_steps=accumulated,
                processes=1,
            )
            assert layout.micro_batches_before_update == count


# The engine's log-probabilities are the old ones. So the loss clips the ratio to the engine, and
# TRL's correction of that ratio is off.
ENGINE_OLD_LOGPS_KEYS: dict[str, Any] = {
    **TWO_UPDATE_KEYS,
    **ENGINE_KEYS,
    "vllm_importance_sampling_correction": False,
    "adora_rollouts": RolloutOptions(old_logps="engine"),
    "loss_type": "grpo",
}


def test_the_engines_log_probabilities_may_be_the_old_ones():
    """With `old_logps: engine` no pass is made, and ratios are those to the engine.

    The loss clips the ratio of the new policy to the engine.
    """
    updates = learn_from_generation(**ENGINE_OLD_LOGPS_KEYS)
    assert updates.scored_rollouts == 0
    trainer = updates.trainer
    first_ratio = trainer.logged_metrics["adora/ratio_max"][0]
    assert first_ratio > 1.2, "the engine's difference is in the ratio of the first update too"
    # Drift is measured where the weights are those that have sampled, so in the first update alone.
    assert len(trainer.parts.recorder.measured_rows) == ROLLOUTS_WITH_SIGNAL_PER_UPDATE
    assert all(0.1 < drift < 0.5 for drift in trainer.logged_metrics["adora/drift"])


def test_an_engine_without_difference_gives_the_gradients_of_the_policys_own():
    """If the engine's log-probabilities equal the policy's, either may be the old ones."""
    ours = learn_from_generation(engine_gap=0.0, **ENGINE_OLD_LOGPS_KEYS)
    theirs = learn_like_trl(loss_type="grpo", **TWO_UPDATE_KEYS)
    assert max(relative_distances(ours, theirs)) < MAX_RELATIVE_DISTANCE


def test_tokens_that_the_engine_was_not_asked_for_have_the_ratio_one():
    """With `old_logps: engine` a token without a value of the engine (NaN) gets the value 0.

    Tools wrote such tokens. The policy's pass has 0 there too, so the ratio of the two is 1.
    """
    old_logps = OldLogps(step_context(**ENGINE_OLD_LOGPS_KEYS), has_dropout=False)
    micro_batch: Batch = {"sampling_per_token_logps": torch.tensor([[-1.0, torch.nan, -torch.inf]])}
    old_logps.set_or_remove_column(micro_batch, 0)
    assert micro_batch["old_per_token_logps"].tolist() == [[-1.0, 0.0, -torch.inf]]
