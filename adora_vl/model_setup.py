"""Puts our classes in place of TRL's while its constructor runs, and prepares the loaded models."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl.trainer import grpo_trainer

from adora_vl.models.adapter import cast_trained_to_float32, load_adapter_weights, record_base
from adora_vl.models.families import freeze
from adora_vl.models.generation_config import repair_generation_config
from adora_vl.models.lora_branch import compute_branches_first, leave_casts_to_autocast
from adora_vl.models.precision import restore_buffers
from adora_vl.models.reference import copy_policy
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.record.phases import TimedPhase
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import engine_settings
from adora_vl.rollout.weight_sync import refuse_unmergeable
from adora_vl.utils import compat


@contextmanager
def use_own_classes_in_trl(
    run: ResolvedRun, policy: str | PreTrainedModel, engine_phase: TimedPhase
) -> Iterator[None]:
    """Let TRL's `__init__`, called inside the block, build our vLLM class and our reference model.

    If the policy is a model object, stock TRL loads the reference model from the folder that the
    object's config names. The object's weights may have changed since, and the folder may not
    exist. Our reference model is a copy of the object.

    Args:
        run: the checked run.
        policy: a name, or a model object.
        engine_phase: measures the phases that the engine enters.
    """
    engine_class = partial(
        AdoraVLLMGeneration,
        settings=engine_settings(run.config, run.model.revision),
        count_seconds=engine_phase,
    )
    with ExitStack() as replacements:
        replacements.enter_context(
            compat.GENERATION_CLASS.replaced_by(engine_class, on=grpo_trainer)
        )
        if not isinstance(policy, str):
            copy_of_policy = partial(copy_policy, policy)
            replacements.enter_context(
                compat.REFERENCE_MODEL.replaced_by(copy_of_policy, on=grpo_trainer)
            )
        yield


def prepare_models(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    run: ResolvedRun,
    gather_params: Callable[..., AbstractContextManager[Any]],
) -> list[PreTrainedModel]:
    """Prepare the loaded policy and the reference model for training, and return them.

    In the order of the code:

    - an adapter that the run goes on training gets its saved weights, and the new adapter of a base
      in 4 bits becomes float32;
    - buffers that a cast has rounded get their precision back, in both models;
    - the generation config becomes one that Transformers can save;
    - an adapter's config gets the name of its base, its inputs are not cast in vain
      (`leave_casts_to_autocast`), its branches are computed first with gradient checkpointing
      (`compute_branches_first`), and an adapter that cannot be merged is refused;
    - parts of the policy are frozen (`adora_freeze`).

    Args:
        policy: the model that TRL has loaded.
        reference: None in a run without one.
        run: the checked run.
        gather_params: TRL's context in which sharded parameters are whole.
    """
    if run.model.continued_adapter is not None:
        load_adapter_weights(policy, run.model.continued_adapter)
    elif run.model.is_four_bit:
        cast_trained_to_float32(policy)
    models = [policy]
    if reference is not None:
        models.append(reference)
    for model in models:
        restore_buffers(model)
    repair_generation_config(policy)
    if is_peft_model(policy):
        record_base(policy, run.model.merged_adapters)
        leave_casts_to_autocast(policy)
        if run.config.gradient_checkpointing:
            compute_branches_first(policy)
        if not run.model.is_four_bit:
            refuse_unmergeable(policy, gather_params)
    freeze(policy, run.config.adora_freeze)
    return models
