"""What keys of TRL and Transformers take.

These are the keys that configs/train/annotated.yaml explains, and those that our own code computes
with. The types are narrower than the libraries' own annotations, or wider where a key takes more
than it declares. The value of any other key of theirs is left to their own checks.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from adora_vl.utils.convert import Name

_Kernel = Annotated[str, Field(pattern="/", description="a kernel of the hub, OWNER/NAME")]
_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]


TYPE_BY_TRL_KEY: dict[str, Any] = {
    **dict.fromkeys(("model_name_or_path", "output_dir"), Name | None),
    **dict.fromkeys(
        (
            "vllm_tensor_parallel_size",
            "max_completion_length",
            "per_device_train_batch_size",
            "num_iterations",
            "gradient_accumulation_steps",
            "lora_r",
            "lora_alpha",
            "save_steps",
            "ref_model_sync_steps",
            "ddp_timeout",
        ),
        _Count,
    ),
    **dict.fromkeys(
        (
            "vllm_max_model_length",
            "steps_per_generation",
            "generation_batch_size",
            "eval_steps",
            "save_total_limit",
            "dataloader_prefetch_factor",
        ),
        _Count | None,
    ),
    **dict.fromkeys(
        (
            "temperature",
            "repetition_penalty",
            "num_train_epochs",
            "logging_steps",
            "vllm_server_timeout",
        ),
        _Positive,
    ),
    **dict.fromkeys(
        (
            "learning_rate",
            "max_grad_norm",
            "weight_decay",
            "epsilon",
            "beta",
            "entropy_coef",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        ),
        _NotNegative,
    ),
    "epsilon_high": _NotNegative | None,
    **dict.fromkeys(("delta", "off_policy_mask_threshold"), _Positive | None),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), _Positive),
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "top_p", "top_entropy_quantile"),
        Annotated[float, Field(gt=0, le=1)],
    ),
    "vllm_importance_sampling_clip_max": _Positive | None,
    "vllm_importance_sampling_clip_min": _NotNegative | None,
    "pad_to_multiple_of": _Count | Literal["auto"] | None,
    "num_generations": Annotated[int, Field(ge=2)],
    "num_completions_to_print": Annotated[int, Field(ge=0)] | None,
    "max_steps": _Count | Literal[-1],
    "top_k": Annotated[int, Field(ge=-1)],
    "min_p": Annotated[float, Field(ge=0, le=1)] | None,
    "ref_model_mixup_alpha": Annotated[float, Field(ge=0, le=1)],
    "dataloader_num_workers": Annotated[int, Field(ge=0)],
    **dict.fromkeys(
        ("vllm_server_port", "vllm_group_port"), Annotated[int, Field(ge=1, le=2**16 - 1)]
    ),
    "vllm_model_impl": Literal["auto", "vllm", "transformers"],
    "lora_dropout": Annotated[float, Field(ge=0, lt=1)],
    "seed": Annotated[int, Field(ge=0, le=2**32 - 1)],  # numpy's
    "data_seed": Annotated[int, Field(ge=0, le=2**32 - 1)] | None,
    "attn_implementation": Literal[
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "flex_attention",
    ]
    | _Kernel
    | None,
    "vllm_mode": Literal["colocate", "server"],
    "vllm_importance_sampling_mode": Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ],
    "loss_type": Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    "importance_sampling_level": Literal["token", "sequence"],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "scale_rewards": bool | Literal["group", "batch", "none"],
    "resume_from_checkpoint": Literal[True, False] | str | None,
}
# Keys that take a mapping, or the path of a JSON file with one.
JSON_FILE_KEYS = frozenset({"deepspeed", "fsdp_config", "accelerator_config"})
# Keys whose values are paths, or ids of the hub
PATH_KEYS = frozenset(
    {"model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint"}
)
# Keys for which the word none is not null: here it is a path, and null means to resume if there is
# a checkpoint.
KEYS_WITH_WORD_NONE = frozenset({"resume_from_checkpoint"})
NULL_VALUE_BY_KEY = {"report_to": ["none"]}  # Transformers fails on null for this key
