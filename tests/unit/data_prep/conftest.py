"""What all tests of data preparation share."""

from pathlib import Path

import pytest
from datasets import disable_progress_bars


@pytest.fixture(autouse=True)
def _quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a cache of its own for `datasets`, which shows no progress bars."""
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", tmp_path.with_name(f"{tmp_path.name}-cache")
    )
    disable_progress_bars()  # writing a table shows one, on the stderr that the tests read
