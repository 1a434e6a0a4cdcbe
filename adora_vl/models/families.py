"""The families of models: what is special in each, and the parts of a model by their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

EMBEDDINGS = "pooler_output"
DEEPSTACK = "deepstack_features"


@dataclass(frozen=True)
class Vision:
    """How a family sees.

    `unit`: pixels of an image token's side (patch times merged patches), of which both sides of a
    resized image are multiples. `min_pixels`, `max_pixels`: of the published image processor.
    `features`: the fields of the vision output that enter the language model, at the image tokens:
    `EMBEDDINGS` is a tensor per image and takes the place of the token embeddings; `DEEPSTACK` is a
    tensor per layer for all images, added to the hidden states behind each of the first layers.
    `projector`: parts of a parameter's name by which it belongs to the projector; the first one is
    of what makes the embeddings. All other parameters whose names have `tower` in them belong to
    the vision tower. `swiglu`: blocks with a gated MLP and RMS norms, else with two products around
    a GELU and layer norms, which keep less for the backward pass. `relative`: the family's models
    speak of places in thousandths of a picture's sides, else in pixels of the picture as they see
    it.
    """

    unit: int
    min_pixels: int
    max_pixels: int
    features: tuple[str, ...] = (EMBEDDINGS,)
    tower: str = "visual."
    projector: tuple[str, ...] = ("visual.merger.",)
    swiglu: bool = False
    relative: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture.

    `vision` is None for a family that reads text only.

    `head_norms`: the language model's attention normalises queries and keys, which keeps more for
    the backward pass. `interleaved`: the rotary embedding interleaves the three kinds of positions,
    in Transformers always and in vLLM only where the config has `mrope_interleaved`. `note`: what a
    user should know before a run.
    """

    name: str
    vision: Vision | None
    source: str
    head_norms: bool = False
    interleaved: bool = False
    note: str = ""


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2 and Qwen2.5", None, "models/qwen2/modeling_qwen2.py"),
    "qwen2_vl": Family(
        "Qwen2-VL",
        Vision(unit=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28, relative=True),
        "models/qwen2_vl/modeling_qwen2_vl.py; pixels: image_processing_qwen2_vl.py and the "
        "published processor",
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        Vision(unit=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28, swiglu=True),
        "models/qwen2_5_vl/modeling_qwen2_5_vl.py; pixels: the published preprocessor_config.json",
    ),
    "qwen3_vl": Family(
        name="Qwen3-VL",
        vision=Vision(
            unit=32,
            min_pixels=256 * 256,
            max_pixels=4096 * 4096,
            features=(EMBEDDINGS, DEEPSTACK),
            projector=("visual.merger.", "visual.deepstack_merger_list."),
            relative=True,
        ),
        source="models/qwen3_vl/modeling_qwen3_vl.py (Qwen3VLTextModel._deepstack_process); pixels: the "
        "published preprocessor_config.json",
        head_norms=True,
        interleaved=True,
    ),
    "qwen3_5": Family(
        name="Qwen3.5",
        vision=Vision(unit=32, min_pixels=256 * 256, max_pixels=4096 * 4096, relative=True),
        source="models/qwen3_5/modeling_qwen3_5.py; pixels: the published preprocessor_config.json",
        head_norms=True,
        interleaved=True,
        note="most layers of Qwen3.5 have linear attention, whose state the rollouts of a group "
        "cannot share: share_prompt is off by itself, everything else is shared",
    ),
}


KNOWN = ", ".join(FAMILIES)  # as a message names them


def family_of(config: PreTrainedConfig) -> Family | None:
    """Return the family of a Transformers config, None where the table does not have it."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def seeing_families() -> dict[str, Vision]:
    """Return the families with images, by `model_type`."""
    return {kind: family.vision for kind, family in FAMILIES.items() if family.vision is not None}


def sees_images(config: PreTrainedConfig) -> bool:
    """Return whether a model of this Transformers config takes images, of whatever family."""
    return getattr(config, "vision_config", None) is not None


def shares_prompts(config: PreTrainedConfig) -> bool:
    """Return whether every layer can let the rollouts of a group share their prompt.

    All have full attention then, as have those of a config that names no kinds.
    """
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    return family_of(config) is not None and set(layer_types) == {"full_attention"}


def misplaced_by_vllm(config: PreTrainedConfig) -> str:
    """Return why vLLM gives this model's images other positions than Transformers.

    It has the remedy. The text is empty where the positions agree.
    """
    family = family_of(config)
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if family is None or not family.interleaved or rotary.get("mrope_interleaved"):
        return ""
    return (
        "has no mrope_interleaved in the rope_parameters of its text_config; set it to true: "
        "Transformers interleaves the positions of images either way, vLLM only then"
    )


def has_linear_attention(config: PreTrainedConfig) -> bool:
    """Return whether some layers of this model carry one state along the sequence."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return "linear_attention" in layer_types


VISION_TOWER = "vision_tower"
PROJECTOR = "projector"
LANGUAGE_MODEL = "language_model"
COMPONENTS = (VISION_TOWER, PROJECTOR, LANGUAGE_MODEL)


# What the names of a vision tower and of a projector contain, in any family of the table.
_TOWER_MARKS = {vision.tower for vision in seeing_families().values()}
_PROJECTOR_MARKS = {mark for vision in seeing_families().values() for mark in vision.projector}


def component_of(parameter_name: str) -> str:
    """Return the component that a parameter belongs to, by its Transformers name.

    Prefixes of wrappers do not matter. The names are those of `FAMILIES`: no family uses another
    one's mark for another component. A text-only model is all language model.
    """
    if any(mark in parameter_name for mark in _PROJECTOR_MARKS):
        return PROJECTOR
    if any(mark in parameter_name for mark in _TOWER_MARKS):
        return VISION_TOWER
    return LANGUAGE_MODEL


def freeze(model: nn.Module, components: Iterable[str]) -> dict[str, int]:
    """Set `requires_grad=False` on every parameter of `components`.

    Returns the number of parameters of each component. Raises `UserError` where a component has no
    parameter in this model, instead of silently freezing nothing.
    """
    frozen: dict[str, int] = {}
    for component in components:
        parameters = [
            parameter
            for name, parameter in model.named_parameters()
            if component_of(name) == component
        ]
        if not parameters:
            raise UserError(
                f"adora_freeze: {component}: this model has none ({type(model).__name__}); leave "
                "it out"
            )
        for parameter in parameters:
            parameter.requires_grad_(False)
        frozen[component] = len(parameters)
    return frozen


def trainable_components(model: nn.Module) -> frozenset[str]:
    """Return the parts with at least one trainable parameter.

    An adapter counts for the part that it sits in.
    """
    trained_names = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    return frozenset(component_of(name) for name in trained_names)
