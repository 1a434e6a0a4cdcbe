"""DeepSpeed beyond plain ZeRO-3: its compiled optimizer, and optimizer states in host memory."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setting import Setting, process_group, random_token_ids, relative_distance
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import run_seconds

# What training does before it compiles anything, and what it compiles.
_PREPARE_CODE = "from adora_vl.utils.launch import prepare_engine_environment as prepare; prepare()"
_BUILD_CODE = (
    "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"
)
_STEPS_TRAINED = 3
NOISE_SLACK = 2


def builds(setting: Setting) -> Iterator[CheckLine]:
    """Compile CPUAdam from nothing, with the environment's programs on PATH and without.

    The compiler needs ninja, which pip puts among these programs. A user may start Python by its
    path, without an activated environment, and then they are not on PATH.
    """
    import deepspeed

    yield verdict_line("import", f"DeepSpeed {deepspeed.__version__}", "imports", True, "")
    programs = str(Path(sys.executable).parent)
    other_folders = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if part != programs
    )
    for name, path in (("on", f"{programs}{os.pathsep}{other_folders}"), ("not on", other_folders)):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": folder}
            done = subprocess.run(
                [sys.executable, "-c", f"{_PREPARE_CODE}\n{_BUILD_CODE}"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        error_lines = done.stderr.strip().splitlines()
        if done.returncode == 0:
            figure = "built"
        elif error_lines:
            figure = error_lines[-1][:200]
        else:
            figure = f"exit code {done.returncode}"
        title = f"CPUAdam, the environment's bin {name} PATH"
        yield verdict_line(
            title,
            figure,
            "builds",
            done.returncode == 0,
            "zero3_offload.yaml needs it; ninja and g++",
        )


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare ZeRO-3 with the optimizer in pinned and in plain host memory.

    Lines give the seconds of a step, and the distance of the weights afterwards.

    A GPU adds in any order, and Adam turns a gradient near 0 of another sign into a step of the
    same size. So two unpinned runs say how far apart the same steps may end.
    """
    ways = (
        {"unpinned": False, "unpinned again": False, "pinned": True}
        if setting.on_gpu
        else {"unpinned": False}
    )
    seconds, weights = {}, {}
    with process_group(setting):
        for name, pinned in ways.items():
            seconds[name], weights[name], moved = _trained(setting, pinned)
            yield at_most_line(
                f"{name}: weights that did not move",
                value=1 - moved,
                bound=0.01,
                unit="",
                source="an update of each but few",
            )
    if "pinned" not in seconds:
        yield skipped_line(
            "pinned",
            "memory is pinned for a GPU only",
            f"unpinned {seconds['unpinned']:.3g} s a step",
        )
        return
    yield same_weights(weights["pinned"], weights["unpinned"], weights["unpinned again"])
    unpinned = min(seconds["unpinned"], seconds["unpinned again"])
    ratio = seconds["pinned"] / unpinned
    figure = f"{seconds['pinned']:.3g} and {unpinned:.3g} s"
    yield at_most_line(
        "pinned, of unpinned's seconds per step",
        value=ratio,
        bound=1.1,
        unit="",
        source=f"else pinning has no use; {figure}",
    )


def same_weights(pinned: Tensor, unpinned: Tensor, again: Tensor) -> CheckLine:
    """Tell whether a pinned run ended as near to an unpinned one as another unpinned run did."""
    noise = max(relative_distance(again, unpinned), torch.finfo(torch.float32).eps)
    source = f"{NOISE_SLACK} times what two unpinned runs are apart"
    return at_most_line(
        "pinned, from unpinned: weights",
        value=relative_distance(pinned, unpinned),
        bound=NOISE_SLACK * noise,
        unit="",
        source=source,
    )


def _trained(setting: Setting, pinned: bool) -> tuple[float, Tensor, float]:
    """Train a model for three steps.

    The small size takes torch's AdamW, since compiling CPUAdam takes minutes; the check `deepspeed`
    compiles it.

    Returns:
        The median seconds of a step, the float32 weights of a layer after the last step, and the
        share of these weights that has changed.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    config = setting.config("3B", layers=2, vocabulary=32_768)
    model = setting.model(config, torch.bfloat16).train()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": not setting.full}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
        },
    }
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )[0]
    ids = random_token_ids(
        setting,
        rows=1,
        length=256 if setting.full else 32,
        vocabulary=config.text_config.vocab_size,
    )
    parameter = model.get_decoder().layers[0].mlp.up_proj.weight
    before = safe_get_full_fp32_param(parameter).clone()

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()

    spent = sorted(run_seconds(setting.device, step) for _ in range(_STEPS_TRAINED))[
        _STEPS_TRAINED // 2
    ]
    after = safe_get_full_fp32_param(parameter).clone()
    engine.destroy()
    return spent, after, float((after != before).double().mean())
