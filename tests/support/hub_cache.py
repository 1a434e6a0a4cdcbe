"""A model as the hub's library keeps one that it has loaded before."""

import shutil
from pathlib import Path

from huggingface_hub import constants


def copy_into_hub_cache(name: str, folder: Path, **commits: str) -> str:
    """Put a model into the cache of the hub's library, as if it had been downloaded.

    Args:
        name: the hub id, such as "org/model", which is returned.
        folder: the files of the model.
        commits: the commit hash of each branch or tag. Every commit gets the same files.
    """
    home = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    for ref, commit in commits.items():
        shutil.copytree(folder, home / "snapshots" / commit)
        (home / "refs" / ref).write_text(commit)
    return name
