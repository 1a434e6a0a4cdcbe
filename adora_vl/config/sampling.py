"""How rollouts are sampled: what `generation_kwargs` may add to the keys, and what the ratio to the engine can lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from adora_vl.utils.errors import UserError, did_you_mean

COOLEST = 0.01  # vLLM samples at no lower temperature, and takes 0 for the likeliest token
# Parameters of vLLM and of Transformers that a key says, by that key
_KEYS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")},
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "num_generations"),
    "cache_implementation": "cache_implementation",
}
# Those that the trainer sets, since it reads what comes of them, or takes another way of sampling for granted
_OWN = {
    "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids",
    "flat_logprobs", "output_kind", "stream_interval", "skip_clone", "trace_decode_token_ids", "do_sample", "num_beams",
    "pad_token_id", "bos_token_id", "eos_token_id", "return_dict_in_generate", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states", "stop_strings", "disable_compile",
}  # fmt: skip
# They move probability between the tokens that are left, as a temperature does; a ban or a filter takes tokens away
_SHIFTS = {"presence_penalty", "frequency_penalty", "logit_bias", "thinking_token_budget", "extra_args"}
_FILTERS = {"allowed_token_ids", "bad_words", "structured_outputs", "min_tokens"}
_EVERY = GenerationConfig()


def engine_scores_raw(temperature: float, repetition_penalty: float, further: Mapping[str, Any]) -> bool:
    """Whether the engine can be asked for log-probabilities before filters and bans, as the trainer computes them: not
    where temperature or penalties have changed what it samples from. `further`: `generation_kwargs`.
    """
    return (temperature, repetition_penalty) == (1.0, 1.0) and not _SHIFTS & {*further}


def check_sampling_keys(config: Any) -> None:
    """Refuse `generation_kwargs` that contradict a key, and sampling that the trainer could not account for. Raises
    `UserError`.
    """
    given = dict(config.generation_kwargs or {})
    for name, value in given.items():
        if name in _KEYS:
            raise UserError(f"generation_kwargs: {name}: {value} is what the key {_KEYS[name]} says; set that one")
        if name in _OWN:
            raise UserError(f"generation_kwargs: {name}: {value} is for the trainer to set; leave it out")
        if not config.use_vllm and not hasattr(_EVERY, name):
            meant = did_you_mean(name, [known for known in vars(_EVERY) if not known.startswith("_")])
            raise UserError(
                f"generation_kwargs: {name}: {value} is nothing that Transformers knows{meant}; leave it out"
            )
    if "structured_outputs" in given and config.vllm_structured_outputs_regex:
        raise UserError(
            "generation_kwargs: structured_outputs contradicts vllm_structured_outputs_regex; leave out one"
        )
    if not config.use_vllm:
        return
    if config.temperature < COOLEST:
        raise UserError(
            f"temperature: {config.temperature:g} is below {COOLEST}: vLLM would sample at another one than the "
            f"trainer computes with; set {COOLEST} or more"
        )
    lost, mode = _cut_off(config), config.vllm_importance_sampling_mode
    if lost and config.vllm_importance_sampling_correction and mode.startswith("sequence"):
        raise UserError(
            f"{lost}, and vllm_importance_sampling_mode: {mode} multiplies this over a whole answer; set it to "
            "token_truncate, or sample at temperature: 1.0 without penalties"
        )


def sampling_needs(config: Any) -> list[str]:
    """What the sampling costs, for the first lines of the run."""
    lost = _cut_off(config)
    return [lost] if lost and config.vllm_importance_sampling_correction else []


def _cut_off(config: Any) -> str:
    """What the ratio to the engine lacks; empty for nothing."""
    given = dict(config.generation_kwargs or {})
    if not config.use_vllm or engine_scores_raw(config.temperature, config.repetition_penalty, given):
        return ""
    filters = {
        f"top_p: {config.top_p}": config.top_p < 1,
        f"top_k: {config.top_k}": (config.top_k or 0) > 0,
        f"min_p: {config.min_p}": bool(config.min_p),
        "vllm_structured_outputs_regex": bool(config.vllm_structured_outputs_regex),
        **{f"generation_kwargs: {name}": name in given for name in sorted(_FILTERS)},
    }
    found = next((name for name, on in filters.items() if on), None)
    if found is None:
        return ""
    return (
        f"{found} with another temperature than 1, or a penalty: each token's ratio to the engine lacks the share that "
        "was cut off"
    )
