"""Trackers named by `report_to`: installed, and offline unless the user says otherwise."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec

from adora_vl.errors import UserError

_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


def prepare_trackers(
    report_to: Sequence[str], output_dir: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Raise `UserError` for a tracker that is not installed. wandb writes into `output_dir` without a network, unless
    WANDB_MODE is set; tensorboard and trackio are local by themselves (trackio_space_id sends it elsewhere).
    """
    for name in report_to:
        modules = _MODULES.get(name, ())
        if modules and not any(find_spec(module) for module in modules):
            raise UserError(
                f"report_to: '{name}' is not installed; pip install {name}, or leave it out (metrics.jsonl is always "
                "written)"
            )
    if "wandb" in report_to:
        environment.setdefault("WANDB_MODE", "offline")
        environment.setdefault("WANDB_DIR", output_dir)
