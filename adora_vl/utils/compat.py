"""All patches of libraries: attributes that are replaced for want of an argument or method.

A `Patch` replaces an attribute of a library where the library leaves no argument and no method to
override for it. What the library does there, why that is not enough, and when a patch can go, is in
the table at the end of CONTRIBUTING.md, to be read when a version is raised.
`tests/unit/utils/test_compat.py` holds that the attributes exist in the installed versions, and
that nothing is replaced past this list.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One attribute of a library that is given another value."""

    owner: str
    """The module or class that has it, by its dotted name."""
    name: str
    """The name of the attribute."""

    @contextmanager
    def replaced_by(self, value: Any, *, on: Any) -> Iterator[None]:
        """Replace the attribute inside the block, and restore it after that.

        Args:
            value: what replaces it.
            on: the owner, or an object of that class. Such an object may have the attribute from
                its class alone. It then gets an attribute of its own, which is deleted after the
                block, so that it is not saved with the object.
        """
        has_own_attribute = self.name in vars(on)
        # The object's own attribute is read from `vars`, since `getattr` would unwrap a static
        # method. An attribute of its class is read by `getattr`, which fails if there is none.
        original = vars(on)[self.name] if has_own_attribute else getattr(on, self.name)
        setattr(on, self.name, value)
        try:
            yield
        finally:
            if has_own_attribute:
                setattr(on, self.name, original)
            else:
                delattr(on, self.name)

    def install(self, value: Any, *, on: Any) -> None:
        """Replace the attribute for good.

        Args:
            value: what replaces it.
            on: an object of this package, or a module of this process.
        """
        assert hasattr(on, self.name), f"{type(on).__name__} has no {self.name}"
        setattr(on, self.name, value)


GENERATION_CLASS = Patch("trl.trainer.grpo_trainer", "VLLMGeneration")
ENGINE = Patch("trl.generation.vllm_generation", "LLM")
REFERENCE_MODEL = Patch("trl.trainer.grpo_trainer", "create_model_from_path")
SERVER_CLIENT = Patch("trl.generation.vllm_generation", "VLLMClient")
SHARD_LOADING = Patch("transformers.trainer", "deepspeed_load_checkpoint")
IMAGE_PROCESSING = Patch(
    "transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor", "preprocess"
)
HUB_OFFLINE = Patch("huggingface_hub.constants", "HF_HUB_OFFLINE")
DATASETS_OFFLINE = Patch("datasets.config", "HF_HUB_OFFLINE")
VISION_FEATURES = Patch(
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel", "get_image_features"
)
VISION_ATTENTION = Patch("transformers.PretrainedConfig", "_attn_implementation")
TEXT_ATTENTION = Patch("transformers.PretrainedConfig", "_attn_implementation")
SHARED_MEMORY = Patch(
    "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed", "make_group_name"
)
LORA_PRODUCT = Patch("peft.tuners.lora.layer.Linear", "forward")
LORA_INPUT = Patch("peft.tuners.lora.layer.Linear", "_cast_input_dtype")
SHARDED_BUILD = Patch("transformers.integrations.deepspeed", "_hf_deepspeed_config_weak_ref")
