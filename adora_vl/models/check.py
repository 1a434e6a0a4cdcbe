"""Refuses runs that cannot work, as far as the model's config alone tells."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import ModelConfig, get_peft_config

from adora_vl.models.families import (
    KNOWN_FAMILIES_TEXT,
    family_of,
    has_linear_attention,
    position_fault_in_vllm,
    sees_images,
)
from adora_vl.models.shape import is_dtype_name, language_layer_names, layers_pattern, model_shape
from adora_vl.utils.errors import UserError
from adora_vl.utils.secrets import without_secrets

if TYPE_CHECKING:
    from peft import PeftConfig
    from trl import GRPOConfig

_INSTALLED_CHECK_BY_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}

# The parts of a step that need to know the model's family to handle images. With all of them
# switched off, images are handled as in stock TRL.
PARTS_THAT_NEED_FAMILY = ("cache_images", "share_vision", "share_prompt")

LOST_UPDATES_WARNING = (
    "dtype: the weights are in 16 bits, all are trained, and without DeepSpeed there is no "
    "float32 copy of them, so rounding swallows nearly every update. Set dtype: float32 (bf16: "
    "true computes in bfloat16 all the same), or use LoRA or DeepSpeed."
)


def check_family(
    model: ModelConfig, run_config: "GRPOConfig", config: PretrainedConfig
) -> list[str]:
    """Check that a model's architecture can be trained, and return notes: at most one line.

    The known families are those of `FAMILIES`. In the order of the code:

        known family                                    fine, unless vLLM computes it otherwise
        other family, reads text only                   fine, but prompts are not shared: a note
        other family, images handled as by stock TRL    fine, with a note
        other family, any other run                     refused

    Args:
        model: the keys of the model.
        run_config: the config of the run.
        config: the config of the model.

    Raises:
        UserError: for a model or run that is refused.
    """
    name = model.model_name_or_path
    model_type = config.model_type
    family = family_of(config)
    if family is not None:
        position_fault = position_fault_in_vllm(config)
        if run_config.use_vllm and position_fault:
            raise UserError(f"model_name_or_path: {name!r} {position_fault}")
        if run_config.use_vllm and run_config.use_cpu and has_linear_attention(config):
            raise UserError(
                "use_vllm: true, but on a CPU vLLM computes the linear attention of "
                f"{family.name} in bfloat16 alone, and training there is in float32; set it to "
                "false"
            )
        return [f"{name}: {family.note}"] if family.note else []
    if not sees_images(config):
        return [
            f"{name}: model_type {model_type} is not among the families that can share a prompt "
            f"({KNOWN_FAMILIES_TEXT}): every rollout computes its prompt again, everything else works"
        ]
    needs_family = any(run_config.uses(part) for part in PARTS_THAT_NEED_FAMILY)
    if not needs_family and not run_config.adora_freeze:
        return [
            f"{name}: model_type {model_type} is not among the known families; its images go the "
            "way of stock TRL"
        ]
    raise UserError(
        f"model_name_or_path: {name!r} has model_type {model_type}, which is not among the known "
        f"families ({KNOWN_FAMILIES_TEXT}); set adora_stock_step: true and adora_freeze: [] to "
        "train it the way of stock TRL, or add the family as CONTRIBUTING.md describes"
    )


def loses_updates(model: ModelConfig, config: PretrainedConfig, *, uses_deepspeed: bool) -> bool:
    """Return whether rounding would swallow nearly all updates of weights (`LOST_UPDATES_WARNING`).

    It does so if the weights are in 16 bits. It does not if LoRA is trained, whose own weights are
    float32, or if DeepSpeed keeps a float32 copy. `uses_deepspeed`: whether the run does.
    """
    dtype = config.dtype if model.dtype == "auto" else model.dtype
    has_16_bits = str(dtype).removeprefix("torch.") in ("bfloat16", "float16")
    return has_16_bits and not model.use_peft and not uses_deepspeed


def check_reads_images(model: ModelConfig, config: PretrainedConfig, *, has_images: bool) -> None:
    """Raise `UserError` for images that the model does not read."""
    if has_images and not sees_images(config):
        raise UserError(
            f"model_name_or_path: {model.model_name_or_path!r} reads text only, and the dataset "
            "has images; name a vision-language model, or a dataset without images"
        )


def check_attention(model: ModelConfig, init_kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` for an attention kernel that is not installed here.

    `init_kwargs`: the run's `model_init_kwargs`.
    """
    attention = init_kwargs.get("attn_implementation", model.attn_implementation)
    is_installed = _INSTALLED_CHECK_BY_ATTENTION.get(attention)
    if is_installed is not None and not is_installed():
        raise UserError(
            f"attn_implementation: {attention} is not installed here, or needs a GPU; use sdpa"
        )


