"""The memory that a run will need on each card, computed from shapes alone.

Every function is a pure formula in bytes. Constants that no formula gives are marked as assumed.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from adora_vl.config.batch_plan import unit_size
from adora_vl.config.keys import Recompute
from adora_vl.config.sharding import Sharding
from adora_vl.config.states import States, dtypes_of, states
from adora_vl.models import activations
from adora_vl.models.activations import (
    FLOAT,
    LAYER_BACKWARD,
    ActivationMemory,
    DtypeBytes,
    MicroBatch,
    PassSize,
    PeakCandidate,
    usable_bytes,
)
from adora_vl.models.families import LANGUAGE_MODEL
from adora_vl.models.shape import PATCHES_A_PASS, ModelShape
from adora_vl.packing.shared_prompt import sharing_pays
from adora_vl.utils.files import GIB

# assumed: activations of a prefill step, CUDA graphs, the encoder cache; vLLM measures it itself
WORKSPACE = 2 * GIB
CPU_WORKSPACE = 2**29  # assumed likewise for vLLM's CPU build
ASLEEP = 3 * 2**29  # assumed: what sleep level 2 leaves behind (CUDA graphs, buffers)


@dataclass(frozen=True)
class Engine:
    """Settings of a colocated vLLM engine that its memory depends on."""

    utilization: float  # share of the GPU's memory
    dtype_bytes: int
    max_length: int
    max_sequences: int
    tensor_parallel: int = 1
    sleep: bool = False
    # bytes of keys and values on a CPU (VLLM_CPU_KVCACHE_SPACE); None on a GPU
    cpu_cache: int | None = None


@dataclass(frozen=True)
class EngineMemory:
    """How an engine that is awake divides its share of one card, in bytes."""

    weights: int
    workspace: int
    cache: int  # keys and values; negative where the weights alone exceed the engine's share
    # rollouts of full length that fit into the cache together, at most `max_sequences`
    concurrent: int


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Return bytes of the keys and values of all layers for one token, on one card.

    Heads are divided over the cards of a tensor-parallel engine, but a card has at least one.
    """
    text = shape.text
    kv_heads_per_card = max(1, text.kv_heads // tensor_parallel)
    values_per_layer = 2 * kv_heads_per_card * text.head_size  # a key and a value
    return text.layers * values_per_layer * dtype_bytes


def engine_memory(shape: ModelShape, engine: Engine, card: int) -> EngineMemory:
    """Return how vLLM divides its share of a card of `card` bytes."""
    weights = shape.base_bytes(engine.dtype_bytes) // engine.tensor_parallel
    if shape.four_bit_parameters:  # beside its base it holds the adapter
        weights += shape.trained_parameters * engine.dtype_bytes
    if engine.cpu_cache is None:  # on a GPU the cache is what the share has left
        workspace = WORKSPACE
        cache = int(engine.utilization * card) - weights - workspace
    else:
        workspace = CPU_WORKSPACE
        cache = engine.cpu_cache
    token_bytes = cache_bytes_per_token(shape, engine.dtype_bytes, engine.tensor_parallel)
    cached_tokens = max(cache, 0) // token_bytes
    full_rollouts = cached_tokens // max(engine.max_length, 1)
    return EngineMemory(
        weights=weights,
        workspace=workspace,
        cache=cache,
        concurrent=min(full_rollouts, engine.max_sequences),
    )


CONTEXT = 3 * GIB // 2  # assumed: CUDA context, cuBLAS and NCCL buffers
FRAGMENTATION = 0.05  # assumed: share of all else that the allocator cannot use
MOST_IMAGE_TOKENS = 16384  # of the published processors
# Components of the engine: vLLM stays within its share, so fragmentation adds nothing to them.
_ENGINE_COMPONENTS = (
    "engine weights",
    "engine workspace",
    "engine asleep",
    "KV cache",
)
_PIXEL_VALUE_BYTES = 4  # pixel_values are float32


@dataclass(frozen=True)
class Sharing:
    """What a step computes only once for all rollouts of a group (docs/speed.md)."""

    images: bool = False  # the pixels of their image are held once
    vision: bool = False  # the vision tower sees their image once
    prompts: bool = False  # their prompt is computed once, where that is less work


@dataclass(frozen=True)
class Setup:
    """Everything about a run that its memory depends on."""

    shape: ModelShape
    sharding: Sharding
    batch: MicroBatch  # as if every sequence had an image and a prompt of its own
    # sequences of one rank in one generation: their pixels stay on the GPU until all are learned
    # from
    generation: int
    generations: int = 1  # sequences of a group
    sharing: Sharing = Sharing()
    mixed: bool = True  # bf16 or fp16
    checkpointing: bool = True
    recompute: Recompute = "all"  # which layers gradient checkpointing recomputes
    masked: bool = True  # attention with a padding mask (SDPA), not flash attention
    reference: bool = False
    engine: Engine | None = None
    accelerator: bool = True  # a GPU: its context, its kernels
    # of an optimizer step: at the second all gradients are there from the beginning
    micro_batches: int = 2

    @property
    def micro_batch(self) -> MicroBatch:
        """The batch as it is computed.

        What belongs to one problem counts once, by the same rules as in the trainer.
        """
        batch = self.batch
        unit = unit_size(batch.sequences, self.generations)
        units = batch.sequences // unit
        completion_lengths = [[batch.completion_tokens] * unit] * units
        prompt_lengths = [batch.prompt_tokens] * units
        packed = (
            self.sharing.prompts and unit > 1 and sharing_pays(prompt_lengths, completion_lengths)
        )
        shares_anything = self.sharing.vision or packed
        return replace(batch, sequences_per_problem=unit if shares_anything else 1, packed=packed)

    @property
    def images(self) -> int:
        """The number of images of one rank in one generation."""
        if not self.sharing.images:
            return self.generation
        return -(-self.generation // self.generations)  # one for each group, rounded up

    @property
    def swaps(self) -> bool:
        """Whether the 4-bit base leaves the card while the engine is awake (`FrozenBase`).

        Then the card holds one copy of it, and not two.
        """
        return bool(self.shape.four_bit_parameters and self.engine and self.engine.sleep)

    @property
    def dtypes(self) -> DtypeBytes:
        """The sizes of the dtypes in which a pass computes and keeps its residual stream."""
        return dtypes_of(self.shape, self.sharding, mixed=self.mixed)

    @property
    def activation_memory(self) -> ActivationMemory:
        """The model as it learns."""
        return ActivationMemory(
            shape=self.shape,
            dtypes=self.dtypes,
            checkpointing=self.checkpointing,
            reads_features=frozen_tower(self).pass_bytes > 0,
            on_gpu=self.accelerator,
        )

    @property
    def size(self) -> PassSize:
        """The size of the pass over a micro-batch."""
        return self.micro_batch.pass_size(self.shape.merge_size, has_padding_mask=self.masked)


@dataclass(frozen=True)
class Prediction:
    """Bytes by component for each phase of a step on one card."""

    phases: dict[str, dict[str, int]]
    engine: EngineMemory | None
    states: States
    recomputed: int  # layers of the language model that the backward pass recomputes

    @property
    def peak_phase(self) -> str:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        """The memory of that phase, in bytes."""
        return sum(self.phases[self.peak_phase].values())


def predict(setup: Setup, card: int) -> Prediction:
    """Predict what a card of `card` bytes holds in each phase of a step.

    The phases are the rollouts, forward and backward, the pass through a frozen vision tower, and
    the optimizer step.
    """
    shape = setup.shape
    training = states(shape, sharding=setup.sharding, reference=setup.reference, mixed=setup.mixed)
    engine = engine_memory(shape, setup.engine, card) if setup.engine else None
    tower = frozen_tower(setup)
    resident = {  # in every phase
        "weights": training.weights,
        "optimizer": training.optimizer,
        "reference model": training.reference,
    }
    awake, asleep = _engine_parts(setup, engine)
    if setup.swaps:
        awake["weights"] = training.weights - shape.base_bytes(shape.weight_bytes)
    patches = setup.images * setup.batch.image_tokens * shape.merge_size**2
    pixels = patches * _stored_patch_bytes(setup)
    # Under ZeRO-3 a tensor is gathered whole before it is sent to the engine.
    synced = shape.largest_tensor * setup.dtypes.residual if setup.sharding.stage == 3 else 0
    # DeepSpeed allocates its gradients once; torch gives them back after each step
    lasting_gradients = training.gradients if setup.sharding.stage is not None else 0
    held_while_learning = {
        **resident,
        **asleep,
        "gathered weights": training.gathered,
        "pixels": pixels,
        "image features": tower.feature_bytes,
    }
    recomputed = recomputed_layers(
        setup, card, sum(held_while_learning.values()) + training.gradients
    )
    phases = {
        "rollouts": {
            **resident,
            "gradients": lasting_gradients,
            **awake,
            "weights on their way": synced,
        },
        "forward and backward": {
            **held_while_learning,
            **_learning_memory(setup, training.gradients, recomputed),
        },
    }
    if tower.pass_bytes:
        phases["frozen vision tower"] = {
            **resident,
            **asleep,
            "gradients": training.gradients,
            "gathered weights": training.gathered,
            "pixels": pixels,
            "image features": tower.feature_bytes,
            "vision": tower.pass_bytes,
        }
    phases["optimizer step"] = {
        **resident,
        **asleep,
        "gradients": training.gradients,
        "pixels": pixels,
        "step": training.step,
    }
    return Prediction(
        phases={
            phase: _with_overhead(component_bytes, setup)
            for phase, component_bytes in phases.items()
        },
        engine=engine,
        states=training,
        recomputed=recomputed,
    )


def _stored_patch_bytes(setup: Setup) -> int:
    """Return the bytes of a patch that wait on the card until its image is learned from.

    They are one frame in bytes where images are stored once (`ImageBank`), else float32 numbers.
    """
    patch_values = setup.shape.patch_values
    if setup.sharing.images:
        return patch_values // setup.shape.frames
    return patch_values * _PIXEL_VALUE_BYTES


def recomputed_layers(setup: Setup, card: int, held_bytes: int) -> int:
    """Return how many layers of the language model the backward pass recomputes.

    It is the rule of the trainer, which knows the lengths of each micro-batch and measures what is
    free; here all have the length of the longest, and what is free is predicted.

    `held_bytes`: of weights, gradients and all else that the card holds during the pass.
    """
    layers = setup.shape.text.layers
    if not setup.checkpointing:
        return 0
    if isinstance(setup.recompute, int):
        return min(setup.recompute, layers)
    # the memory of a CPU is not for this process alone
    if setup.recompute == "all" or not setup.accelerator:
        return layers
    free = card - CONTEXT - held_bytes
    return setup.activation_memory.fewest_recomputed_layers(setup.size, usable_bytes(card, free))


class FrozenTowerMemory(NamedTuple):
    """Bytes of a frozen vision tower that sees each image of a generation once."""

    feature_bytes: int  # of all images, which are kept for the generation
    pass_bytes: int  # the most that one pass over `PATCHES_A_PASS` patches holds


def frozen_tower(setup: Setup) -> FrozenTowerMemory:
    """Return what a frozen vision tower takes where it sees each image of a generation once.

    A pass is taken to hold what a block would save for its backward, which is more than it does
    (0.7 of that for the 7B model). Any other tower takes neither: both are 0.
    """
    shape = setup.shape
    tower = shape.vision
    is_trained = (
        shape.trained_by_component["vision_tower"] or shape.trained_by_component["projector"]
    )
    if tower is None or not setup.sharing.vision or is_trained:
        return FrozenTowerMemory(feature_bytes=0, pass_bytes=0)
    image_tokens = setup.images * setup.batch.image_tokens
    entered_layers = (
        1 + shape.deepstack_layers
    )  # a token has features for each layer that it enters at
    features = image_tokens * shape.text.width * entered_layers * setup.dtypes.compute
    patches_per_image = setup.batch.image_tokens * shape.merge_size**2
    # A pass has at least one whole image.
    patches = min(setup.images * patches_per_image, max(PATCHES_A_PASS, patches_per_image))
    inputs = patches * shape.patch_values * (_PIXEL_VALUE_BYTES + setup.dtypes.compute)
    block = activations.vision_block_bytes(tower, patches, setup.dtypes)
    return FrozenTowerMemory(feature_bytes=features, pass_bytes=inputs + block)


def _learning_memory(setup: Setup, gradients: int, recomputed: int) -> dict[str, int]:
    """Return the gradients and activations of a micro-batch at their peak, in bytes by component.

    The peak is in the LM head or in the costliest layer, whichever holds more. `recomputed`: the
    layers of the language model that gradient checkpointing recomputes.
    """
    activation_memory = setup.activation_memory
    size = setup.size
    candidates = activation_memory.peak_candidates(size, recomputed)
    # Mostly all gradients are there from the beginning; else they come as the layers go back.
    candidates_and_gradients = [(candidate, gradients) for candidate in candidates]
    if setup.sharding.stage is None and setup.micro_batches == 1:
        candidates_and_gradients = _with_first_gradients(setup, candidates, gradients, recomputed)
    peak, gradient_bytes = max(
        candidates_and_gradients,
        key=lambda pair: pair[0].transient_bytes + pair[0].kept_bytes + pair[1],
    )
    mask, vision = activation_memory.mask_and_vision(size, recomputed)
    return {
        "gradients": gradient_bytes,
        "activations": peak.kept_bytes,
        "attention mask": mask,
        "vision": vision,
        peak.name: peak.transient_bytes,
    }


def _with_first_gradients(
    setup: Setup, candidates: list[PeakCandidate], gradients: int, recomputed: int
) -> list[tuple[PeakCandidate, int]]:
    """Return the moments where an optimizer step's first micro-batch may peak, with its gradients.

    Gradients come as the layers go back, and activations go. So the peak may lie where the first
    layer goes back, where one in between does, or at the end.

    Args:
        setup: the run, which computes one micro-batch per optimizer step, without DeepSpeed.
        candidates: those of the pass, without gradients.
        gradients: bytes of all gradients, as they are at the end of the pass.
        recomputed: layers of the language model that gradient checkpointing recomputes.
    """
    shape = setup.shape
    activation_memory = setup.activation_memory
    tied_head = activation_memory.tied_head_gradient
    head = activation_memory.head_gradient
    parameter_bytes = FLOAT if shape.has_adapters else shape.weight_bytes
    layers = shape.text.layers
    # Whatever is counted beyond one number per trained parameter is there from the start. The head's
    # gradient comes first; one that waits for the embedding's is in each candidate instead.
    at_start = gradients - shape.trained_parameters * parameter_bytes
    after_head = at_start + head - tied_head
    # The embedding's gradient comes at the end; it is as large as an untied head's.
    of_layers = (
        shape.trained_by_component[LANGUAGE_MODEL] * parameter_bytes - head - (head - tied_head)
    )
    parts = activations.saved_bytes(
        shape,
        setup.size,
        setup.dtypes,
        checkpointing=setup.checkpointing,
        recomputed=recomputed,
    )
    layer_transient = parts.layer_gradients + tied_head
    candidates_and_gradients = [(candidates[0], at_start)]
    if recomputed == layers:
        layer_transient += parts.largest_recomputed
    first_layer = PeakCandidate(LAYER_BACKWARD, layer_transient, parts.text)
    candidates_and_gradients.append((first_layer, after_head))
    for candidate in candidates[2:]:
        gradients_so_far = after_head + int(of_layers * candidate.backward_share)
        candidates_and_gradients.append((candidate, gradients_so_far))
    kept_by_last_layer = parts.text // layers
    if 0 < recomputed < layers:
        kept_by_last_layer = parts.layer_inputs // recomputed
        layer_transient += parts.recomputed_layer
    last_layer = PeakCandidate(LAYER_BACKWARD, layer_transient, kept_by_last_layer)
    before_last_layer = after_head + of_layers * (layers - 1) // layers
    candidates_and_gradients.append((last_layer, before_last_layer))
    # At the end head and embedding add up: both parts of the gradient and their sum.
    end = PeakCandidate(LAYER_BACKWARD, 3 * tied_head, 0)
    candidates_and_gradients.append((end, gradients - tied_head))
    return candidates_and_gradients


def _engine_parts(
    setup: Setup, engine: EngineMemory | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the engine's memory while it is awake and while the policy learns, by component.

    An engine that does not sleep holds the same in both. Both are empty without an engine here.
    """
    if engine is None or setup.engine is None:
        return {}, {}
    cache = max(engine.cache, 0)
    awake = {
        "engine weights": engine.weights,
        "engine workspace": engine.workspace,
        "KV cache": cache,
    }
    return awake, {"engine asleep": ASLEEP} if setup.engine.sleep else awake


def _with_overhead(component_bytes: dict[str, int], setup: Setup) -> dict[str, int]:
    """Return the parts of a phase that take memory, with what a GPU takes on top.

    A part of what torch allocates is lost in gaps between its blocks; the engine has a pool of its
    own.
    """
    bytes_by_name = dict(component_bytes)
    if setup.accelerator:
        allocated_by_torch = 0
        for name, size in component_bytes.items():
            if name not in _ENGINE_COMPONENTS:
                allocated_by_torch += size
        bytes_by_name["CUDA context"] = CONTEXT
        bytes_by_name["fragmentation"] = int(FRAGMENTATION * allocated_by_torch)
    return {name: size for name, size in bytes_by_name.items() if size}
