"""Which words a key accepts, for keys whose wrong words Transformers' parser or TRL would find late or never."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from adora_vl.errors import nearest

_MANY = 12  # as many names still fit into one line
_LEVELS = ("token", "sequence")
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# Keys that TRL and Transformers declare as plain text. `_OF_TRUTH` says what TRL makes of true and false.
NAMES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": _LEVELS,
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": _MODES,
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "attn_implementation": (
        "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention",
    ),
}  # fmt: skip
_OF_TRUTH = {"scale_rewards": {True: "group", False: "none"}, "include_num_input_tokens_seen": {True: "all"}}
_OFF = ("off", "no", "none")  # a bare `off` or `no` in YAML is false


def _criteria() -> tuple[str, ...]:
    from adora_vl.advantage.adora import CRITERIA

    return tuple(CRITERIA)


def _trackers() -> tuple[str, ...]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return ("none", "all", *INTEGRATION_TO_CALLBACK)


# Their registries take seconds to import, which `first_look` does without.
_REGISTERED = {"adora_criteria": _criteria, "report_to": _trackers}


def names_of(key: str, hint: Any, choices: Any) -> tuple[str, ...]:
    """The words that `key` accepts, from the table, its choices, or its annotation. Empty if any text is accepted."""
    if key in NAMES:
        return NAMES[key]
    if choices:
        return tuple(map(str, choices))
    if key in _REGISTERED:
        return _REGISTERED[key]()
    enums = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, Enum)]
    return tuple(str(each.value) for each in enums[0]) if enums else ()


def as_name(key: str, value: object, known: tuple[str, ...]) -> str | None:
    """`value` as one of `known`, or None if it is none of them."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        word = str(value).lower() == "true"
        of_truth = _OF_TRUTH.get(key, {}).get(word)
        value = of_truth or (next((name for name in _OFF if name in known), value) if not word else value)
    if key == "attn_implementation" and isinstance(value, str) and "/" in value:
        return value  # a kernel of the hub
    return value if isinstance(value, str) and value in known else None


def expected_names(value: object, known: tuple[str, ...]) -> str:
    """The names that would be right, or a few if there are many, and the nearest one."""
    close = nearest(str(value), known)
    if len(known) <= _MANY:
        return f"one of {', '.join(known)}{close}"
    return f"one of the {len(known)} names such as {', '.join(known[:3])}{close}"
