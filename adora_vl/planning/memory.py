"""The memory that a run will need on each card, computed from shapes alone.

Every function is a pure formula in bytes. Constants that no formula gives are marked as assumed.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from adora_vl.config.batch_plan import subgroup_size
from adora_vl.config.keys import Recompute
from adora_vl.config.sharding import Sharding
from adora_vl.models import activations
from adora_vl.models.activations import DtypeBytes, PassSize
from adora_vl.models.peak_memory import ActivationMemory, usable_bytes
from adora_vl.models.shape import PATCHES_PER_PASS, ModelShape
from adora_vl.planning.engine_memory import (
    SLEEPING_ENGINE_BYTES,
    EngineMemory,
    EngineMemorySettings,
    engine_memory,
)
from adora_vl.training.micro_batch_memory import SubgroupSize, size_of_pass
from adora_vl.training.model_states import ModelStateBytes, dtypes_of, predict_state_bytes
from adora_vl.utils.files import GIB

CUDA_CONTEXT_BYTES = 3 * GIB // 2  # assumed: CUDA context, cuBLAS and NCCL buffers
FRAGMENTED_SHARE = 0.05  # assumed: share of all else that the allocator cannot use
MAX_IMAGE_TOKENS = 16384  # the largest image that the published processors allow
# Components of the engine: vLLM stays within its share, so fragmentation adds nothing to them.
_ENGINE_COMPONENTS = (
    "engine weights",
    "engine workspace",
    "engine asleep",
    "KV cache",
)
_PIXEL_VALUE_BYTES = 4  # pixel_values are float32


@dataclass(frozen=True)
class SharedComputation:
    """What a step computes only once for all rollouts of a group (docs/speed.md)."""

    images: bool = False  # the pixels of their image are held once
    vision: bool = False  # the vision tower sees their image once
    prompts: bool = False  # their prompt is computed once, where that is less work
    # Whether they are together in a micro-batch. Otherwise they share only what is computed before.
    keeps_groups: bool = True


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The rollouts of a micro-batch as they are planned: all as long as the longest."""

    sequences: int
    prompt_tokens: int  # with the image tokens
    completion_tokens: int
    image_tokens: int = 0  # per sequence


