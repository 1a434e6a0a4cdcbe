"""Training runs whose rollouts come from vLLM servers that sample ahead while the policy learns.

The server is a fake, which answers with tokens that depend on the seed of a request.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from adora_vl.models.load import resolve_model_name
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.train import main
from benchmarks.stand_in_server import FakeVLLMServer
from tests.support.tiny_run import tiny_run_arguments

ZOOM_TOOL_KEYS = {
    "model_name_or_path": "tiny_zoom",
    "adora_system_prompt": "Look with zoom.",
    "tools": "[zoom]",
    "max_tool_calling_iterations": 2,
    "max_completion_length": 200,
    "vllm_max_model_length": 640,
}
ZOOM_CALL_TEXT = (
    '<tool_call>\n{"name": "zoom", "arguments": {"x1": 0, "y1": 0, "x2": 28, "y2": 28}}\n'
    "</tool_call><|im_end|>"
)
# The source of a reward that depends on the length of an answer alone.
REWARD_BY_LENGTH = """
def reward(completions, **kwargs):
    return [float(len(str(completion)) % 3 == 0) for completion in completions]
"""


def zoom_call_ids() -> list[list[int]]:
    """Return the only turn that a fake server may say, a call of `zoom`, as [its token ids]."""
    return [
        AutoTokenizer.from_pretrained(resolve_model_name("tiny_zoom"))(ZOOM_CALL_TEXT)["input_ids"]
    ]


def server_run_arguments(folder: Any, server: FakeVLLMServer, **overrides: Any) -> list[str]:
    """Return the command-line arguments of a run that samples one step ahead on this server.

    `overrides`: keys that are added, or have another value.
    """
    return tiny_run_arguments(
        folder,
        **{
            "use_vllm": "true",
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 0.1,
            "adora_weight_transfer": "file",
            "adora_rollouts.ahead": 1,
            "adora_max_drift": "null",
            "adora_self_check": "false",
            "entropy_coef": 1.0,
            "max_steps": 4,
            "save_steps": 1,
            "adora_synthetic_rows": 12,
            **overrides,
        },
    )


def read_step_metrics(folder: Any) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` that are of training steps."""
    return [step for step in read_metrics(folder / METRICS_FILE) if "reward" in step]


def assert_equal_end_after_kill(
    uninterrupted: Path,
    killed: Path,
    server: FakeVLLMServer,
    *,
    killed_after_step: int,
    **keys: Any,
) -> None:
    """Assert that a run that was killed and resumed ends with the weights of one that was not.

    The weights are equal to the bit, although the rollouts that wait in the checkpoint were sampled
    by weights that are gone.

    Args:
        uninterrupted: the folder of the run that was not killed.
        killed: a folder that does not exist. It gets the files that the same run has after a kill.
        server: the fake server that sampled for the first run, and samples for the resumed one.
        killed_after_step: the step after whose checkpoint the run is killed.
        keys: the keys of both runs.
    """
    shutil.copytree(uninterrupted, killed)
    for folder in killed.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > killed_after_step:
            shutil.rmtree(folder)
    (killed / "model.safetensors").unlink()
    server.start_again()
    server.post_requests.clear()
    assert main(server_run_arguments(killed, server, **keys)) == 0
    assert (killed / "model.safetensors").read_bytes() == (
        uninterrupted / "model.safetensors"
    ).read_bytes()
    # How many optimizer steps old the weights are that sampled each step's rollouts.
    staleness_by_run = [
        [step.get("adora/staleness") for step in read_step_metrics(folder)]
        for folder in (uninterrupted, killed)
    ]
    assert staleness_by_run[0] == staleness_by_run[1]
