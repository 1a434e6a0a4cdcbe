"""The memory and disk space that a run will need, computed from shapes alone.

Every function is a pure formula in bytes. Constants that no formula gives are marked as assumed.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import unit_size
from adora_vl.config.keys import Recompute
from adora_vl.config.sharding import Sharding
from adora_vl.config.states import MOMENTS, States, dtypes_of, states
from adora_vl.models import activations
from adora_vl.models.activations import (
    FLOAT,
    LAYER_BACK,
    Dtypes,
    Learner,
    MicroBatch,
    Moment,
    PassSize,
    room_on,
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
    concurrent: (
        int  # rollouts of full length that fit into the cache together, at most `max_sequences`
    )


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Return bytes of the keys and values of all layers for one token."""
    text = shape.text
    heads = max(1, text.kv_heads // tensor_parallel)
    return 2 * text.layers * heads * text.head_size * dtype_bytes


def engine_memory(shape: ModelShape, engine: Engine, card: int) -> EngineMemory:
    """Return how vLLM divides its share of a card of `card` bytes."""
    weights = shape.base_bytes(engine.dtype_bytes) // engine.tensor_parallel
    if shape.four_bit:  # beside its base it holds the adapter
        weights += shape.trained * engine.dtype_bytes
    workspace = WORKSPACE if engine.cpu_cache is None else CPU_WORKSPACE
    cache = (
        int(engine.utilization * card) - weights - workspace
        if engine.cpu_cache is None
        else engine.cpu_cache
    )
    tokens = max(cache, 0) // cache_bytes_per_token(
        shape, engine.dtype_bytes, engine.tensor_parallel
    )
    return EngineMemory(
        weights=weights,
        workspace=workspace,
        cache=cache,
        concurrent=min(tokens // max(engine.max_length, 1), engine.max_sequences),
    )


# scheduler, random states, trainer_state.json and manifest, beside the tokenizer of a small model
_SMALL = 2 * 2**20


def checkpoint_bytes(
    shape: ModelShape, sharding: Sharding, *, mixed: bool, reference: bool = False
) -> int:
    """Return the size of one `checkpoint-N` folder of all ranks.

    It has weights (with LoRA the adapter alone), optimizer, and with `reference` a reference model
    that moves (`sync_ref_model`). DeepSpeed writes, beside the model for `from_pretrained`, its own
    float32 master weights, the moments and, for ZeRO-2 and below, the module's weights once more.
    """
    saved_parameters = shape.trained if shape.adapters else shape.total
    reference_bytes = shape.total * shape.weight_bytes if reference else 0
    if sharding.stage is None:
        byte = FLOAT if shape.adapters else shape.weight_bytes
        model = saved_parameters * byte
        return model + MOMENTS * shape.trained * byte + reference_bytes + _SMALL
    byte = 2 if mixed else shape.weight_bytes
    model = saved_parameters * byte
    optimizer = shape.trained * (MOMENTS + 1) * FLOAT
    # Under ZeRO-3 the module's file has only the weights that are not trained.
    module = shape.total * byte if sharding.stage < 3 else (shape.total - shape.trained) * byte
    return model + optimizer + module + reference_bytes + _SMALL


def checkpoint_of(config: AdoraGRPOConfig, shape: ModelShape, sharding: Sharding) -> int:
    """Return bytes of one checkpoint of a run."""
    mixed = bool(config.bf16 or config.fp16)
    return checkpoint_bytes(shape, sharding=sharding, mixed=mixed, reference=config.sync_ref_model)


def run_bytes(checkpoint: int, model: int, checkpoints: int) -> int:
    """Return the largest size of a run's folder, in bytes.

    It holds `checkpoints` finished checkpoints, one that is being written, and the final model.
    """
    return checkpoint * (checkpoints + 1) + model


CONTEXT = 3 * GIB // 2  # assumed: CUDA context, cuBLAS and NCCL buffers
FRAGMENTS = 0.05  # assumed: share of all else that the allocator cannot use
MOST_IMAGE_TOKENS = 16384  # of the published processors
# vLLM stays within its share
_ENGINE = (
    "engine weights",
    "engine workspace",
    "engine asleep",
    "KV cache",
)
_PIXEL = 4  # pixel_values are float32


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
        completions = [[batch.completion_tokens] * unit] * (batch.sequences // unit)
        prompts = [batch.prompt_tokens] * len(completions)
        packed = self.sharing.prompts and unit > 1 and sharing_pays(prompts, completions)
        return replace(batch, unit=unit if self.sharing.vision or packed else 1, packed=packed)

    @property
    def images(self) -> int:
        """The number of images of one rank in one generation."""
        return -(-self.generation // self.generations) if self.sharing.images else self.generation

    @property
    def swaps(self) -> bool:
        """Whether the 4-bit base leaves the card while the engine is awake (`FrozenBase`).

        Then the card holds one copy of it, and not two.
        """
        return bool(self.shape.four_bit and self.engine and self.engine.sleep)

    @property
    def dtypes(self) -> Dtypes:
        """The sizes of the dtypes in which a pass computes and keeps its residual stream."""
        return dtypes_of(self.shape, self.sharding, mixed=self.mixed)

    @property
    def learner(self) -> Learner:
        """The model as it learns."""
        return Learner(
            shape=self.shape,
            dtypes=self.dtypes,
            checkpointing=self.checkpointing,
            features=frozen_tower(self)[1] > 0,
            accelerator=self.accelerator,
        )

    @property
    def size(self) -> PassSize:
        """The size of the pass over a micro-batch."""
        return self.micro_batch.size(self.shape.merge, masked=self.masked)


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
    features, tower_pass = frozen_tower(setup)
    resident = {
        "weights": training.weights,
        "optimizer": training.optimizer,
        "reference model": training.reference,
    }
    awake, asleep = _engine_parts(setup, engine)
    if setup.swaps:
        awake["weights"] = training.weights - shape.base_bytes(shape.weight_bytes)
    patches = setup.images * setup.batch.image_tokens * shape.merge**2
    pixels = patches * _held_bytes_of_patch(setup)
    synced = shape.largest_tensor * setup.dtypes.stream if setup.sharding.stage == 3 else 0
    # DeepSpeed allocates its gradients once; torch gives them back after each step
    standing = training.gradients if setup.sharding.stage is not None else 0
    beside = {
        **resident,
        **asleep,
        "gathered weights": training.gathered,
        "pixels": pixels,
        "image features": features,
    }
    recomputed = recomputed_layers(setup, card, sum(beside.values()) + training.gradients)
    phases = {
        "rollouts": {**resident, "gradients": standing, **awake, "weights on their way": synced},
        "forward and backward": {**beside, **_learning(setup, training.gradients, recomputed)},
    }
    if tower_pass:
        phases["frozen vision tower"] = {
            **resident,
            **asleep,
            "gradients": training.gradients,
            "gathered weights": training.gathered,
            "pixels": pixels,
            "image features": features,
            "vision": tower_pass,
        }
    phases["optimizer step"] = {
        **resident,
        **asleep,
        "gradients": training.gradients,
        "pixels": pixels,
        "step": training.step,
    }
    return Prediction(
        phases={name: _with_overhead(sizes, setup) for name, sizes in phases.items()},
        engine=engine,
        states=training,
        recomputed=recomputed,
    )


def _held_bytes_of_patch(setup: Setup) -> int:
    """Return the bytes of a patch that wait on the card until its image is learned from.

    They are one frame in bytes where images are stored once (`ImageBank`), else float32 numbers.
    """
    values = setup.shape.patch_values
    return values // setup.shape.frames if setup.sharing.images else values * _PIXEL


def recomputed_layers(setup: Setup, card: int, beside: int) -> int:
    """Return how many layers of the language model the backward pass recomputes.

    It is the rule of the trainer, which knows the lengths of each micro-batch and measures what is
    free; here all have the length of the longest, and what is free is predicted.

    `beside`: bytes of weights, gradients and all else that the card holds during the pass.
    """
    layers = setup.shape.text.layers
    if not setup.checkpointing:
        return 0
    if isinstance(setup.recompute, int):
        return min(setup.recompute, layers)
    # the memory of a CPU is not for this process alone
    if setup.recompute == "all" or not setup.accelerator:
        return layers
    return setup.learner.fewest(setup.size, room_on(card, card - CONTEXT - beside))


def frozen_tower(setup: Setup) -> tuple[int, int]:
    """Return the bytes of a frozen vision tower that sees each image of a generation once.

    The first is the features, which are kept for the generation. The second is the most that one
    pass over `PATCHES_A_PASS` patches holds, which is less than a block would save for its
    backward (0.7 of it for the 7B model). Any other tower has neither: both are 0.
    """
    shape = setup.shape
    eye = setup.shape.vision
    if (
        eye is None
        or not setup.sharing.vision
        or shape.trainable["vision_tower"]
        or shape.trainable["projector"]
    ):
        return 0, 0
    tokens = setup.images * setup.batch.image_tokens
    layers = 1 + shape.deepstack
    patches_per_image = setup.batch.image_tokens * shape.merge**2
    patches = min(setup.images * patches_per_image, max(PATCHES_A_PASS, patches_per_image))
    inputs = patches * shape.patch_values * (_PIXEL + setup.dtypes.compute)
    block = activations.vision_layer(eye, patches, setup.dtypes)
    return tokens * shape.text.width * layers * setup.dtypes.compute, inputs + block


def _learning(setup: Setup, gradients: int, recomputed: int) -> dict[str, int]:
    """Return the gradients and activations of a micro-batch at their peak, in bytes by component.

    The peak is in the LM head or in the costliest layer, whichever holds more. `recomputed`: the
    layers of the language model that gradient checkpointing recomputes.
    """
    learner = setup.learner
    size = setup.size
    moments = learner.moments(size, recomputed)
    moments_and_gradients = [(moment, gradients) for moment in moments]
    if setup.sharding.stage is None and setup.micro_batches == 1:
        moments_and_gradients = _with_first_gradients(setup, moments, gradients, recomputed)
    peak, gradient_bytes = max(
        moments_and_gradients, key=lambda pair: pair[0].transient + pair[0].text + pair[1]
    )
    mask, vision = learner.beside(size, recomputed)
    return {
        "gradients": gradient_bytes,
        "activations": peak.text,
        "attention mask": mask,
        "vision": vision,
        peak.name: peak.transient,
    }


def _with_first_gradients(
    setup: Setup, moments: list[Moment], gradients: int, recomputed: int
) -> list[tuple[Moment, int]]:
    """Return moments of an optimizer step's first micro-batch, with the gradients held at each.

    Gradients come as the layers go back, and activations go. So the peak may lie where the first
    layer goes back, where one in between does, or at the end.
    """
    shape = setup.shape
    learner = setup.learner
    waiting = learner.waiting
    weight = learner.head_weight
    byte = FLOAT if shape.adapters else shape.weight_bytes
    layers = shape.text.layers
    standing = gradients - shape.trained * byte
    behind = standing + weight - waiting
    of_layers = shape.trainable[LANGUAGE_MODEL] * byte - weight - (weight - waiting)
    parts = activations.saved(
        shape,
        setup.size,
        setup.dtypes,
        checkpointing=setup.checkpointing,
        recomputed=recomputed,
    )
    layer = parts.layer_gradients + waiting
    pairs = [(moments[0], standing)]
    if recomputed == layers:
        layer += parts.recomputed
    pairs.append((Moment(LAYER_BACK, layer, parts.text), behind))
    for moment in moments[2:]:
        pairs.append((moment, behind + int(of_layers * moment.back)))
    last = parts.streams // recomputed if 0 < recomputed < layers else parts.text // layers
    if 0 < recomputed < layers:
        layer += parts.layer
    pairs.append((Moment(LAYER_BACK, layer, last), behind + of_layers * (layers - 1) // layers))
    pairs.append((Moment(LAYER_BACK, 3 * waiting, 0), gradients - waiting))
    return pairs


def _engine_parts(
    setup: Setup, engine: EngineMemory | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the engine's memory while it is awake and while the policy learns, by component."""
    if engine is None or setup.engine is None:
        return {}, {}
    cache = max(engine.cache, 0)
    awake = {
        "engine weights": engine.weights,
        "engine workspace": engine.workspace,
        "KV cache": cache,
    }
    return awake, {"engine asleep": ASLEEP} if setup.engine.sleep else awake


def _with_overhead(sizes: dict[str, int], setup: Setup) -> dict[str, int]:
    """Return the parts of a phase that take memory, with what a GPU takes on top.

    A part of what torch allocates is lost in gaps between its blocks; the engine has a pool of its
    own.
    """
    sizes = dict(sizes)
    if setup.accelerator:
        allocated = sum(size for name, size in sizes.items() if name not in _ENGINE)
        sizes["CUDA context"] = CONTEXT
        sizes["fragmentation"] = int(FRAGMENTS * allocated)
    return {name: size for name, size in sizes.items() if size}


def fits(setup: Setup, card: int) -> bool:
    """Return whether every phase fits into the card.

    The engine must also have room for at least one rollout of full length.
    """
    prediction = predict(setup, card)
    return prediction.peak <= card and (
        prediction.engine is None or prediction.engine.concurrent >= 1
    )


# of the card: left free by a share that is proposed, since no GPU has confirmed the prediction
HEADROOM = 0.05


def proposed_utilization(setup: Setup, card: int) -> float | None:
    """Return the smallest `vllm_gpu_memory_utilization` that runs most rollouts at once.

    It is in hundredths. Every phase has to leave `HEADROOM` of the card free. None without a
    colocated engine on a GPU, or if there is no such share.
    """
    engine = setup.engine
    if engine is None or not setup.accelerator:
        return None
    best: tuple[int, float] | None = None
    for hundredths in range(1, 100):
        share = replace(setup, engine=replace(engine, utilization=hundredths / 100))
        prediction = predict(share, card)
        concurrent = prediction.engine.concurrent if prediction.engine else 0
        if prediction.peak <= (1 - HEADROOM) * card and concurrent > (best[0] if best else 0):
            best = (concurrent, hundredths / 100)
    return best[1] if best else None


def batch_sizes(setup: Setup) -> list[int]:
    """Return values of per_device_train_batch_size that divide a generation.

    They keep groups whole or split them evenly.
    """
    group = setup.generations
    generation = setup.generation
    sizes = [size for size in range(1, generation + 1) if generation % size == 0]
    return [size for size in sizes if size % group == 0 or group % size == 0]


def largest_batch(setup: Setup, card: int) -> int:
    """Return the largest of `batch_sizes` that fits, 0 if none does.

    The number of rollouts per generation stays the same.
    """
    sizes = batch_sizes(setup)

    def batch_fits(number: int) -> bool:
        return fits(replace(setup, batch=replace(setup.batch, sequences=sizes[number - 1])), card)

    number = _largest(batch_fits, len(sizes))
    return sizes[number - 1] if number else 0


def largest_image_tokens(setup: Setup, card: int, room: int = MOST_IMAGE_TOKENS) -> int:
    """Return the largest number of image tokens per prompt that fits beside the same text.

    It is at most `room`, and 0 if none fits.
    """
    limit = min(room, MOST_IMAGE_TOKENS)
    text = setup.batch.prompt_tokens - setup.batch.image_tokens

    def with_image(tokens: int) -> Setup:
        return replace(
            setup, batch=replace(setup.batch, image_tokens=tokens, prompt_tokens=text + tokens)
        )

    if setup.engine is not None:  # a prompt has to leave the engine room for its completion
        limit = min(limit, setup.engine.max_length - setup.batch.completion_tokens - text)
    return _largest(lambda tokens: fits(with_image(tokens), card), max(limit, 0))


def _largest(good: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` that is good, or 0.

    If a number is good, all smaller ones are.
    """
    return bisect_left(range(1, limit + 1), True, key=lambda number: not good(number))
