"""Trackers named by `report_to`: installed, and offline unless the user says otherwise."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from adora_vl.errors import UserError

# The packages that Transformers' trackers need, one of each; it says so only after the weights are loaded.
_PACKAGES = {
    "azure_ml": ("azureml",), "clearml": ("clearml",), "codecarbon": ("codecarbon",), "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",), "dvclive": ("dvclive",), "flyte": ("flytekit",), "mlflow": ("mlflow",),
    "neptune": ("neptune",), "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip


def prepare_trackers(
    report_to: Sequence[str], output_dir: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Raise `UserError` for a tracker that is not installed. wandb writes into `output_dir` without a network, unless
    WANDB_MODE is set; tensorboard and trackio are local by themselves (trackio_space_id sends it elsewhere).
    """
    for name in report_to:
        packages = _PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            raise UserError(
                f"report_to: '{name}' is not installed; pip install {packages[0]}, or leave it out (metrics.jsonl is "
                "always written)"
            )
    if "wandb" in report_to:
        environment.setdefault("WANDB_MODE", "offline")
        environment.setdefault("WANDB_DIR", output_dir)
        # what it keeps to be sent later, such as the images of tables; in the home folder by default
        environment.setdefault("WANDB_DATA_DIR", str(Path(output_dir, "wandb").absolute()))
