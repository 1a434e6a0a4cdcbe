"""All patches of libraries: what the library does, why that is not enough, and when the patch can go.

A `Patch` replaces an attribute of a library, because the library leaves no argument and no method to override for it.
`tests/unit/utils/test_compat.py` holds that the attributes exist in the installed versions, and that nothing is
replaced past this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One attribute of a library that is given another value."""

    owner: str  # the module or class that has it
    name: str
    upstream: str  # what the library does there, and why that is not enough
    until: str  # what has to happen for the patch to go

    @contextmanager
    def replaced_by(self, value: Any, *, on: Any) -> Iterator[None]:
        """Inside the block the attribute of `on`, the owner or an object of that class, is `value`.

        After it, an attribute that `on` has only from its class is deleted from `on`, so that it is not saved with it.
        """
        own = self.name in vars(on)
        original = vars(on)[self.name] if own else getattr(on, self.name)  # a static method as such
        setattr(on, self.name, value)
        try:
            yield
        finally:
            if own:
                setattr(on, self.name, original)
            else:
                delattr(on, self.name)

    def install(self, value: Any, *, on: Any) -> None:
        """Set the attribute for good: of an object that is ours to change, or of a module in this process."""
        assert hasattr(on, self.name), f"{type(on).__name__} has no {self.name}"
        setattr(on, self.name, value)


GENERATION_CLASS = Patch(
    owner="trl.trainer.grpo_trainer",
    name="VLLMGeneration",
    upstream="GRPOTrainer.__init__ builds this class by name, and takes none as an argument; ours corrects prompts, "
    "weight sync and caches.",
    until="GRPOTrainer takes a generation class, or has a method that builds it.",
)
ENGINE = Patch(
    owner="trl.generation.vllm_generation",
    name="LLM",
    upstream="VLLMGeneration._init_vllm builds vLLM without dtype, revision, pixel limits or the mode of its "
    "log-probabilities, and takes no further arguments for it.",
    until="VLLMGeneration hands arguments of the user's on to LLM.",
)
SERVER_CLIENT = Patch(
    owner="trl.generation.vllm_generation",
    name="VLLMClient",
    upstream="VLLMGeneration._init_vllm builds this class by name. It asks a server for its health through a proxy, "
    "waits for ever where that answers with an error, and says the address with its password.",
    until="VLLMClient.check_server asks by its session, ends in time, and shows no login.",
)
SHARD_LOADING = Patch(
    owner="transformers.trainer",
    name="deepspeed_load_checkpoint",
    upstream="DeepSpeed unpickles a rank's file with whatever code it asks for; no argument says weights_only.",
    until="DeepSpeed's checkpoint engines load with weights_only=True.",
)
IMAGE_PROCESSING = Patch(
    owner="transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor",
    name="preprocess",
    upstream="Trainer and engine both process every copy of an image; the processor has no cache and no place for one. "
    "The trainer's is replaced during a call alone, since the same object is saved with the model.",
    until="Transformers and vLLM take images that are processed already, in patches.",
)
HUB_OFFLINE = Patch(
    owner="huggingface_hub.constants",
    name="HF_HUB_OFFLINE",
    upstream="The hub's library reads the variable when it is imported, before a hub that does not work was noticed. "
    "TRL, PEFT and vLLM would then each ask it for every file, and wait.",
    until="The library has a function that switches it offline, or gives a hub up after its first failure.",
)
DATASETS_OFFLINE = Patch(
    owner="datasets.config",
    name="HF_HUB_OFFLINE",
    upstream="`datasets` has a copy of the same setting, made when it is imported.",
    until="`datasets` reads the setting of the hub's library.",
)
VISION_FEATURES = Patch(
    owner="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel",
    name="get_image_features",
    upstream="The vision tower sees every copy of an image. Ours takes references to distinct images and runs it once "
    "for each. TRL loads the model by its registered class, so a subclass would not be taken.",
    until="The model takes features in place of pixels.",
)
VISION_ATTENTION = Patch(
    owner="transformers.PretrainedConfig",
    name="_attn_implementation",
    upstream="Under sdpa the tower calls the attention once per window. One of our own is registered, but "
    "set_attn_implementation would take its name, which has to contain flash, for a kernel to install.",
    until="Transformers hands the bounds of windows to sdpa, or batches windows of one size itself.",
)
TEXT_ATTENTION = Patch(
    owner="transformers.PretrainedConfig",
    name="_attn_implementation",
    upstream="The attention of a shared prompt is registered on top of the model's own, whatever that is, and has to "
    "be chosen for a model that is loaded already. set_attn_implementation checks names against those that it knows.",
    until="set_attn_implementation takes every registered name.",
)
SHARED_MEMORY = Patch(
    owner="vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed",
    name="make_group_name",
    upstream="Under a launcher every engine that a CPU divides gives its shared memory the same name, and removes "
    "it only at a regular exit of each process: a second run beside it, or after one that was killed, cannot start.",
    until="The name has something of the run in it, and vLLM removes it when all ranks have joined.",
)
SHARDED_BUILD = Patch(
    owner="transformers.integrations.deepspeed",
    name="_hf_deepspeed_config_weak_ref",
    upstream="Under ZeRO-3 every model is built in shards, also one on the meta device, whose parameters then have the "
    "shape (0,). The public way out, unset_hf_deepspeed_config, cannot be undone without the config object.",
    until="Transformers leaves models on the meta device whole.",
)
