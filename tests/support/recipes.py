"""The shipped configs: where they lie, their accelerate configs, and the default of every key."""

from dataclasses import fields

from adora_vl.utils.cli import to_json_types, with_dotted_keys
from adora_vl.utils.convert import field_default
from tests.support.commands import CONFIG_DATACLASSES
from tests.support.paths import REPOSITORY

CONFIGS_FOLDER = REPOSITORY / "configs"
# train config -> the accelerate config that its header names
ACCELERATE_CONFIG_BY_RECIPE = {
    "smoke_cpu": "cpu",
    "demo_cpu": "cpu",
    "smoke_text_cpu": "cpu",
    "annotated": "cpu",
    "adora_7b_geo3k": "zero3",
    "grpo_7b_geo3k": "zero3",
    "adora_llm_kk": "zero3",
    "adora_3b_1gpu_lora": "gpu1",
    "adora_3b_12gb": "gpu1",
    "adora_7b_16gb_4bit": "gpu1",
    "adora_7b_24gb_4bit": "gpu1",
    "adora_3b_24gb": "gpu1",
    "adora_qwen3_vl_2b_1gpu": "gpu1",
    "adora_qwen3_vl_4b_1gpu_lora": "gpu1",
    "adora_qwen3_vl_8b_geo3k": "zero3",
    "tiny_zoom": "cpu",
}


def key_defaults() -> dict[str, object]:
    """Return the default of every key; a later dataclass does not overrule an earlier one."""
    defaults: dict[str, object] = {}
    for dataclass in CONFIG_DATACLASSES:
        for field in fields(dataclass):
            defaults.setdefault(field.name, field_default(field))
    for block in ("adora_rollouts", "adora_extensions", "adora_tool_options"):
        defaults |= {block: {}, **with_dotted_keys(block, to_json_types(defaults[block]))}
    return defaults