@dataclass(frozen=True)
class MemorySetup:
    """Everything about a run that its memory depends on.

    A generation is all rollouts that are sampled at once, and a group those of one prompt.
    """

    shape: ModelShape
    sharding: Sharding
    batch: PlannedMicroBatch  # as if every sequence had an image and a prompt of its own
    # rollouts of one rank in a generation; their pixels stay on the GPU until all are learned from
    sequences_per_generation: int
    group_size: int = 1
    sharing: SharedComputation = SharedComputation()
    mixed_precision: bool = True  # bf16 or fp16
    checkpointing: bool = True  # gradient checkpointing
    recompute: Recompute = "all"  # which layers gradient checkpointing recomputes
    has_padding_mask: bool = True  # SDPA needs one, flash attention does not
    has_reference: bool = False  # a reference model for the KL term
    engine: EngineMemorySettings | None = None  # None: no engine shares this GPU
    on_gpu: bool = True

    @property
    def rows_per_subgroup(self) -> int:
        """The number of rollouts of a group that always share a micro-batch."""
        if not self.sharing.keeps_groups:
            return 1
        return subgroup_size(self.batch.sequences, self.group_size)

    @property
    def image_count(self) -> int:
        """The number of images that one rank holds for a generation."""
        if not self.sharing.images:
            return self.sequences_per_generation
        # one for each group
        return math.ceil(self.sequences_per_generation / self.group_size)

    @property
    def swaps_base(self) -> bool:
        """Whether the base in 4 bits leaves the GPU while the engine is awake (`FrozenBase`).

        Engine and trainer have a copy each, and then only one of them is on the GPU.
        """
        return bool(self.shape.four_bit_parameters and self.engine and self.engine.sleeps)

    @property
    def dtypes(self) -> DtypeBytes:
        """The bytes per number in a pass: of its computation and of its residual stream."""
        return dtypes_of(self.shape, self.sharding, mixed_precision=self.mixed_precision)

    @property
    def activation_memory(self) -> ActivationMemory:
        """The predictor of a training pass's activations."""
        return ActivationMemory(
            shape=self.shape,
            dtypes=self.dtypes,
            checkpointing=self.checkpointing,
            shares_vision=self.sharing.vision,
            on_gpu=self.on_gpu,
        )

    @property
    def pass_size(self) -> PassSize:
        """The numbers of tokens and patches of a pass over a micro-batch.

        The trainer computes them by the same function. Here all subgroups are alike.
        """
        batch = self.batch
        rows = self.rows_per_subgroup
        images = 1 if self.sharing.vision else rows
        subgroup = SubgroupSize(
            rows=rows,
            prompt_tokens=batch.prompt_tokens,
            longest_completion=batch.completion_tokens,
            completion_tokens=rows * batch.completion_tokens,
            image_patches=images * batch.image_tokens * self.shape.merge_size**2,
        )
        return size_of_pass(
            [subgroup] * (batch.sequences // rows),
            shares_prompts=self.sharing.prompts,
            masks_padding=self.has_padding_mask,
        )


@dataclass(frozen=True)
class MemoryPrediction:
    """The bytes on one GPU in each phase of a training step.

    `phases`: for each phase the bytes by component, such as {"rollouts": {"weights": ...}}.
    `engine`: how the engine divides its share; None without one. `model_states`: weights, gradients
    and optimizer. `recomputed_layers`: those of the language model that the backward pass
    recomputes.
    """

    phases: dict[str, dict[str, int]]
    engine: EngineMemory | None
    model_states: ModelStateBytes
    recomputed_layers: int

    @property
    def peak_phase(self) -> str:
        """The name of the phase that takes the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> int:
        """The bytes of the phase that takes the most memory."""
        return sum(self.phases[self.peak_phase].values())

    def fits_into(self, gpu_bytes: int) -> bool:
        """Return whether every phase fits into a GPU with `gpu_bytes` of memory.

        The engine must also have room for at least one rollout of full length.
        """
        engine_has_room = self.engine is None or self.engine.concurrent_rollouts >= 1
        return self.peak_bytes <= gpu_bytes and engine_has_room


def predict_memory(setup: MemorySetup, gpu_bytes: int) -> MemoryPrediction:
    """Predict what a GPU holds in each phase of a training step, in bytes by component.

    The phases are the rollouts, the pass of the images through a frozen vision tower, forward and
    backward, and the optimizer step. `gpu_bytes`: the memory of the GPU.
    """
    model_state = predict_state_bytes(
        setup.shape,
        sharding=setup.sharding,
        has_reference=setup.has_reference,
        mixed_precision=setup.mixed_precision,
    )
    engine = engine_memory(setup.shape, setup.engine, gpu_bytes) if setup.engine else None
    tower = frozen_tower_memory(setup)
    pixels = {"pixels": _pixel_bytes(setup)}
    features = {"image features": tower.feature_bytes}
    gathered = {"gathered weights": model_state.gathered_weight_bytes}
    all_gradients = {"gradients": model_state.gradient_bytes}
    # While the policy learns, the engine may sleep.
    engine_sleeps = setup.engine is not None and setup.engine.sleeps
    resident = {
        **_resident_bytes(model_state),
        **_engine_while_learning(engine, sleeps=engine_sleeps),
    }
    before_pass = {**resident, **gathered, **pixels, **features}
    recomputed = recomputed_layers(
        setup, gpu_bytes, held_bytes=sum(before_pass.values()) + model_state.gradient_bytes
    )
    phases = {
        "rollouts": _rollout_phase(setup, model_state, engine),
        "forward and backward": {
            **before_pass,
            **_learning_memory(setup, model_state.gradient_bytes, recomputed),
        },
    }
    if tower.pass_bytes:
        phases["frozen vision tower"] = {
            **resident,
            **all_gradients,
            **gathered,
            **pixels,
            **features,
            "vision": tower.pass_bytes,
        }
    phases["optimizer step"] = {
        **resident,
        **all_gradients,
        **pixels,
        "step": model_state.step_bytes,
    }
    return MemoryPrediction(
        phases={
            phase: _with_overhead(component_bytes, setup)
            for phase, component_bytes in phases.items()
        },
        engine=engine,
        model_states=model_state,
        recomputed_layers=recomputed,
    )


def _resident_bytes(model_state: ModelStateBytes) -> dict[str, int]:
    """Return the bytes of a training that are on the GPU in every phase, by component."""
    return {
        "weights": model_state.weight_bytes,
        "optimizer": model_state.optimizer_bytes,
        "reference model": model_state.reference_bytes,
    }


def _rollout_phase(
    setup: MemorySetup, model_state: ModelStateBytes, engine: EngineMemory | None
) -> dict[str, int]:
    """Return what a GPU holds while rollouts are sampled, in bytes by component.

    `model_state`: weights, gradients and optimizer. `engine`: None without an engine on this GPU.
    """
    shape = setup.shape
    resident = _resident_bytes(model_state)
    if setup.swaps_base:
        # While the engine samples with its own base, the trainer's base in 4 bits is in host
        # memory.
        resident["weights"] -= shape.base_bytes(shape.bytes_per_weight)
    # DeepSpeed allocates its gradients once. Without it torch frees them after each step.
    has_lasting_gradients = setup.sharding.zero_stage is not None
    # Under ZeRO-3 a tensor is gathered whole before it is sent to the engine.
    gathers_for_engine = setup.sharding.zero_stage == 3
    return {
        **resident,
        "gradients": model_state.gradient_bytes if has_lasting_gradients else 0,
        **_engine_awake(engine),
        "weights on their way": (
            shape.largest_tensor_parameters * setup.dtypes.residual_bytes
            if gathers_for_engine
            else 0
        ),
    }


def _pixel_bytes(setup: MemorySetup) -> int:
    """Return the bytes of the pixels that stay on the GPU until the policy learns from them.

    Where the images of a group are stored once (`ImageBank`), one frame of each image is stored,
    with a byte per value. Otherwise all frames are stored in float32.
    """
    shape = setup.shape
    patches = setup.image_count * setup.batch.image_tokens * shape.merge_size**2
    bytes_per_patch = shape.patch_values * _PIXEL_VALUE_BYTES
    if setup.sharing.images:
        bytes_per_patch = shape.patch_values // shape.frames_per_patch
    return patches * bytes_per_patch


def recomputed_layers(setup: MemorySetup, gpu_bytes: int, held_bytes: int) -> int:
    """Predict how many layers of the language model the backward pass recomputes.

    The trainer decides by the same rule. It knows the lengths of each micro-batch and measures the
    free memory. Here all sequences are as long as the longest, and the free memory is predicted.

    `held_bytes`: what the GPU holds during the pass besides activations, such as weights and
    gradients.
    """
    layers = setup.shape.text.layers
    if not setup.checkpointing:
        return 0
    if isinstance(setup.recompute, int):
        return min(setup.recompute, layers)
    # With "auto" on a CPU all layers are recomputed: its memory is not for this process alone.
    if setup.recompute == "all" or not setup.on_gpu:
        return layers
    free_bytes = gpu_bytes - CUDA_CONTEXT_BYTES - held_bytes
    return setup.activation_memory.fewest_recomputed_layers(
        setup.pass_size, usable_bytes(gpu_bytes, free_bytes)
    )


class FrozenTowerMemory(NamedTuple):
    """Bytes of a frozen vision tower that sees each image of a generation once."""

    feature_bytes: int  # of all images, which are kept for the generation
    pass_bytes: int  # the most that one pass over `PATCHES_PER_PASS` patches holds


def frozen_tower_memory(setup: MemorySetup) -> FrozenTowerMemory:
    """Predict the memory of a frozen vision tower that sees each image of a generation once.

    For any other tower both numbers are 0, since it computes its features in the training pass.

    A pass of the tower is assumed to hold as much as a block saves for a backward pass. In fact it
    holds less: 0.7 of that for the 7B model.
    """
    shape = setup.shape
    tower = shape.vision
    if tower is None or not setup.activation_memory.reads_features:
        return FrozenTowerMemory(feature_bytes=0, pass_bytes=0)
    image_tokens = setup.image_count * setup.batch.image_tokens
    # With DeepStack (Qwen3-VL) an image token also has features for several deeper layers.
    features_per_token = 1 + shape.deepstack_layers
    feature_bytes = (
        image_tokens * shape.text.width * features_per_token * setup.dtypes.compute_bytes
    )
    patches_per_image = setup.batch.image_tokens * shape.merge_size**2
    # A pass has at most `PATCHES_PER_PASS` patches, unless a single image has more.
    most_patches = max(PATCHES_PER_PASS, patches_per_image)
    patches = min(setup.image_count * patches_per_image, most_patches)
    # The pixels are there as float32 and in the dtype of the computation.
    input_bytes = patches * shape.patch_values * (_PIXEL_VALUE_BYTES + setup.dtypes.compute_bytes)
    block_bytes = activations.vision_block_bytes(tower, patches, setup.dtypes)
    return FrozenTowerMemory(feature_bytes=feature_bytes, pass_bytes=input_bytes + block_bytes)


def _learning_memory(setup: MemorySetup, gradient_bytes: int, recomputed: int) -> dict[str, int]:
    """Return the gradients and activations of a micro-batch at their peak, in bytes by component.

    The peak is in the LM head or in the backward pass of a layer, whichever takes more. All
    gradients are counted there. Without DeepSpeed the first micro-batch of an optimizer step makes
    them on its way, and so takes less.

    Args:
        setup: The run.
        gradient_bytes: Bytes of all gradients.
        recomputed: Layers of the language model that gradient checkpointing recomputes.
    """
    activation_memory = setup.activation_memory
    candidates = activation_memory.peak_candidates(setup.pass_size, recomputed)
    peak = max(candidates, key=lambda candidate: candidate.total_bytes)
    mask, vision = activation_memory.mask_and_vision_bytes(setup.pass_size, recomputed)
    return {
        "gradients": gradient_bytes,
        "activations": peak.kept_bytes,
        "attention mask": mask,
        "vision": vision,
        peak.name: peak.transient_bytes,
    }


def _engine_awake(engine: EngineMemory | None) -> dict[str, int]:
    """Return the memory of an engine while it samples, in bytes by component; empty without one."""
    if engine is None:
        return {}
    return {
        "engine weights": engine.weight_bytes,
        "engine workspace": engine.workspace_bytes,
        "KV cache": max(engine.cache_bytes, 0),
    }


def _engine_while_learning(engine: EngineMemory | None, *, sleeps: bool) -> dict[str, int]:
    """Return the memory of an engine while the policy learns, in bytes by component.

    It is the same as while it samples, unless the engine sleeps. Empty without an engine.
    """
    if sleeps:
        return {"engine asleep": SLEEPING_ENGINE_BYTES}
    return _engine_awake(engine)


def _with_overhead(component_bytes: dict[str, int], setup: MemorySetup) -> dict[str, int]:
    """Return the components of a phase with the overhead of a GPU; those of 0 bytes are left out.

    The overhead is the CUDA context, and the gaps that torch's allocator cannot use. vLLM has a
    pool of its own, so its components have no gaps.
    """
    bytes_by_name = dict(component_bytes)
    if setup.on_gpu:
        allocated_by_torch = 0
        for name, size_bytes in component_bytes.items():
            if name not in _ENGINE_COMPONENTS:
                allocated_by_torch += size_bytes
        bytes_by_name["CUDA context"] = CUDA_CONTEXT_BYTES
        bytes_by_name["fragmentation"] = int(FRAGMENTED_SHARE * allocated_by_torch)
    return {name: size_bytes for name, size_bytes in bytes_by_name.items() if size_bytes != 0}
