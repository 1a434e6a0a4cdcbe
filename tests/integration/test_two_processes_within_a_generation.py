"""Two processes with ZeRO-3 and a data set whose rows have any number of images, which stop within a generation and go
on as if they had not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.kill_and_resume import facts
from data_prep.storage import write_split
from data_prep.synthetic.generate import generate
from tests.integration.support import launch

pytestmark = pytest.mark.slow
STEPS = {"save_steps": 1, "max_steps": 3, "per_device_train_batch_size": 4, "steps_per_generation": 4}
RUN = {
    "config": "configs/train/smoke_cpu.yaml", "use_vllm": "false", "logging_steps": 1, "save_total_limit": 9,
    "num_generations": 4, "max_completion_length": 16, "learning_rate": 1e-3, "shuffle_dataset": "false", **STEPS,
}  # fmt: skip
# Images of the problems of the one generation, four a rank. The second rank has none, and takes part in the vision
# passes of the first, whose sharded weights it helps to gather.
SHOWN = [1, 2, 1, 0, 0, 0, 0, 0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = generate(len(SHOWN), seed=7)
    made = [{**row, "images": row["images"] * count} for row, count in zip(rows, SHOWN, strict=True)]
    write_split(made, tmp_path / "data", "train")
    return tmp_path / "data"


def train(folder: Path, data: Path) -> dict:
    settings = {**RUN, "dataset_name": data, "output_dir": folder}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    launch("cpu_zero3", "-m", "adora_vl.train", *words)
    return facts(folder)


def test_each_rank_goes_on_with_its_own_rollouts(tmp_path, data):
    whole = train(tmp_path / "run", data)
    assert {path.name for path in (tmp_path / "run" / "checkpoint-2").glob("generation-*")} == {
        "generation-00000.pt", "generation-00001.pt"
    }  # fmt: skip
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    again = train(tmp_path / "run", data)
    assert list(whole["steps"]) == [1, 2, 3] and len(whole["rollouts"]) == 3
    assert again == whole
