"""Checks of the model: its family, adapters and precision, and what is trained of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from adora_vl.builtin.builtin_data import resolve_model
from adora_vl.config.unused_keys import RunSettings, notes_on_unused_keys
from adora_vl.models import check as model_checks
from adora_vl.models import reference
from adora_vl.models.adapter import Adapter, check_lora_keys, read_adapters
from adora_vl.models.four_bit import check_four_bit
from adora_vl.models.generation_config import check_generation_config
from adora_vl.models.load import check_weights, load_config
from adora_vl.models.lora_branch import untested_peft_notes
from adora_vl.models.shape import config_for_planning, refuse_embedding_adapters
from adora_vl.preflight.resolved_run import ModelInfo
from adora_vl.rollout.engine_settings import refuse_on_cpu, refuse_taken_card
from adora_vl.training.extensions import Extension, check_extensions
from adora_vl.utils.errors import UserError
from adora_vl.utils.hub import notes_on_local_copy

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest


def check_model(
    request: RunRequest,
    extensions: Mapping[str, Extension],
    context: RunContext,
) -> ModelInfo:
    """Find the model, and check its family, its precision and what the engine can do with it.

    Args:
        request: What the user asks for.
        extensions: The user's own extensions of the training step, by name.
        context: Where the run takes place.

    Raises `UserError` for a model that cannot be trained with these keys.
    """
    model_args = request.model.model_args
    config = request.config
    model = _resolve_model(request, context)
    context.messages.notes.extend(model_checks.check_family(model_args, config, model.config))
    context.messages.notes.extend(
        model_checks.choose_layers(request.model.peft_config, model_args, model.config)
    )
    is_in_four_bit = check_four_bit(
        model_args,
        config,
        model.config,
        model.peft_config,
        zero_stage=context.sharding.zero_stage,
        runs_here=context.on_this_machine,
    )
    model = replace(model, is_four_bit=is_in_four_bit)
    # An adapter that does not go on training would be merged into the base.
    _refuse_merge_into_four_bit(model)
    check_extensions(extensions, model.config)
    check_tensor_parallel(config, model.config, context.sharding.processes)
    if context.on_this_machine and config.has_colocated_engine:
        refuse_on_cpu(model.config, config.vllm_enable_sleep_mode)
    # Small updates are lost in weights in 16 bits. Those of an adapter are in float32.
    if model.continued_adapter is None and model_checks.loses_updates(
        model_args, model.config, uses_deepspeed=context.sharding.zero_stage is not None
    ):
        context.messages.notes.append(model_checks.LOST_UPDATES_WARNING)
    return model


def _resolve_model(request: RunRequest, context: RunContext) -> ModelInfo:
    """Find the model of a run and read its config; the weights are not loaded.

    Python code may have passed a model that is loaded already. Raises `UserError`.
    """
    model_args = request.model.model_args
    name = str(model_args.model_name_or_path or "")
    revision = model_args.model_revision
    peft_config = request.model.peft_config
    if request.model.loaded_model is not None:
        return ModelInfo(
            name=name,
            revision=revision,
            config=request.model.loaded_model.config,
            peft_config=peft_config,
        )
    adapters = _adapters_named_as_model(request, context)
    if adapters:
        # An adapter may be trained on top of others. The last one has the base model.
        name = adapters[-1].base
        revision = adapters[-1].revision
    # Collective: every rank waits here while the first one of each machine builds the model.
    with request.config.main_process_first(desc="building the tiny model where it is missing"):
        name = resolve_model(name)
    model_config = _read_config(name, revision, context)
    # The trainer reads the key, so it gets the folder of a built-in model. In a dry run it keeps
    # the user's name for the model, which goes into the report and the config that it writes.
    if not context.dry_run and not adapters:
        model_args.model_name_or_path = name
    # The adapter to train is the one that the user named in place of a model, or else a new one.
    continued_adapter = None
    if adapters and _trains_named_adapter(request):
        continued_adapter = adapters[0]
        peft_config = continued_adapter.config
    return ModelInfo(
        name=name,
        revision=revision,
        config=model_config,
        adapters=adapters,
        continued_adapter=continued_adapter,
        peft_config=peft_config,
    )


def _read_config(name: str, revision: str | None, context: RunContext) -> PretrainedConfig:
    """Read the config of a model, from a folder or the hub.

    `name`: the folder or hub id. `revision`: that on the hub. A dry run that cannot reach the hub
    may use a config that this package ships, and says so. Raises `UserError` for a config that
    cannot be read.
    """
    if context.dry_run:
        model_config, note_on_shipped_config = config_for_planning(name, revision)
        if note_on_shipped_config:
            context.messages.unchecked.append(note_on_shipped_config)
            return model_config
    else:
        model_config = load_config(name, revision)
    context.messages.notes.extend(notes_on_local_copy(name))
    return model_config


def _refuse_merge_into_four_bit(model: ModelInfo) -> None:
    """Raise `UserError` for an adapter that would be merged into a base model in 4 bits."""
    if model.is_four_bit and model.merged_adapters:
        raise UserError(
            f"model_name_or_path: {model.adapters[-1].name!r} would be merged into a base in 4 "
            "bits, which rounds it away; make a model of it with `python -m adora_vl.export` and "
            "name that"
        )


def _trains_named_adapter(request: RunRequest) -> bool:
    """Return whether an adapter that the user named in place of a model goes on training.

    If the request asks for a new adapter, the named one is merged into its base instead.
    """
    return request.model.peft_config is None


def _adapters_named_as_model(request: RunRequest, context: RunContext) -> tuple[Adapter, ...]:
    """Return the adapter that the user named in place of a model, and the adapters below it.

    The named adapter comes first. The result is empty if the user named no adapter. A note for the
    user says whether the adapter goes on training or is merged. Raises `UserError`.
    """
    model_args = request.model.model_args
    name = str(model_args.model_name_or_path or "")
    if not name:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    adapters = tuple(read_adapters("model_name_or_path", name, model_args.model_revision))
    if not adapters:
        return adapters
    base = adapters[0].base
    if not _trains_named_adapter(request):
        context.messages.notes.append(
            f"the adapter {name} is merged into its base {base}, and a new one is trained"
        )
        return adapters
    # Keys that the user has set must not contradict the adapter's own config.
    set_keys = request.cli_args.set_keys if request.cli_args else ()
    check_lora_keys(adapters[0], model_args, set_keys)
    context.messages.notes.append(f"the adapter {name} of {base} goes on training")
    return adapters


def check_parts(
    request: RunRequest,
    layout: BatchLayout,
    model: ModelInfo,
    context: RunContext,
) -> None:
    """Check how the model is loaded and which of its parts are trained.

    The loading is about the attention kernel and the arguments of `from_pretrained`. The training
    is about frozen parts, layers with an adapter, and the reference model of a KL term. Notes for
    the user name the keys that do nothing with this model.

    Args:
        request: What the user asks for.
        layout: The sizes of the batches.
        model: The model, of which only the config is loaded.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError` for a key that does not fit the model.
    """
    config = request.config
    model_args = request.model.model_args
    init_kwargs = dict(config.model_init_kwargs or {})
    if context.on_this_machine:
        model_checks.check_attention(model_args, init_kwargs)
    # A model that Python code has loaded, or None. It may have an adapter already.
    loaded = request.model.loaded_model
    has_adapter = hasattr(loaded, "peft_config")
    if loaded is None:
        model_checks.check_init_arguments(model.config, init_kwargs)
    _check_reference(request, model)
    if has_adapter:
        refuse_embedding_adapters(loaded)
    else:
        model_checks.check_model_parts(
            model_args, model.config, model.peft_config, config.adora_freeze
        )
    _check_dropout(config, model.peft_config)
    trains_adapter = model.peft_config is not None or has_adapter
    model_checks.check_trainable(config, model.config, trains_adapter=trains_adapter)
    settings = RunSettings(
        config=config,
        model=model_args,
        trains_adapter=trains_adapter,
        trl_evaluates=request.trl_evaluates,
    )
    context.messages.notes.extend(notes_on_unused_keys(settings))
    if context.on_this_machine and trains_adapter:
        context.messages.notes.extend(untested_peft_notes())
    checkpoint = config.resume_from_checkpoint
    if request.script_args is None and checkpoint is not None:
        context.messages.notes.append(
            f"resume_from_checkpoint: {checkpoint} in the config is not read by train(), as in "
            "Transformers; write train(resume_from_checkpoint=...)"
        )
    context.messages.notes.extend(
        model_checks.dropout_notes(
            model.peft_config, config, one_step=layout.generation_has_one_step
        )
    )


def _check_dropout(config: AdoraGRPOConfig, peft_config: PeftConfig | None) -> None:
    """Raise `UserError` for an adapter's dropout if vLLM's log-probabilities are the old ones.

    vLLM has no dropout, so the policy's dropout would be noise in each ratio of new to old policy.
    """
    dropout = getattr(peft_config, "lora_dropout", 0.0)
    has_dropout = dropout > 0 and not config.disable_dropout
    if has_dropout and config.adora_rollouts.old_logps == "engine":
        raise UserError(
            "adora_rollouts.old_logps: engine compares each pass with the engine, which has no "
            f"dropout, and lora_dropout is {dropout:g}; set it to 0"
        )


def _check_reference(request: RunRequest, model: ModelInfo) -> None:
    """Raise `UserError` if the reference model of a KL term would not be the first policy.

    With an adapter the reference is the model without it. So a new adapter must not change the
    model at first, as LoRA with its usual initialisation does not.
    """
    beta = request.config.beta
    loaded = request.model.loaded_model
    if loaded is None:
        is_new = model.continued_adapter is None
        reference.check_adapter_start(model.peft_config, beta, is_new=is_new)
        return
    # A model of Python code: TRL copies it as the reference, and it may have adapters already.
    reference.check_can_be_copied(loaded, beta)
    reference.check_adapter_start(model.peft_config, beta, is_new=True)
    for adapter_config in getattr(loaded, "peft_config", {}).values():
        reference.check_adapter_start(adapter_config, beta, is_new=False)


def check_model_files(request: RunRequest, model: ModelInfo, context: RunContext) -> None:
    """Raise `UserError` for model files that are damaged or incomplete, and for a GPU in use.

    The weights of the model and of its adapters have to be complete. Its generation config has to
    be valid, since Transformers writes it into each checkpoint.
    """
    # In a launch enough memory of the GPU has to be free for the engine. A dry run takes none.
    if context.on_this_machine and not context.dry_run:
        refuse_taken_card(request.config)
    # A model that Python code has loaded has no files to check.
    if request.model.loaded_model is not None:
        return
    for folder_or_hub_id in model.folders_or_ids:
        check_weights("model_name_or_path", folder_or_hub_id)
    check_generation_config(model.name, model.revision)


def check_tensor_parallel(
    config: AdoraGRPOConfig, model_config: PretrainedConfig, processes: int
) -> None:
    """Raise `UserError` if the model cannot be divided evenly over the processes of an engine.

    vLLM would refuse it only when it loads the weights. `processes`: the number of all processes of
    the run.
    """
    engine_ranks = config.vllm_tensor_parallel_size
    if not config.has_colocated_engine or engine_ranks == 1:
        return
    text_config = model_config.get_text_config()
    vision_config = getattr(model_config, "vision_config", None)
    # A part that the model does not have gets the count `engine_ranks`, which passes the check.
    key_value_heads = getattr(text_config, "num_key_value_heads", None) or engine_ranks
    vision_heads = getattr(vision_config, "num_heads", engine_ranks)
    vision_columns = getattr(vision_config, "intermediate_size", engine_ranks)
    count_by_part = {
        "processes": processes,
        "attention heads of the model": text_config.num_attention_heads,
    }
    # vLLM can copy each key-value head to the same number of ranks, such as 2 heads to 4 ranks.
    copies_evenly = engine_ranks % key_value_heads == 0
    if not copies_evenly:
        count_by_part["key-value heads of the model"] = key_value_heads
    count_by_part["attention heads of its vision tower"] = vision_heads
    count_by_part["columns of its vision tower's MLP"] = vision_columns
    for part, count in count_by_part.items():
        if count % engine_ranks != 0:
            raise UserError(
                f"vllm_tensor_parallel_size: {engine_ranks} does not divide the {count} {part}; an "
                "engine is divided into equal parts, one per process"
            )