def check_init_arguments(config: PretrainedConfig, init_kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` for an argument of `from_pretrained` that nothing reads.

    `from_pretrained` would hand it to the model's class, which fails. The exception is
    `torch_dtype`: TRL always gives a `dtype` too, float32 by default, which wins without a word.

    `init_kwargs`: the run's `model_init_kwargs`.
    """
    if "torch_dtype" in init_kwargs:
        raise UserError(
            f"model_init_kwargs: torch_dtype: {init_kwargs['torch_dtype']} is the older name of "
            "dtype, and TRL lets dtype go before it; write dtype"
        )
    # `from_pretrained` takes most of its arguments out of **kwargs (`kwargs.pop("revision",
    # None)`), so their names stand in its source and not in its signature.
    source = inspect.getsource(PreTrainedModel.from_pretrained)
    parameters = {
        *inspect.signature(PreTrainedModel.from_pretrained).parameters,
        "use_auth_token",
        "attn_implementation",
    }
    # Secrets are masked, since the error below shows the value, which may be a token of the hub.
    for key, value in without_secrets(init_kwargs).items():
        is_read = key in parameters or f'"{key}"' in source or hasattr(config, key)
        has_wrong_dtype = key == "dtype" and isinstance(value, str) and not is_dtype_name(value)
        if not is_read or has_wrong_dtype:
            lacking = "value of it" if is_read else "argument"
            raise UserError(
                f"model_init_kwargs: {key}: {value!r:.60} is refused by the model, which has no "
                f"such {lacking}"
            )


def check_model_parts(
    model: ModelConfig, config: PretrainedConfig, peft_config: "PeftConfig", frozen: Sequence[str]
) -> None:
    """Raise `UserError` for a component to freeze, or a layer for an adapter, that the model lacks.

    The model is built on the meta device, to look at the names of its modules.

    Args:
        model: the run's keys that name the model and its dtype.
        config: the model's own config.
        peft_config: the adapter's config; None without an adapter.
        frozen: the components to freeze.
    """
    # Only LoRA and adapters like it name layers.
    layer_config = peft_config if hasattr(peft_config, "target_modules") else None
    if layer_config is None and not frozen:
        return
    try:
        shape = model_shape(config, dtype=model.dtype, frozen=frozen, peft_config=layer_config)
    except UserError:
        raise
    except (ValueError, KeyError) as error:
        targets: Any = peft_config.target_modules or getattr(peft_config, "target_parameters", None)
        reason = str(error).strip().splitlines()[0][:200]
        remedy = ""
        is_single_name = isinstance(targets, str) and targets.isidentifier()
        # PEFT takes a single name for a regular expression, and matches it against whole names of
        # modules. The user probably means modules whose names end with it, so that is tried.
        if is_single_name:
            suffix_config = replace(peft_config, target_modules=f".*{targets}")
            if _has_model_parts(model, config, suffix_config, frozen):
                remedy = (
                    f"; a single name is a regular expression over whole names: write '.*{targets}'"
                )
        raise UserError(
            f"lora_target_modules: {targets!r} does not fit this model ({reason}){remedy}"
        ) from error
    if shape.trained_parameters == 0:
        raise UserError(
            f"adora_freeze: {', '.join(frozen)}: nothing is left to train; leave out one of them"
        )


def _has_model_parts(
    model: ModelConfig, config: PretrainedConfig, peft_config: "PeftConfig", frozen: Sequence[str]
) -> bool:
    """Return whether the model has the parts and layers that `check_model_parts` looks for."""
    try:
        model_shape(config, dtype=model.dtype, frozen=frozen, peft_config=peft_config)
    except (ValueError, KeyError):
        return False
    return True


def check_trainable(
    config: "GRPOConfig", model_config: PretrainedConfig, *, trains_adapter: bool
) -> None:
    """Raise `UserError` for a loss or a reference that this model cannot have.

    TRL would refuse it only once the weights are loaded.

    Args:
        config: the run's.
        model_config: the model's.
        trains_adapter: whether an adapter is trained, and not the model's own weights.
    """
    coefficient = config.router_aux_loss_coef
    has_routers = hasattr(model_config.get_text_config(), "output_router_logits")
    if coefficient and not has_routers:
        raise UserError(
            f"router_aux_loss_coef: {coefficient} weighs the load of experts, and this model has "
            "none; leave it out"
        )
    if config.sync_ref_model and trains_adapter:
        raise UserError(
            "sync_ref_model: true moves a reference model, and with an adapter the reference is "
            "the base model, which stays; leave it out"
        )


def dropout_notes(peft_config: "PeftConfig", config: "GRPOConfig", *, one_step: bool) -> list[str]:
    """Return a note on what dropout of an adapter does to a run: at most one line.

    `one_step`: whether a generation is learned from in a single optimizer step. The ratio of new to
    old policy is 1 then, whatever the dropout.
    """
    dropout = getattr(peft_config, "lora_dropout", 0.0)
    if not dropout or one_step or config.disable_dropout:
        return []
    return [
        f"lora_dropout: {dropout:g} with several optimizer steps per generation: the ratio of new to "
        "old policy has the noise of dropout, and is clipped for it; lora_dropout: 0 has none"
    ]


def make_lora_config(model: ModelConfig) -> Any:
    """Return the `LoraConfig` of a run; None without LoRA.

    If the keys name no layers, the config has none until `choose_layers` writes them. Raises
    `UserError` where PEFT is not installed.
    """
    if model.use_peft and find_spec("peft") is None:
        raise UserError(
            "use_peft: true, but peft is not installed; install the extra adora-vl[lora]"
        )
    return get_peft_config(model)


def choose_layers(peft_config: Any, keys: ModelConfig, config: PretrainedConfig) -> list[str]:
    """Put LoRA on every linear layer of the language model where the user names no layer.

    The vision tower and the projector stay frozen, as in the recipes.

    Args:
        peft_config: the config of the adapter. The layers are written into it.
        keys: the keys of the model. The layers are written into them too, so that manifest,
            fingerprint and checkpoint have them.
        config: the config of the model.

    Returns:
        A note of one line for the user, or none.
    """
    if not _lacks_layers(peft_config):
        return []
    layer_names = language_layer_names(config)
    if not layer_names:
        raise UserError(
            "lora_target_modules: null, and this model has no linear layer in its language model; "
            "name layers"
        )
    pattern = layers_pattern(layer_names)
    peft_config.target_modules = pattern
    keys.lora_target_modules = pattern
    return [
        f"lora_target_modules: none named, so every linear layer of the language model: "
        f"{', '.join(layer_names)}; vision tower and projector are frozen"
    ]


def _lacks_layers(peft_config: Any) -> bool:
    """Return whether this is a LoRA config that names neither layers nor parameters."""
    peft_type = getattr(peft_config, "peft_type", None)
    is_lora = str(getattr(peft_type, "value", peft_type)) == "LORA"
    if not is_lora:
        return False
    names_parameters = bool(getattr(peft_config, "target_parameters", None))
    return not peft_config.target_modules and not names_parameters
