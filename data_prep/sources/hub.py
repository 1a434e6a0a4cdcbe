"""The hub's copy of Geometry3K: its Parquet files at one commit, through the hub's own cache, read as local files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from adora_vl.errors import UserError
from adora_vl.hub import no_hub
from data_prep.sources.tabular import Table, from_parquet

DATASET_ID = "hiyouga/geometry3k"


def from_hub(dataset_id: str, revision: str | None = None) -> Table:
    """The dataset of this id at a branch, tag or commit (None: the newest), whose full commit the table then knows.

    Downloaded once into the cache of `huggingface_hub`, from where it is read without a network too. Raises `UserError`
    where it cannot be had.
    """
    missing = no_hub()  # asked first, since the library tries again for minutes
    try:
        folder = snapshot_download(
            dataset_id, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"], max_workers=2
        )
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise UserError(
            f"input: the dataset {dataset_id!r}{at} cannot be loaded from the hub ({missing or error}); "
            "check the id and the network, or give a downloaded copy with --source parquet"
        ) from error
    # A snapshot lies in a folder that has the name of its commit, whatever was asked for.
    return replace(from_parquet(Path(folder)), location=dataset_id, revision=Path(folder).name)
