"""Checks that the trainer can account for the way in which the engine samples."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from adora_vl.rollout.engine_settings import complete_generation_kwargs, engine_scores_raw
from adora_vl.utils.errors import UserError, describe_error, did_you_mean

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig

# vLLM raises lower temperatures to this one, and takes the likeliest token at 0.
MIN_TEMPERATURE = 0.01
# The key that sets a parameter of vLLM or Transformers, by the parameter.
_KEY_BY_PARAMETER = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "num_generations"),
    "cache_implementation": "cache_implementation",
}
# Parameters that the trainer itself sets, because it reads their results, or relies on the way of
# sampling that they would change.
_PARAMETERS_SET_BY_TRAINER = {
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "trace_decode_token_ids",
    "do_sample",
    "num_beams",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "stop_strings",
    "disable_compile",
}
# Parameters that take tokens away, whose probability the others get.
_FILTER_PARAMETERS = {"allowed_token_ids", "bad_words", "structured_outputs", "min_tokens"}
_TRANSFORMERS_DEFAULTS = GenerationConfig()


def check_sampling(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for a way of sampling that the trainer cannot account for.

    The trainer compares its log-probabilities with those of the engine, so it has to compute with
    the same temperature and filters.
    """
    generation_kwargs = dict(config.generation_kwargs or {})
    _check_generation_kwargs(generation_kwargs, use_vllm=config.use_vllm)
    _try_sampling_parameters(config, generation_kwargs)
    if "structured_outputs" in generation_kwargs and config.vllm_structured_outputs_regex:
        raise UserError(
            "generation_kwargs: structured_outputs contradicts vllm_structured_outputs_regex; "
            "leave out one"
        )
    if config.use_vllm and config.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"temperature: {config.temperature:g} is below {MIN_TEMPERATURE}: vLLM would sample at "
            f"another one than the trainer computes with; set {MIN_TEMPERATURE} or more"
        )
    filter_notes = notes_on_filters(config)
    if filter_notes and config.corrects_per_sequence:
        mode = config.vllm_importance_sampling_mode
        raise UserError(
            f"{''.join(filter_notes)}, and vllm_importance_sampling_mode: {mode} multiplies this "
            "over a whole answer; set it to token_truncate, or sample at temperature: 1.0 without "
            "penalties"
        )


def _check_generation_kwargs(generation_kwargs: Mapping[str, object], *, use_vllm: bool) -> None:
    """Raise `UserError` for a parameter of sampling that is set elsewhere, or does not exist.

    Some parameters have a key of their own, and others are set by the trainer. vLLM checks the
    names of the remaining ones itself, but Transformers ignores unknown names.
    """
    known_names = [name for name in vars(_TRANSFORMERS_DEFAULTS) if not name.startswith("_")]
    for name, value in generation_kwargs.items():
        if name in _KEY_BY_PARAMETER:
            raise UserError(
                f"generation_kwargs: {name}: {value} is what the key {_KEY_BY_PARAMETER[name]} "
                "says; set "
                "that one"
            )
        if name in _PARAMETERS_SET_BY_TRAINER:
            raise UserError(
                f"generation_kwargs: {name}: {value} is for the trainer to set; leave it out"
            )
        if not use_vllm and not hasattr(_TRANSFORMERS_DEFAULTS, name):
            raise UserError(
                f"generation_kwargs: {name}: {value} is nothing that Transformers knows"
                f"{did_you_mean(name, known_names)}; leave it out"
            )


def _try_sampling_parameters(
    config: AdoraGRPOConfig, generation_kwargs: Mapping[str, object]
) -> None:
    """Raise `UserError` for a parameter that vLLM or Transformers does not have, or refuses.

    Both would refuse it only when the first answers are sampled. A server may have another vLLM, so
    its parameters are left to it, and a machine without vLLM tries none.

    `generation_kwargs`: those of the config.
    """
    if config.has_colocated_engine and generation_kwargs and find_spec("vllm") is not None:
        from adora_vl.rollout.llm import try_sampling_parameters  # imports vLLM: seconds

        parameters = complete_generation_kwargs(generation_kwargs, banned_ids=(), is_colocated=True)
        try_sampling_parameters({"max_tokens": config.max_completion_length, **parameters})
    if config.use_vllm:
        return
    try:
        GenerationConfig(
            max_new_tokens=config.max_completion_length,
            do_sample=True,
            cache_implementation=config.cache_implementation,
            **generation_kwargs,
        ).validate()
    except (TypeError, ValueError) as error:
        key = "generation_kwargs"
        if not generation_kwargs:
            key = f"cache_implementation: {config.cache_implementation}"
        raise UserError(f"{key}: refused by Transformers ({describe_error(error)})") from error


def notes_on_filters(config: AdoraGRPOConfig) -> list[str]:
    """Return a note for the start of a run if filters make the engine's log-probabilities larger.

    With a temperature or a penalty vLLM returns log-probabilities after its filters, such as top_p.
    A filter removes tokens and gives their probability to the remaining tokens. The trainer has no
    filters, so its ratio of policy to engine is too small by the same share. For example, if top_p
    removes tokens with a probability of 0.1 in all, the ratio is 0.9 and not 1.

    The list is empty where this does not happen.
    """
    generation_kwargs = dict(config.generation_kwargs or {})
    # Without an engine that the loss depends on, there is no ratio of policy to engine.
    if not config.use_vllm or not config.loss_uses_engine_logps:
        return []
    # With such keys vLLM returns its log-probabilities from before the filters.
    if engine_scores_raw(config.temperature, config.repetition_penalty, generation_kwargs):
        return []
    filters: list[str] = []
    if config.top_p < 1:
        filters.append(f"top_p: {config.top_p}")
    # None, 0 and -1 mean that there is no such filter.
    if (config.top_k or 0) > 0:
        filters.append(f"top_k: {config.top_k}")
    if config.min_p:
        filters.append(f"min_p: {config.min_p}")
    if config.vllm_structured_outputs_regex:
        filters.append("vllm_structured_outputs_regex")
    for name in sorted(_FILTER_PARAMETERS & generation_kwargs.keys()):
        filters.append(f"generation_kwargs: {name}")
    if not filters:
        return []
    return [
        f"{filters[0]} with another temperature than 1, or a penalty: each token's ratio to the "
        "engine lacks the share that was cut off"
    ]
