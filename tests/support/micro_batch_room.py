"""The room of micro-batches of the 3B model with adapters."""

from peft import LoraConfig

from adora_vl.models.activations import Dtypes, Learner
from adora_vl.models.shape import config_for_planning, describe
from adora_vl.training.micro_batch_room import MicroBatchRoom

LONGEST = 2048  # max_completion_length
HALF = Dtypes(compute=2, stream=2)
ADAPTERS = LoraConfig(r=64, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
SHAPE = describe(config_for_planning("Qwen/Qwen2.5-VL-3B-Instruct")[0], peft_config=ADAPTERS)
LEARNERS = {
    "frozen tower": Learner(SHAPE, HALF, features=True),
    "tower in the pass": Learner(SHAPE, HALF),
    "no checkpoints": Learner(SHAPE, HALF, checkpointing=False),
    "CPU": Learner(SHAPE, Dtypes(compute=4, stream=4), accelerator=False),
}


def room(
    learner: str = "frozen tower", *, shares_prompts: bool = True, longest: int = LONGEST
) -> MicroBatchRoom:
    """Return the room for answers of `longest` tokens, by the memory of one of `LEARNERS`."""
    return MicroBatchRoom(lambda: LEARNERS[learner], longest, lambda: shares_prompts, masked=True)
