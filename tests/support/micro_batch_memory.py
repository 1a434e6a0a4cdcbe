"""`MicroBatchMemory`, which says how many groups fit into memory, for the 3B model with LoRA."""

from peft import LoraConfig

from adora_vl.models.activations import DtypeBytes
from adora_vl.models.peak_memory import ActivationMemory
from adora_vl.models.shape import config_for_planning, model_shape
from adora_vl.training.micro_batch_memory import MicroBatchMemory

LONGEST_ANSWER = 2048  # max_completion_length
HALF_PRECISION_BYTES = DtypeBytes(compute_bytes=2, residual_bytes=2)
LORA_OF_LINEAR_LAYERS = LoraConfig(
    r=64, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
)
SHAPE_OF_3B = model_shape(
    config_for_planning("Qwen/Qwen2.5-VL-3B-Instruct")[0], peft_config=LORA_OF_LINEAR_LAYERS
)
SHAPE_WITH_FROZEN_TOWER = model_shape(
    config_for_planning("Qwen/Qwen2.5-VL-3B-Instruct")[0],
    peft_config=LORA_OF_LINEAR_LAYERS,
    frozen=("vision_tower", "projector"),
)
ACTIVATION_MEMORY_BY_CASE = {
    "frozen tower": ActivationMemory(
        SHAPE_WITH_FROZEN_TOWER, HALF_PRECISION_BYTES, shares_vision=True
    ),
    "tower in the pass": ActivationMemory(SHAPE_OF_3B, HALF_PRECISION_BYTES),
    "no checkpoints": ActivationMemory(SHAPE_OF_3B, HALF_PRECISION_BYTES, checkpointing=False),
    "CPU": ActivationMemory(
        SHAPE_OF_3B, DtypeBytes(compute_bytes=4, residual_bytes=4), on_gpu=False
    ),
}


def micro_batch_memory_of_3b(
    activation_memory: str = "frozen tower",
    *,
    shares_prompts: bool = True,
    longest: int = LONGEST_ANSWER,
) -> MicroBatchMemory:
    """Return the `MicroBatchMemory` of the 3B model: its `split` divides groups.

    Args:
        activation_memory: a case of `ACTIVATION_MEMORY_BY_CASE`, which predicts the memory.
        shares_prompts: whether the rows of a group share their prompt in a packed pass.
        longest: the most tokens of an answer, for which memory is planned.
    """
    return MicroBatchMemory(
        make_activation_memory=lambda: ACTIVATION_MEMORY_BY_CASE[activation_memory],
        longest_completion=longest,
        shares_prompts=lambda: shares_prompts,
        masks_padding=True,
    )
