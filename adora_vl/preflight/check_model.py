"""Checks of the model: its family, adapters and precision, and what is trained of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adora_vl.builtin.builtin_data import resolve_model
from adora_vl.config.unused_keys import RunSettings, unused_keys
from adora_vl.models import check as fits
from adora_vl.models import reference
from adora_vl.models.adapter import Adapter, adapters_of, check_keys
from adora_vl.models.four_bit import check_four_bit
from adora_vl.models.load import check_weights, load_config
from adora_vl.models.shape import config_for_planning, refuse_embedding_adapters
from adora_vl.preflight.facts import ModelFacts
from adora_vl.rollout.engine_settings import refuse_on_cpu, refuse_taken_card
from adora_vl.training.extensions import Extension, check_extensions
from adora_vl.utils.errors import UserError
from adora_vl.utils.hub import notes_on

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import Messages, RunContext
    from adora_vl.preflight.request import RunRequest


def check_model(
    request: RunRequest,
    extensions: Mapping[str, Extension],
    context: RunContext,
    messages: Messages,
) -> ModelFacts:
    """Find the model, and check its family, its precision and what the engine can do with it.

    `extensions`: the user's, by name. Notes for the user go into `messages`. Raises `UserError`.
    """
    keys = request.model.keys
    config = request.config
    source = _find_model(request, context, messages)
    model_config = source.config
    messages.notes.extend(fits.check_family(keys, config, model_config))
    messages.notes.extend(fits.choose_layers(request.model.peft_config, keys, model_config))
    continued_adapter = source.adapters[0] if source.adapters and _goes_on(request) else None
    peft_config = request.model.peft_config
    if continued_adapter is not None:
        peft_config = continued_adapter.config
    four_bit = check_four_bit(
        keys,
        config,
        model_config,
        peft_config,
        stage=context.sharding.stage,
        runs_here=context.local,
    )
    model = ModelFacts(
        name=source.name,
        revision=source.revision,
        config=model_config,
        adapters=source.adapters,
        continued=continued_adapter,
        peft_config=peft_config,
        four_bit=four_bit,
    )
    _refuse_merge_into_four_bit(model)
    check_extensions(extensions, model_config)
    check_tensor_parallel(config, model_config, context.sharding.processes)
    if context.local and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(model_config, config.vllm_enable_sleep_mode)
    uses_deepspeed = config.deepspeed_plugin is not None
    # The own weights of an adapter are float32, also of one that goes on training.
    loses_updates = continued_adapter is None and fits.loses_updates(
        keys, model_config, deepspeed=uses_deepspeed
    )
    if loses_updates and not context.dry_run:  # a dry run says so in its report
        messages.notes.append(fits.LOST_UPDATES)
    return model


@dataclass(frozen=True)
class _ModelSource:
    """The model that a run begins with, as the user named it or handed it over.

    `adapters` is empty unless an adapter was named; then `name` and `revision` are its base's.
    """

    name: str
    revision: str | None
    config: PretrainedConfig
    adapters: tuple[Adapter, ...] = ()


def _find_model(request: RunRequest, context: RunContext, messages: Messages) -> _ModelSource:
    """Find the model of a run and read its config; the weights are not loaded.

    A model that Python handed over is taken as it is. Raises `UserError`.
    """
    keys = request.model.keys
    name = str(keys.model_name_or_path or "")
    revision = keys.model_revision
    if request.model.loaded is not None:
        return _ModelSource(name=name, revision=revision, config=request.model.loaded.config)
    adapters = _named_adapters(request, messages)
    if adapters:
        name = adapters[-1].base
        revision = adapters[-1].revision
    # Collective: every rank waits here while the first one of each machine builds the model.
    with request.config.main_process_first(desc="building the tiny model where it is missing"):
        name = resolve_model(name)
    if context.dry_run:
        model_config, note = config_for_planning(name, revision)
        if note:
            messages.unknown.append(note)
    else:
        model_config = load_config(name, revision)
    # The report of a dry run, and the config that it writes, name the model as the user does.
    if not context.dry_run and not adapters:
        keys.model_name_or_path = name
    messages.notes.extend(notes_on(name))
    return _ModelSource(name=name, revision=revision, config=model_config, adapters=adapters)


def _refuse_merge_into_four_bit(model: ModelFacts) -> None:
    """Raise `UserError` where an adapter would be merged into a base in 4 bits."""
    if model.four_bit and model.merged:
        raise UserError(
            f"model_name_or_path: {model.adapters[-1].name!r} would be merged into a base in 4 "
            "bits, which rounds it away; make a model of it with `python -m adora_vl.export` and "
            "name that"
        )


def _goes_on(request: RunRequest) -> bool:
    """Return whether a named adapter goes on training.

    It does unless the request has a `peft_config`: then it is merged into its base, and a new
    adapter is trained on top.
    """
    return request.model.peft_config is None


def _named_adapters(request: RunRequest, messages: Messages) -> tuple[Adapter, ...]:
    """Return the adapter that was named in place of a model, then those that it was trained on.

    It is noted what becomes of the adapter. Empty for any other model. Raises `UserError`.
    """
    keys = request.model.keys
    name = str(keys.model_name_or_path or "")
    if not name:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    adapters = tuple(adapters_of("model_name_or_path", name, keys.model_revision))
    if not adapters:
        return adapters
    base = adapters[0].base
    if not _goes_on(request):
        messages.notes.append(
            f"the adapter {name} is merged into its base {base}, and a new one is trained"
        )
        return adapters
    cli_args = request.cli_args
    check_keys(adapters[0], keys, cli_args.set_keys if cli_args else ())
    messages.notes.append(f"the adapter {name} of {base} goes on training")
    return adapters


def check_parts(
    request: RunRequest,
    layout: BatchLayout,
    model: ModelFacts,
    context: RunContext,
    messages: Messages,
) -> None:
    """Check what is trained, how the model is loaded, and which keys do nothing with that.

    What is trained: frozen parts, layers with an adapter, the reference of a KL term. How it is
    loaded: the attention kernel and the arguments of `from_pretrained`. Raises `UserError`.
    """
    config = request.config
    keys = request.model.keys
    if context.local:
        fits.check_attention(keys, config.model_init_kwargs or {})
    loaded = request.model.loaded
    has_adapter = hasattr(loaded, "peft_config")
    if loaded is None:
        fits.check_arguments(model.config, dict(config.model_init_kwargs or {}))
    _check_reference(request, model)
    if has_adapter:
        refuse_embedding_adapters(loaded)
    else:
        fits.check_parts(keys, model.config, model.peft_config, config.adora_freeze)
    _check_dropout(config, model.peft_config)
    trains_adapter = model.peft_config is not None or has_adapter
    fits.check_trainable(config, model.config, adapted=trains_adapter)
    settings = RunSettings(config, keys, trains_adapter, request.trl_evaluates)
    messages.notes.extend(unused_keys(settings))
    checkpoint = config.resume_from_checkpoint
    if request.script is None and checkpoint is not None:
        messages.notes.append(
            f"resume_from_checkpoint: {checkpoint} in the config is not read by train(), as in "
            "Transformers; write train(resume_from_checkpoint=...)"
        )
    messages.notes.extend(
        fits.dropout_notes(model.peft_config, config, one_step=layout.has_one_step)
    )


def _check_dropout(config: AdoraGRPOConfig, peft_config: PeftConfig | None) -> None:
    """Raise `UserError` for dropout of an adapter where the old log-probabilities are the engine's.

    The engine has none, so its noise would be in each ratio of new to old policy, and in the drift.
    """
    dropout = getattr(peft_config, "lora_dropout", 0.0)
    if dropout and not config.disable_dropout and config.adora_rollouts.old_logps == "engine":
        raise UserError(
            "adora_rollouts.old_logps: engine compares each pass with the engine, which has no "
            f"dropout, and lora_dropout is {dropout:g}; set it to 0"
        )


def _check_reference(request: RunRequest, model: ModelFacts) -> None:
    """Check that the reference of a KL term can be the policy that the run starts from.

    The reference of a run with an adapter is the model without it, so a new adapter has to begin as
    a change of nothing. Raises `UserError`.
    """
    beta = request.config.beta
    loaded = request.model.loaded
    if loaded is None:
        is_new = model.continued is None
        reference.check_adapter_start(model.peft_config, beta, is_new=is_new)
        return
    reference.check_copied(loaded, beta)
    reference.check_adapter_start(model.peft_config, beta, is_new=True)
    for adapter_config in getattr(loaded, "peft_config", {}).values():
        reference.check_adapter_start(adapter_config, beta, is_new=False)


def check_model_files(request: RunRequest, model: ModelFacts, context: RunContext) -> None:
    """Check that the files of the model, and of its adapters, are complete, and the card is free.

    Raises `UserError`.
    """
    if context.local and not context.dry_run:
        refuse_taken_card(request.config)
    if request.model.loaded is not None:
        return
    for folder in model.sources:
        check_weights("model_name_or_path", folder)


def check_tensor_parallel(
    config: AdoraGRPOConfig, model_config: PretrainedConfig, processes: int
) -> None:
    """Raise `UserError` for a model that cannot be divided evenly over the engine's processes.

    vLLM would refuse it only when it loads the weights.
    """
    engine_ranks = config.vllm_tensor_parallel_size
    if not config.use_vllm or config.vllm_mode != "colocate" or engine_ranks == 1:
        return
    text_config = model_config.get_text_config()
    vision_config = getattr(model_config, "vision_config", None)
    # A model without one of these parts has nothing to divide there, so that the number fits.
    key_value_heads = getattr(text_config, "num_key_value_heads", None) or engine_ranks
    vision_heads = getattr(vision_config, "num_heads", engine_ranks)
    vision_columns = getattr(vision_config, "intermediate_size", engine_ranks)
    divided_counts = [
        (processes, "processes"),
        (text_config.num_attention_heads, "attention heads of the model"),
        (vision_heads, "attention heads of its vision tower"),
        (vision_columns, "columns of its vision tower's MLP"),
    ]
    # vLLM copies key-value heads to several processes where there are fewer heads than processes.
    if engine_ranks % key_value_heads:
        divided_counts.insert(2, (key_value_heads, "key-value heads of the model"))
    for count, things in divided_counts:
        if count % engine_ranks:
            raise UserError(
                f"vllm_tensor_parallel_size: {engine_ranks} does not divide the {count} {things}; an "
                "engine is divided into equal parts, one per process"
            )
