"""The three parts of a vision-language model, and freezing them by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import nn

from adora_vl.errors import UserError
from adora_vl.families import seeing_families

VISION_TOWER, PROJECTOR, LANGUAGE_MODEL = "vision_tower", "projector", "language_model"
COMPONENTS = (VISION_TOWER, PROJECTOR, LANGUAGE_MODEL)


@cache
def _marks() -> tuple[frozenset[str], frozenset[str]]:
    """What the names of a vision tower and of a projector contain, in any family of the table."""
    known = seeing_families().values()
    return frozenset(v.tower for v in known), frozenset(mark for v in known for mark in v.projector)


def component_of(parameter_name: str) -> str:
    """Which part a parameter belongs to, by its Transformers name (wrappers' prefixes do not matter).

    The names are those of `adora_vl.families`: no family uses another one's mark for another part. A text-only
    model is all language model.
    """
    tower, projector = _marks()
    if any(mark in parameter_name for mark in projector):
        return PROJECTOR
    return VISION_TOWER if any(mark in parameter_name for mark in tower) else LANGUAGE_MODEL


def freeze(model: nn.Module, components: Iterable[str]) -> dict[str, int]:
    """Set `requires_grad=False` on every parameter of `components`. Returns the number of parameters of each.

    Raises `UserError` where a component names no parameter of this model, instead of silently freezing nothing.
    """
    frozen: dict[str, int] = {}
    for component in components:
        parameters = [p for name, p in model.named_parameters() if component_of(name) == component]
        if not parameters:
            raise UserError(
                f"adora_freeze_{component}: true, but {type(model).__name__} has no parameter in its {component}; "
                "remove the key"
            )
        for parameter in parameters:
            parameter.requires_grad_(False)
        frozen[component] = len(parameters)
    return frozen


def trainable_components(model: nn.Module) -> frozenset[str]:
    """The parts with at least one trainable parameter; an adapter counts for the part that it sits in."""
    return frozenset(component_of(name) for name, p in model.named_parameters() if p.requires_grad)
