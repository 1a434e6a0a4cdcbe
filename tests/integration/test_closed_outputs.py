"""A training command whose output nobody reads any more."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.launch import cli_arguments
from tests.support.paths import REPOSITORY
from tests.support.tiny_run import read_training_log

SMOKE_CONFIG = REPOSITORY / "configs" / "train" / "smoke_cpu.yaml"


@pytest.mark.slow
def test_a_training_whose_pipe_is_closed_goes_on_and_writes_its_files(tmp_path):
    """A training whose stdout is closed after a line, as by `train | head -1`, ends in order."""
    run_folder = tmp_path / "run"
    arguments = cli_arguments(
        config=SMOKE_CONFIG,
        output_dir=run_folder,
        use_vllm="false",
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        logging_steps=1,
    )
    # With this variable Python would write each line at once, whatever the run does.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "adora_vl.train", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert "training problems" in process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait() == 0, stderr
    assert "stdout has no reader any more" in stderr
    assert "Traceback" not in stderr
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert [step["step"] for step in read_training_log(run_folder)] == [1, 2]
