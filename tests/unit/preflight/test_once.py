"""Each value is converted once and the methods are built once, on every way into a run."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image

from adora_vl.config import AdoraGRPOConfig, command, methods, values
from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.run_context import RunContext
from adora_vl.doctor import __main__ as doctor
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.preflight.request import RunRequest, model_source
from adora_vl.preflight.run_checks import run_checks
from adora_vl.prepare import prepare, prepare_on_paper
from adora_vl.utils.convert import convert
from tests.support.recipes import CONFIGS_FOLDER

CPU_KEYS: dict[str, Any] = {"use_cpu": True, "bf16": False}
CHANGED_KEYS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "temperature": 0.9,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 32,
    "adora_method": {"dapo": {}, "adora": {"factor": 0.2, "criteria": ["length"]}},
    "adora_rollouts": {"refill": 1},
    "adora_freeze": ["vision_tower"],
    "adora_truncated": 16,
    "weight_decay": 0.1,
    "warmup_steps": 2,
}


class CountedCalls:
    """How often the value of each key was converted, and how often methods were built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.conversions: Counter[str] = Counter()
        self.builds = 0
        self._convert = convert
        self._convert_key = values.convert_key
        self._build_methods = methods.build_methods
        for module in (values, command):
            monkeypatch.setattr(module, "convert_key", self.convert_key)
        monkeypatch.setattr(methods, "convert", self.convert)
        monkeypatch.setattr(methods, "build_methods", self.build_methods)

    def convert_key(self, key: str, value: object, hint: object) -> object:
        self.conversions[key] += 1
        return self._convert_key(key, value, hint)

    def convert(self, key: str, value: object, hint: object) -> object:
        self.conversions[key] += 1
        return self._convert(key, value, hint)

    def build_methods(
        self, value: str | Mapping[str, Any], functions: Mapping[str, Any]
    ) -> methods.MethodSet:
        self.builds += 1
        return self._build_methods(value, functions)


def words_of_keys(output_dir: Path, **keys: object) -> list[str]:
    """Return the words of a training command with the changed keys of this module."""
    value_by_key = {
        **CPU_KEYS,
        **CHANGED_KEYS,
        **keys,
        "model_name_or_path": "tiny",
        "dataset_name": "synthetic",
        "adora_synthetic_rows": 16,
        "output_dir": output_dir,
    }
    return [f"--{key}={value}" for key, value in value_by_key.items()]


def start_from_python(output_dir: Path) -> None:
    """Make the checks of a run that Python code starts with the changed keys of this module."""
    row = {
        "prompt": [{"role": "user", "content": "Find x."}],
        "images": [Image.new("RGB", (56, 56))],
        "answer": "1",
    }
    config = AdoraGRPOConfig(output_dir=str(output_dir), **CPU_KEYS, **CHANGED_KEYS)
    request = RunRequest(
        config=config,
        model=model_source(
            "tiny", config=config, processor=None, peft_config=None, quantization_config=None
        ),
        data_source=Datasets(Dataset.from_list([row] * 8)),
        rewards="accuracy",
    )
    run_checks(request, RunContext.of_launch(config, output_dir_mode="ignore"))


@pytest.mark.slow
@pytest.mark.core
def test_every_value_is_converted_once_and_methods_are_built_once_on_every_way(
    tmp_path, monkeypatch, subtests, no_weights
):
    """Each way to start a run converts every value once and builds its methods once.

    A second conversion may change a value, and a second method has a state of its own.
    """

    def no_checks(run: object) -> list[object]:
        """Return no results."""
        return []

    monkeypatch.setattr(doctor, "checks_without_weights", no_checks)
    monkeypatch.setattr(doctor, "engine_checks", no_checks)
    words_for_gpu = ["--config", str(CONFIGS_FOLDER / "train" / "adora_3b_1gpu_lora.yaml")]
    launcher = DryRunOptions(accelerate_config=CONFIGS_FOLDER / "accelerate" / "gpu1.yaml")
    start_by_way: dict[str, Callable[[], object]] = {
        "command": lambda: prepare(parse_command(words_of_keys(tmp_path / "command"))),
        "dry run": lambda: prepare_on_paper(
            parse_command(words_of_keys(tmp_path / "paper")), DryRunOptions()
        ),
        "dry run for another machine": lambda: prepare_on_paper(
            parse_command(words_for_gpu), launcher
        ),
        "doctor": lambda: doctor.diagnose(parse_command(words_of_keys(tmp_path / "doctor"))),
        "Python": lambda: start_from_python(tmp_path / "python"),
    }
    counted = CountedCalls(monkeypatch)
    for name, start_run in start_by_way.items():
        with subtests.test(name):
            counted.conversions.clear()
            counted.builds = 0
            start_run()
            repeated = {key: number for key, number in counted.conversions.items() if number > 1}
            assert repeated == {}
            assert {"adora_method", "learning_rate"} <= counted.conversions.keys()
            assert counted.builds == 1
