"""A model as the hub's library keeps one that it has loaded before."""

import shutil
from pathlib import Path

from huggingface_hub import constants


def copy_into_hub_cache(name: str, folder: Path, **commits: str) -> str:
    """A copy of `folder` for the commit of each branch or tag. Returns `name`."""
    home = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    for ref, commit in commits.items():
        shutil.copytree(folder, home / "snapshots" / commit)
        (home / "refs" / ref).write_text(commit)
    return name
