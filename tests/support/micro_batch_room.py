"""The room of micro-batches of the 3B model with adapters."""

from peft import LoraConfig

from adora_vl.models.activations import ActivationMemory, DtypeBytes
from adora_vl.models.shape import config_for_planning, model_shape
from adora_vl.training.micro_batch_room import MicroBatchRoom

LONGEST = 2048  # max_completion_length
HALF = DtypeBytes(compute=2, residual=2)
ADAPTERS = LoraConfig(r=64, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
SHAPE = model_shape(config_for_planning("Qwen/Qwen2.5-VL-3B-Instruct")[0], peft_config=ADAPTERS)
ACTIVATION_MEMORIES = {
    "frozen tower": ActivationMemory(SHAPE, HALF, reads_features=True),
    "tower in the pass": ActivationMemory(SHAPE, HALF),
    "no checkpoints": ActivationMemory(SHAPE, HALF, checkpointing=False),
    "CPU": ActivationMemory(SHAPE, DtypeBytes(compute=4, residual=4), on_gpu=False),
}


def room(
    activation_memory: str = "frozen tower", *, shares_prompts: bool = True, longest: int = LONGEST
) -> MicroBatchRoom:
    """Return the room for answers of `longest` tokens, by the memory of one of `ACTIVATION_MEMORIES`."""
    return MicroBatchRoom(
        lambda: ACTIVATION_MEMORIES[activation_memory], longest, lambda: shares_prompts, masked=True
    )
