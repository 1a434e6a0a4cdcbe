"""What this project has to know of an architecture, one entry per family. Everything that depends on it reads it here.

A family is a `model_type` of Transformers. Each entry names the source of what it says; the paths are those of
Transformers 5.17. CONTRIBUTING.md describes how to add one. This module imports nothing heavy, since data preparation
uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EMBEDDINGS, DEEPSTACK = "pooler_output", "deepstack_features"


@dataclass(frozen=True)
class Vision:
    """How a family sees.

    `unit`: pixels of an image token's side (patch times merged patches), of which both sides of a resized image are
    multiples. `min_pixels`, `max_pixels`: of the published image processor. `features`: the fields of the vision
    output that enter the language model, at the image tokens: `EMBEDDINGS` is a tensor per image and takes the place
    of the token embeddings; `DEEPSTACK` is a tensor per layer for all images, added to the hidden states behind each
    of the first layers. `projector`: parts of a parameter's name by which it belongs to the projector; the first one is
    of what makes the embeddings. All other parameters whose names have `tower` in them belong to the vision tower.
    `swiglu`: blocks with a gated MLP and RMS norms, else with two products around a GELU and layer norms, which keep
    less for the backward pass.
    """

    image_token: str
    unit: int
    min_pixels: int
    max_pixels: int
    features: tuple[str, ...] = (EMBEDDINGS,)
    tower: str = "visual."
    projector: tuple[str, ...] = ("visual.merger.",)
    swiglu: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture. `vision` is None for a family that reads text only.

    `sharable`: the kinds of layers (`layer_types` of its config; a config without them has full attention alone) in
    which the rollouts of a group can share their prompt. `head_norms`: the language model's attention normalises
    queries and keys, which keeps more for the backward pass. `interleaved`: the rotary embedding interleaves the three
    kinds of positions, in Transformers always and in vLLM only where the config has `mrope_interleaved`. `note`: what a
    user should know before a run.
    """

    name: str
    vision: Vision | None
    sharable: frozenset[str]
    source: str
    head_norms: bool = False
    interleaved: bool = False
    note: str = ""


FULL = frozenset({"full_attention"})

FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2 and Qwen2.5", None, FULL, "models/qwen2/modeling_qwen2.py"),
    "qwen2_vl": Family(
        "Qwen2-VL",
        Vision("<|image_pad|>", unit=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28),
        FULL,
        "models/qwen2_vl/modeling_qwen2_vl.py; pixels: image_processing_qwen2_vl.py and the published processor",
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        Vision("<|image_pad|>", unit=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28, swiglu=True),
        FULL,
        "models/qwen2_5_vl/modeling_qwen2_5_vl.py; pixels: the published preprocessor_config.json",
    ),
    "qwen3_vl": Family(
        "Qwen3-VL",
        Vision(
            "<|image_pad|>",
            unit=32,
            min_pixels=256 * 256,
            max_pixels=4096 * 4096,
            features=(EMBEDDINGS, DEEPSTACK),
            projector=("visual.merger.", "visual.deepstack_merger_list."),
        ),
        FULL,
        "models/qwen3_vl/modeling_qwen3_vl.py (Qwen3VLTextModel._deepstack_process); pixels: the published "
        "preprocessor_config.json",
        head_norms=True,
        interleaved=True,
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        Vision("<|image_pad|>", unit=32, min_pixels=256 * 256, max_pixels=4096 * 4096),
        FULL,
        "models/qwen3_5/modeling_qwen3_5.py; pixels: the published preprocessor_config.json",
        head_norms=True,
        interleaved=True,
        note="most layers of Qwen3.5 have linear attention, whose state the rollouts of a group cannot share: "
        "adora_share_prompt is off by itself, everything else is shared",
    ),
}


def family_of(config: Any) -> Family | None:
    """The family of a Transformers config, None where the table does not have it."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def seeing_families() -> dict[str, Vision]:
    """The families with images, by `model_type`."""
    return {kind: family.vision for kind, family in FAMILIES.items() if family.vision is not None}


def known() -> str:
    """The families as a message names them."""
    return ", ".join(FAMILIES)


def sees_images(config: Any) -> bool:
    """Whether a model of this Transformers config takes images, of whatever family; else it is a language model."""
    return getattr(config, "vision_config", None) is not None


def shares_prompts(config: Any) -> bool:
    """Whether every layer of this model can let the rollouts of a group share their prompt."""
    family = family_of(config)
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    return family is not None and set(kinds) <= family.sharable


def misplaced_by_vllm(config: Any) -> str:
    """Why vLLM would place the images of this model otherwise than Transformers, and the remedy; else empty."""
    family, rotary = family_of(config), getattr(config.get_text_config(), "rope_parameters", None) or {}
    if family is None or not family.interleaved or rotary.get("mrope_interleaved"):
        return ""
    return (
        "has no mrope_interleaved in the rope_parameters of its text_config; set it to true: Transformers interleaves "
        "the positions of images either way, vLLM only then"
    )


def has_linear_attention(config: Any) -> bool:
    """Whether some layers of this model carry one state along the sequence."""
    return "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
