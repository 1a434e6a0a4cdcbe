"""The families of models: what is special in each, and the parts of a model by their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

# Fields of the vision tower's output whose features enter the language model at the image tokens.
# A tensor per image, which takes the place of the token embeddings.
EMBEDDINGS_FIELD = "pooler_output"
# A tensor per layer for all images, added to the hidden states after each of the first layers.
DEEPSTACK_FIELD = "deepstack_features"


@dataclass(frozen=True)
class Vision:
    """How a family of models sees images."""

    # The side of an image token in pixels. Both sides of a resized image are multiples of it.
    token_side: int
    min_pixels: int  # of an image, in the published image processor
    max_pixels: int
    # The fields of the vision tower's output that enter the language model.
    feature_fields: tuple[str, ...] = (EMBEDDINGS_FIELD,)
    # What the names of the vision tower's parameters contain.
    tower_name_part: str = "visual."
    # What the names of the projectors' parameters contain. A projector may be inside of the vision
    # tower. The first one makes the embeddings.
    projector_name_parts: tuple[str, ...] = ("visual.merger.",)
    # Whether a block has an MLP with SwiGLU, and RMS norms. Otherwise it has an MLP of two products
    # around a GELU, and layer norms, which save less for the backward pass.
    has_swiglu: bool = False
    # Whether the family's models name points in thousandths of a picture's sides. Otherwise they
    # name them in pixels of the picture as they see it.
    points_in_thousandths: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture that is supported."""

    name: str
    vision: Vision | None  # None for a family that reads text only
    source: str  # where the other fields can be looked up
    # Whether the language model's attention normalises queries and keys head by head. It then saves
    # more for the backward pass.
    has_head_norms: bool = False
    # Whether the rotary embedding interleaves the three axes of positions. Transformers always does
    # so, vLLM only if the config has `mrope_interleaved`.
    interleaves_positions: bool = False
    note: str = ""  # what a user is told before a run


FAMILIES: dict[str, Family] = {
    "qwen2": Family(name="Qwen2 and Qwen2.5", vision=None, source="models/qwen2/modeling_qwen2.py"),
    "qwen2_vl": Family(
        name="Qwen2-VL",
        vision=Vision(
            token_side=28,
            min_pixels=56 * 56,
            max_pixels=16384 * 28 * 28,
            points_in_thousandths=True,
        ),
        source="models/qwen2_vl/modeling_qwen2_vl.py; pixels: image_processing_qwen2_vl.py and the "
        "published processor",
    ),
    "qwen2_5_vl": Family(
        name="Qwen2.5-VL",
        vision=Vision(
            token_side=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28, has_swiglu=True
        ),
        source="models/qwen2_5_vl/modeling_qwen2_5_vl.py; pixels: the published preprocessor_config.json",
    ),
    "qwen3_vl": Family(
        name="Qwen3-VL",
        vision=Vision(
            token_side=32,
            min_pixels=256 * 256,
            max_pixels=4096 * 4096,
            feature_fields=(EMBEDDINGS_FIELD, DEEPSTACK_FIELD),
            projector_name_parts=("visual.merger.", "visual.deepstack_merger_list."),
            points_in_thousandths=True,
        ),
        source="models/qwen3_vl/modeling_qwen3_vl.py (Qwen3VLTextModel._deepstack_process); pixels: the "
        "published preprocessor_config.json",
        has_head_norms=True,
        interleaves_positions=True,
    ),
    "qwen3_5": Family(
        name="Qwen3.5",
        vision=Vision(
            token_side=32, min_pixels=256 * 256, max_pixels=4096 * 4096, points_in_thousandths=True
        ),
        source="models/qwen3_5/modeling_qwen3_5.py; pixels: the published preprocessor_config.json",
        has_head_norms=True,
        interleaves_positions=True,
        note="most layers of Qwen3.5 have linear attention, whose state the rollouts of a group "
        "cannot share: share_prompt is off by itself, everything else is shared",
    ),
}


KNOWN_FAMILIES_TEXT = ", ".join(FAMILIES)  # as a message names them


def family_of(config: PreTrainedConfig) -> Family | None:
    """Return the family of a model by its config; None for an architecture not in `FAMILIES`."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def vision_by_model_type() -> dict[str, Vision]:
    """Return the families with images, by `model_type`."""
    return {kind: family.vision for kind, family in FAMILIES.items() if family.vision is not None}


def sees_images(config: PreTrainedConfig) -> bool:
    """Return whether a model of this Transformers config takes images, of whatever family."""
    return getattr(config, "vision_config", None) is not None


def shares_prompts(config: PreTrainedConfig) -> bool:
    """Return whether the rollouts of a group can share their prompt in one packed sequence.

    For that the model is of a known family, and every layer has full attention.
    """
    # A config without types of layers is one of full attention.
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    return family_of(config) is not None and set(layer_types) == {"full_attention"}


def position_fault_in_vllm(config: PreTrainedConfig) -> str:
    """Return why vLLM would give this model's image tokens other positions than Transformers.

    The text goes after the model's name in an error and has the remedy. It is empty where the
    positions agree.
    """
    family = family_of(config)
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if family is None or not family.interleaves_positions or rotary.get("mrope_interleaved"):
        return ""
    return (
        "has no mrope_interleaved in the rope_parameters of its text_config; set it to true: "
        "Transformers interleaves the positions of images either way, vLLM only then"
    )


def has_linear_attention(config: PreTrainedConfig) -> bool:
    """Return whether some layers have linear attention, which carries a state along a sequence."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return "linear_attention" in layer_types


VISION_TOWER = "vision_tower"
PROJECTOR = "projector"
LANGUAGE_MODEL = "language_model"
COMPONENTS = (VISION_TOWER, PROJECTOR, LANGUAGE_MODEL)


# What the names of a vision tower's and of a projector's parameters contain, in any family.
_TOWER_NAME_PARTS = {vision.tower_name_part for vision in vision_by_model_type().values()}
_PROJECTOR_NAME_PARTS = {
    name for vision in vision_by_model_type().values() for name in vision.projector_name_parts
}


def component_of(parameter_name: str) -> str:
    """Return the component that a parameter belongs to: one of `COMPONENTS`.

    `parameter_name`: in Transformers, also with prefixes of wrappers. What is neither in the vision
    tower nor in the projector belongs to the language model.
    """
    # The projector comes first, since it may be inside of the vision tower. The names of all
    # families can be tried, because none uses another one's name for something else.
    if any(name in parameter_name for name in _PROJECTOR_NAME_PARTS):
        return PROJECTOR
    if any(name in parameter_name for name in _TOWER_NAME_PARTS):
        return VISION_TOWER
    return LANGUAGE_MODEL


def freeze(model: nn.Module, components: Iterable[str]) -> None:
    """Set `requires_grad=False` on every parameter of `components`.

    Raises `UserError` where a component has no parameter in this model, instead of silently
    freezing nothing.
    """
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


def trainable_components(model: nn.Module) -> frozenset[str]:
    """Return the components with at least one trainable parameter.

    A parameter of an adapter counts for the component that it adapts.
    """
    trained_names = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    return frozenset(component_of(name) for name in trained_names)
