"""The sum: how much memory of a GPU each component takes in each phase of a step, and what would still fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from adora_vl.config.arithmetic import unit_size
from adora_vl.dedup.shared_prompt import sharing_pays
from adora_vl.memory import GIB
from adora_vl.memory.activations import Dtypes, MicroBatch, head_saved, head_transient, mask_bytes, saved
from adora_vl.memory.engine import ASLEEP, Engine, EngineMemory, engine_memory
from adora_vl.memory.model import ModelShape
from adora_vl.memory.sharding import Sharding
from adora_vl.memory.states import States, states

CONTEXT = 3 * GIB // 2  # assumed: CUDA context, cuBLAS and NCCL buffers
FRAGMENTS = 0.05  # assumed: share of all else that the allocator cannot use
_ENGINE = ("engine weights", "engine workspace", "engine asleep", "KV cache")  # vLLM stays within its share
_PIXEL = 4  # pixel_values are float32


@dataclass(frozen=True)
class Sharing:
    """What a step does only once for all rollouts of a group (docs/speed.md)."""

    images: bool = False  # the pixels of their image are held once
    vision: bool = False  # the vision tower sees their image once
    prompts: bool = False  # their prompt is computed once, where that is less work


@dataclass(frozen=True)
class Setup:
    """Everything about a run that its memory depends on."""

    shape: ModelShape
    sharding: Sharding
    batch: MicroBatch  # as if every sequence had an image and a prompt of its own
    generation: int  # sequences of one rank in one generation: their pixels stay on the GPU until all are learned from
    generations: int = 1  # sequences of a group
    sharing: Sharing = Sharing()
    compute_bytes: int = 2
    mixed: bool = True  # bf16 or fp16
    checkpointing: bool = True
    masked: bool = True  # attention with a padding mask (SDPA), not flash attention
    reference: bool = False
    engine: Engine | None = None
    accelerator: bool = True  # a GPU: its context, its kernels

    @property
    def micro_batch(self) -> MicroBatch:
        """The batch as it is computed: what belongs to one problem counts once, by the trainer's own rules."""
        batch = self.batch
        unit = unit_size(batch.sequences, self.generations)
        completions = [[batch.completion_tokens] * unit] * (batch.sequences // unit)
        prompts = [batch.prompt_tokens] * len(completions)
        packed = self.sharing.prompts and unit > 1 and sharing_pays(prompts, completions)
        return replace(batch, unit=unit if self.sharing.vision or packed else 1, packed=packed)

    @property
    def images(self) -> int:
        """The number of images of one rank in one generation."""
        return -(-self.generation // self.generations) if self.sharing.images else self.generation

    @property
    def dtypes(self) -> Dtypes:
        # DeepSpeed casts the weights, and the residual stream with them; else they stay as they are
        cast = self.sharding.stage is not None and self.mixed
        return Dtypes(self.compute_bytes, 2 if cast else self.shape.weight_bytes)


@dataclass(frozen=True)
class Prediction:
    """Bytes by component for each phase of a step on one card; the engine as it divides its share."""

    phases: dict[str, dict[str, int]]
    engine: EngineMemory | None
    states: States

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.phases[self.peak_phase].values())


def predict(setup: Setup, card: int) -> Prediction:
    """What a card of `card` bytes would hold in the rollouts, in forward and backward, and in the optimizer step."""
    held = states(setup.shape, setup.sharding, reference=setup.reference, mixed=setup.mixed)
    engine = engine_memory(setup.shape, setup.engine, card) if setup.engine else None
    resident = {"weights": held.weights, "optimizer": held.optimizer, "reference model": held.reference}
    awake, asleep = _engine_parts(setup, engine)
    pixels = setup.images * setup.batch.image_tokens * setup.shape.merge**2 * setup.shape.patch_values * _PIXEL
    synced = setup.shape.largest_tensor * setup.dtypes.stream if setup.sharding.stage == 3 else 0
    # DeepSpeed allocates its gradients once; torch gives them back after each step
    standing = held.gradients if setup.sharding.stage is not None else 0
    phases = {
        "rollouts": {**resident, "gradients": standing, **awake, "weights on their way": synced},
        "forward and backward": {
            **resident, **asleep, "gradients": held.gradients, "gathered weights": held.gathered,
            "pixels": pixels, **_learning(setup),
        },
        "optimizer step": {
            **resident, **asleep, "gradients": held.gradients, "pixels": pixels, "step": held.step,
        },
    }  # fmt: skip
    return Prediction({name: _with_overhead(parts, setup) for name, parts in phases.items()}, engine, held)


def _learning(setup: Setup) -> dict[str, int]:
    """Activations of a micro-batch at their peak, which is in the LM head or in the costliest layer."""
    shape, batch, dtypes = setup.shape, setup.micro_batch, setup.dtypes
    kept = saved(shape, batch, dtypes, checkpointing=setup.checkpointing, masked=setup.masked and not batch.packed)
    head = head_transient(shape, batch, dtypes, compact=setup.accelerator)
    layer = kept.recomputed + kept.layer_gradients
    return {
        "activations": kept.text + head_saved(shape, batch, dtypes, compact=setup.accelerator),
        "attention mask": mask_bytes(batch, dtypes, accelerator=setup.accelerator)
        if setup.masked and not batch.packed
        else 0,
        "vision": kept.vision,
        "logits": head if head >= layer else 0,
        "one layer going back": layer if layer > head else 0,
    }


def _engine_parts(setup: Setup, engine: EngineMemory | None) -> tuple[dict[str, int], dict[str, int]]:
    if engine is None or setup.engine is None:
        return {}, {}
    awake = {
        "engine weights": engine.weights,
        "engine workspace": engine.workspace,
        "KV cache": max(engine.cache, 0),
    }
    return awake, {"engine asleep": ASLEEP} if setup.engine.sleep else awake


def _with_overhead(parts: dict[str, int], setup: Setup) -> dict[str, int]:
    if not setup.accelerator:
        return {name: size for name, size in parts.items() if size}
    lost = int(FRAGMENTS * sum(size for name, size in parts.items() if name not in _ENGINE))
    return {name: size for name, size in {**parts, "CUDA context": CONTEXT, "fragmentation": lost}.items() if size}


def fits(setup: Setup, card: int) -> bool:
    """Whether every phase fits into the GPU, and the engine has room for at least one rollout of full length."""
    prediction = predict(setup, card)
    return prediction.peak <= card and (prediction.engine is None or prediction.engine.concurrent >= 1)


def batch_sizes(setup: Setup) -> list[int]:
    """Values of per_device_train_batch_size that keep groups whole, or split them evenly, and divide a generation."""
    group, generation = setup.generations, setup.generation
    sizes = [size for size in range(1, generation + 1) if generation % size == 0]
    return [size for size in sizes if size % group == 0 or group % size == 0]


def largest_batch(setup: Setup, card: int) -> int:
    """The largest of `batch_sizes` that fits, 0 if none does. The number of rollouts per generation stays the same."""
    sizes = batch_sizes(setup)

    def good(number: int) -> bool:
        return fits(replace(setup, batch=replace(setup.batch, sequences=sizes[number - 1])), card)

    number = _largest(good, len(sizes))
    return sizes[number - 1] if number else 0


def largest_image_tokens(setup: Setup, card: int, limit: int = 16384) -> int:
    """The largest number of image tokens per prompt that fits, with the same text; 0 if not even one fits."""
    text = setup.batch.prompt_tokens - setup.batch.image_tokens

    def with_image(tokens: int) -> Setup:
        return replace(setup, batch=replace(setup.batch, image_tokens=tokens, prompt_tokens=text + tokens))

    if setup.engine is not None:  # a prompt has to leave the engine room for its completion
        limit = min(limit, setup.engine.max_length - setup.batch.completion_tokens - text)
    return _largest(lambda tokens: fits(with_image(tokens), card), max(limit, 0))


def _largest(good: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that is good, or 0. If a number is good, all smaller ones are."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
