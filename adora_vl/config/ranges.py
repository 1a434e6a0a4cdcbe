"""Which numbers a key accepts. One table holds our keys and those of TRL and Transformers that a run reads.

It is a table instead of metadata of the fields, because Transformers' parser hands the metadata to argparse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_LARGEST_SEED = 2**32 - 1  # numpy's


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`. Both are included, except with `above` and `below`.

    `null`: whether null is accepted too. `also`: values outside the range that have a meaning of their own.
    """

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False  # `low` itself is outside
    below: bool = False  # `high` itself is outside
    null: bool = False
    also: tuple[Any, ...] = ()

    def number(self, value: object) -> int | float | None:
        """`value` as a number in this range, or None if it is not. Text is read as a number."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
            exact = int(value) if not isinstance(value, float) else value
        except OverflowError:  # a whole number beyond every float
            return None
        except ValueError:
            try:
                number = exact = float(value)
            except ValueError:
                return None
        if not math.isfinite(number):
            return None
        if self.whole and not float(exact).is_integer():
            return None
        inside = (number > self.low if self.above else number >= self.low) and (
            number < self.high if self.below else number <= self.high
        )
        if not inside and number not in self.also:
            return None
        return int(exact) if self.whole else number

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        ends = []
        if math.isfinite(self.low):
            ends.append(f"{'above' if self.above else 'of at least'} {self.low:g}")
        if math.isfinite(self.high):
            ends.append(f"{'below' if self.below else 'at most'} {self.high:.0f}" if self.whole else self._high())
        text = f"{kind} {' and '.join(ends)}" if ends else f"{kind} that is finite"
        return " or ".join([text, *map(str, self.also), *(["null"] if self.null else [])])

    def _high(self) -> str:
        return f"{'below' if self.below else 'at most'} {self.high:g}"


def _whole(low: float, high: float = math.inf, **more: Any) -> Range:
    return Range(low, high, whole=True, **more)


_COUNT, _COUNT_OR_NULL = _whole(1), _whole(1, null=True)
_FROM_0, _FROM_0_OR_NULL = Range(0), Range(0, null=True)
_ABOVE_0, _ABOVE_0_OR_NULL = Range(0, above=True), Range(0, above=True, null=True)
_SHARE, _SOME_SHARE = Range(0, 1), Range(0, 1, above=True)
_DECAY = Range(0, 1, below=True)
_PORT, _SEED = _whole(1, 65535), _whole(0, _LARGEST_SEED)
_FINITE = Range()

_OURS = {
    "adora_synthetic_rows": _COUNT,
    "adora_mixture": _SOME_SHARE,  # each of them
    "adora_image_cache_mb": _whole(0),
    "adora_dynamic_sampling": _whole(0),
    "adora_record_every": _whole(0),
    "adora_record_gb": _ABOVE_0,
    "adora_max_bad_steps": _COUNT,
    "adora_max_ratio": Range(1, null=True),
    "adora_noisy_rollouts": Range(0, 1, below=True),
    "adora_noise_strength": _FROM_0_OR_NULL,
    "adora_noise_middle": _SHARE,
    "adora_noise_steepness": _ABOVE_0,
    "adora_replay_groups": _whole(0),
    "adora_replay_alpha": _FROM_0,
    "adora_visual_tokens": _SOME_SHARE,
    "adora_visual_scale_min": _SHARE,
    "adora_reward_timeout": _ABOVE_0_OR_NULL,
    "adora_factor": _ABOVE_0,
    "adora_tau": _SOME_SHARE,
    "adora_correct_above": _FINITE,
    "adora_truncated_at": _COUNT_OR_NULL,
    "adora_max_drift": _ABOVE_0_OR_NULL,
    "adora_vllm_max_num_batched_tokens": _COUNT,
    "adora_eval_limit": _COUNT_OR_NULL,
    "min_pixels": _COUNT_OR_NULL,
    "max_pixels": _COUNT_OR_NULL,
}
_OPTIMIZER = {
    "learning_rate": _FROM_0,
    "warmup_steps": _FROM_0,
    "weight_decay": _FROM_0,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_epsilon": _ABOVE_0,
    "max_grad_norm": _FROM_0,
    "label_smoothing_factor": _SHARE,
    "neftune_noise_alpha": _FROM_0_OR_NULL,
    "router_aux_loss_coef": _FROM_0_OR_NULL,
    "lora_r": _COUNT,
    "lora_alpha": _COUNT,
    "lora_dropout": _DECAY,
}
_LENGTHS = {
    "num_train_epochs": _ABOVE_0,
    "max_steps": _whole(1, also=(-1,)),
    "logging_steps": _ABOVE_0,
    "save_steps": _COUNT,
    "save_total_limit": _COUNT_OR_NULL,
    "eval_steps": _COUNT_OR_NULL,
    "eval_delay": _FROM_0,
    "eval_accumulation_steps": _COUNT_OR_NULL,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "generation_batch_size": _COUNT_OR_NULL,
    "steps_per_generation": _COUNT_OR_NULL,
    "torch_empty_cache_steps": _COUNT_OR_NULL,
    "seed": _SEED,
    "data_seed": _whole(0, _LARGEST_SEED, null=True),
    "dataloader_num_workers": _whole(0),
    "dataloader_prefetch_factor": _COUNT_OR_NULL,
    "ddp_bucket_cap_mb": _COUNT_OR_NULL,
    "ddp_timeout": _COUNT,
    "local_rank": _whole(-1),
    "num_completions_to_print": _whole(0, null=True),
}
_ROLLOUTS = {
    "num_generations": _whole(2),
    "num_generations_eval": _COUNT_OR_NULL,
    "max_completion_length": _COUNT,
    "max_tool_calling_iterations": _COUNT_OR_NULL,
    "temperature": _ABOVE_0,
    "top_p": _SOME_SHARE,
    "top_k": _whole(0),
    "min_p": Range(0, 1, null=True),
    "repetition_penalty": _ABOVE_0,
    "pad_to_multiple_of": _whole(1, null=True, also=("auto",)),
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _ABOVE_0,
    "vllm_gpu_memory_utilization": _SOME_SHARE,
    "vllm_max_model_length": _COUNT_OR_NULL,
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_importance_sampling_clip_max": _ABOVE_0_OR_NULL,
    "vllm_importance_sampling_clip_min": _FROM_0_OR_NULL,
    "vllm_importance_sampling_cap": _ABOVE_0_OR_NULL,
}
_LOSS = {
    "beta": _FROM_0,
    "num_iterations": _COUNT,
    "epsilon": _FROM_0,
    "epsilon_high": _FROM_0_OR_NULL,
    "delta": _ABOVE_0_OR_NULL,
    "sapo_temperature_neg": _ABOVE_0,
    "sapo_temperature_pos": _ABOVE_0,
    "vespo_k_pos": _FROM_0,
    "vespo_lambda_pos": _FROM_0,
    "vespo_k_neg": _FROM_0,
    "vespo_lambda_neg": _FROM_0,
    "reward_weights": _FINITE,  # each of them
    "ref_model_mixup_alpha": _SHARE,
    "ref_model_sync_steps": _COUNT,
    "top_entropy_quantile": _SHARE,
    "entropy_coef": _FROM_0,
    "entropy_coef_min": _FROM_0,
    "entropy_coef_max": _FROM_0,
    "entropy_coef_delta": _FROM_0,
    "entropy_target": _FROM_0,
    "off_policy_mask_threshold": _ABOVE_0_OR_NULL,
}
RANGES: dict[str, Range] = {**_OURS, **_OPTIMIZER, **_LENGTHS, **_ROLLOUTS, **_LOSS}
