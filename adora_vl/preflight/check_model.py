"""Checks of the model: its family, adapters and precision, and what is trained of it."""

from __future__ import annotations

from collections.abc import Mapping
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

    Raises `UserError`.
    """
    keys = request.model.keys
    config = request.config
    name = str(keys.model_name_or_path or "")
    revision = keys.model_revision
    adapters: tuple[Adapter, ...] = ()
    if request.model.loaded is not None:
        model_config: PretrainedConfig = request.model.loaded.config
    else:
        adapters = _named_adapters(request, messages)
        if adapters:
            name = adapters[-1].base
            revision = adapters[-1].revision
        # Collective: every rank waits here while the first one of each machine builds the model.
        with config.main_process_first(desc="building the tiny model where it is missing"):
            name = resolve_model(name)
        if context.dry_run:
            model_config, note = config_for_planning(name, revision)
            messages.unknown.extend([note] if note else [])
        else:
            model_config = load_config(name, revision)
        # The report of a dry run, and the config that it writes, name the model as the user does.
        if not context.dry_run and not adapters:
            keys.model_name_or_path = name
        messages.notes.extend(notes_on(name))
    messages.notes.extend(fits.check_family(keys, config, model_config))
    messages.notes.extend(fits.choose_layers(request.model.peft_config, keys, model_config))
    continued = adapters[0] if adapters and _goes_on(request) else None
    peft_config = request.model.peft_config if continued is None else continued.config
    four_bit = check_four_bit(
        keys,
        config,
        model_config,
        peft_config,
        stage=context.sharding.stage,
        runs_here=context.local,
    )
    model = ModelFacts(
        name=name,
        revision=revision,
        config=model_config,
        adapters=adapters,
        continued=continued,
        peft_config=peft_config,
        four_bit=four_bit,
    )
    _refuse_merge_into_four_bit(model)
    check_extensions(extensions, model_config)
    check_tensor_parallel(config, model_config, context.sharding.processes)
    if context.local and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(model_config, config.vllm_enable_sleep_mode)
    sharded = config.deepspeed_plugin is not None
    loses_updates = continued is None and fits.loses_updates(keys, model_config, deepspeed=sharded)
    # a dry run says so in its report
    if loses_updates and not context.dry_run:
        messages.notes.append(fits.LOST_UPDATES)
    return model


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
    """Return the adapter that was named in place of a model, and those beneath it.

    Empty for any other model. Raises `UserError`.
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
    adapted = model.peft_config is not None or has_adapter
    fits.check_trainable(config, model.config, adapted=adapted)
    messages.notes.extend(unused_keys(RunSettings(config, keys, adapted, request.trl_evaluates)))
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
    share = getattr(peft_config, "lora_dropout", 0.0)
    if share and not config.disable_dropout and config.adora_rollouts.old_logps == "engine":
        raise UserError(
            "adora_rollouts.old_logps: engine compares each pass with the engine, which has no "
            f"dropout, and lora_dropout is {share:g}; set it to 0"
        )


def _check_reference(request: RunRequest, model: ModelFacts) -> None:
    """Check that the reference of a KL term can be the policy that the run starts from."""
    beta = request.config.beta
    loaded = request.model.loaded
    if loaded is None:
        is_new = model.continued is None
        reference.check_adapter_start(model.peft_config, beta, is_new=is_new)
        return
    reference.check_copied(loaded, beta)
    reference.check_adapter_start(model.peft_config, beta, is_new=True)
    for config in getattr(loaded, "peft_config", {}).values():
        reference.check_adapter_start(config, beta, is_new=False)


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
    parts = config.vllm_tensor_parallel_size
    if not config.use_vllm or config.vllm_mode != "colocate" or parts == 1:
        return
    text = model_config.get_text_config()
    vision = getattr(model_config, "vision_config", None)
    key_value_heads = getattr(text, "num_key_value_heads", None) or parts
    counts = [
        (processes, "processes"),
        (text.num_attention_heads, "attention heads of the model"),
        (getattr(vision, "num_heads", parts), "attention heads of its vision tower"),
        (getattr(vision, "intermediate_size", parts), "columns of its vision tower's MLP"),
    ]
    # vLLM copies key-value heads to several processes where there are fewer heads than processes.
    if parts % key_value_heads:
        counts.insert(2, (key_value_heads, "key-value heads of the model"))
    for count, things in counts:
        if count % parts:
            raise UserError(
                f"vllm_tensor_parallel_size: {parts} does not divide the {count} {things}; an "
                "engine is divided into equal parts, one per process"
            )
