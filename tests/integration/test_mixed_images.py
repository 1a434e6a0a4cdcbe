"""Two ZeRO-3 processes of which one has no image in a generation: neither waits for the other's vision tower."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from adora_vl.models.tiny.build import PRETRAINED
from data_prep.storage import write_split
from data_prep.synthetic.generate import generate
from tests.integration.support import launch

pytestmark = pytest.mark.slow


def test_one_process_with_images_and_one_without(tmp_path):
    """A generation has a problem a rank. By turns the second, both and the first have none; one row has two."""
    shown = [1, 0, 0, 0, 0, 2, 1, 1]
    rows = list(generate(len(shown), seed=7))
    made = [{**row, "images": row["images"] * count} for row, count in zip(rows, shown, strict=True)]
    write_split(made, tmp_path / "data", "train")
    launch(
        "cpu_zero3", "-m", "adora_vl.train", "--config", "configs/train/smoke_cpu.yaml", "--use_vllm", "false",
        "--dataset_name", str(tmp_path / "data"), "--output_dir", str(tmp_path / "out"), "--shuffle_dataset", "false",
        "--per_device_train_batch_size", "4", "--num_generations", "4", "--max_steps", "4", "--logging_steps", "1",
        "--max_completion_length", "12", "--save_strategy", "no", "--learning_rate", "1e-3", "--entropy_coef", "0.1",
        timeout=300,
    )  # fmt: skip
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "reward" in entry] == [1, 2, 3, 4]
    before, after = (load_file(folder / "model.safetensors") for folder in (PRETRAINED, tmp_path / "out"))
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any("visual" in name and not torch.equal(before[name], after[name]) for name in after)
