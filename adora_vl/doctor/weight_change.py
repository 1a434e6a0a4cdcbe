"""A weight of the policy that is changed for a while, to see whether the engine gets the change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adora_vl.models.families import LANGUAGE_MODEL, component_of, vision_by_model_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NamedParameter(NamedTuple):
    """A parameter of a model with its name."""

    name: str
    parameter: Any


def choose_parameter(model: "PreTrainedModel", *, vision: bool) -> NamedParameter | None:
    """Choose a trained weight matrix whose change alters the answers of a model most directly.

    - Without `vision` it is the last matrix in the layers of the language model.
    - With `vision` it is the last matrix of the projector, though other vision parts may come
      later. Parts of "DeepStack" give their features to later layers of the language model, where
      they are added to much larger numbers and hardly move an answer.
    - With `vision` and a projector that is not trained it is the last matrix of any vision part.

    Returns None if no such matrix is trained.
    """
    candidates: list[NamedParameter] = []
    for name, parameter in model.named_parameters():
        is_of_vision = component_of(name) != LANGUAGE_MODEL
        if is_of_vision != vision:
            continue
        is_in_layers = is_of_vision or ".layers." in name
        is_matrix = len(_unsharded_shape(parameter)) >= 2
        if parameter.requires_grad and is_matrix and is_in_layers:
            candidates.append(NamedParameter(name, parameter))
    projector_names = [family.projector_name_parts[0] for family in vision_by_model_type().values()]
    in_projector = []
    for candidate in candidates:
        if any(projector_name in candidate.name for projector_name in projector_names):
            in_projector.append(candidate)
    preferred = in_projector or candidates
    return preferred[-1] if preferred else None


def _unsharded_shape(parameter: Any) -> tuple[int, ...]:
    """Return the full shape of a parameter, also under ZeRO-3.

    There each rank has a shard of it, and the parameter itself is empty between its uses.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _gathered_parameter(parameter: Any) -> Iterator[Tensor]:
    """Yield a whole parameter, which ZeRO-3 gathers from all ranks. Collective.

    What rank 0 writes into it inside of the `with` block goes to all ranks.
    """
    if not hasattr(parameter, "ds_tensor"):
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield parameter.data


@contextmanager
def changeable_weight(parameter: Any, seed: int = 0) -> Iterator[Callable[[float], None]]:
    """Yield a function `set_noise(scale)` that replaces a weight by its old value plus noise.

    The noise is normal, with `scale` times the root mean square of the weight. At the end of the
    `with` block the weight has its old value again. Collective under ZeRO-3, as is `set_noise`.
    """
    with _gathered_parameter(parameter) as values:
        old_values = values.detach().to("cpu", copy=True)
    noise = torch.randn(old_values.shape, generator=torch.Generator().manual_seed(seed))
    noise_size = float(old_values.float().square().mean().sqrt())
    if noise_size == 0:
        # LoRA's second factor is zero at first. It gets noise of the size of an initialisation.
        noise_size = 1.0 / max(_unsharded_shape(parameter)) ** 0.5
    noise = noise * noise_size

    def write(new_values: Tensor) -> None:
        """Replace the weight on all ranks."""
        with _gathered_parameter(parameter) as weight:
            weight.copy_(new_values)

    def set_noise(scale: float) -> None:
        """Replace the weight by its old value plus noise."""
        write((old_values.float() + scale * noise).to(old_values.dtype))

    with torch.no_grad():
        try:
            yield set_noise
        finally:
            write(old_values)
