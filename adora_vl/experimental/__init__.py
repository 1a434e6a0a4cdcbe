"""Methods that reach into the step and that nobody has reproduced here.

A method moves out when a figure of ours shows its gain. It is deleted when a release of TRL breaks
it and nobody mends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.training.generation import Extension

if TYPE_CHECKING:
    from adora_vl.dedup.images import DistinctImages
    from adora_vl.types import StepContext

__all__ = ["Extension", "extensions"]


def extensions(
    context: StepContext, images: DistinctImages, *, has_dropout: bool
) -> list[Extension]:
    """The methods that the run's keys ask for, in the order of their calls.

    `has_dropout`: of the policy.

    Raises `UserError` where one does not go with the model.
    """
    from adora_vl.experimental.noisy_rollouts import NoisyRollouts
    from adora_vl.experimental.visual_tokens import VisualDependency

    found: list[Extension] = []
    asked = context.config.adora_extensions
    if asked.noisy_rollouts.on:
        found.append(NoisyRollouts(context, images))
    if asked.visual_tokens.on:
        found.append(VisualDependency(context, images, has_dropout=has_dropout))
    return found
