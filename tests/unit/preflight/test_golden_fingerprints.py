"""The fingerprint of every shipped config, and of runs from Python, is the stored one.

A checkpoint is compared with a run by its fingerprint, so a setting that is written otherwise by a
change of the code would refuse every run that goes on. `python -m
tests.unit.preflight.test_golden_fingerprints` stores those of today.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image
from transformers import BitsAndBytesConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.run_context import RunContext
from adora_vl.models.check import make_lora_config
from adora_vl.preflight.check_output_dir import compute_fingerprint_of_run
from adora_vl.preflight.python_inputs import Datasets, rewards_as_json
from adora_vl.preflight.request import RunRequest, model_source
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.preflight.run_checks import run_checks
from adora_vl.prepare import prepare_on_paper
from data_prep.cli import main as data_prep
from tests.support.commands import parse
from tests.support.recipes import ACCELERATE_CONFIG_BY_RECIPE, CONFIGS_FOLDER

STORED_FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
# As many rows as one generation of the largest recipe has prompts.
NUMBER_OF_ROWS = 128
# The models with few weights in the place of those that a recipe names; the others take `tiny`.
TINY_MODEL_BY_RECIPE = {
    "adora_llm_kk": "tiny_text",
    "smoke_text_cpu": "tiny_text",
    "tiny_zoom": "tiny_zoom",
}
# What depends on the files of this machine and not on the settings.
HASHED_FILES = ("dataset", "model")


def fingerprint_of_settings(run: ResolvedRun) -> dict[str, str]:
    """Return the fingerprint of a run without the hashes of files."""
    fingerprint = compute_fingerprint_of_run(
        run.request, run.model, run.data, run.user_code_hashes, run.context
    )
    return {key: value for key, value in fingerprint.items() if key not in HASHED_FILES}


def fingerprint_of_recipe(name: str, data: Path) -> dict[str, str]:
    """Return the fingerprint of a shipped config, as a dry run on this machine resolves it.

    `name`: the name of the config. `data`: the folder of the data set to train on.
    """
    arguments = ["--config", str(CONFIGS_FOLDER / "train" / f"{name}.yaml")]
    arguments += [
        "--model_name_or_path",
        TINY_MODEL_BY_RECIPE.get(name, "tiny"),
        "--dataset_name",
        str(data),
    ]
    # The recipe's own folder holds a finished run where somebody has tried it here.
    arguments += ["--output_dir", str(data.parent / "runs")]
    launcher = CONFIGS_FOLDER / "accelerate" / f"{ACCELERATE_CONFIG_BY_RECIPE[name]}.yaml"
    run = prepare_on_paper(parse_command(arguments), DryRunOptions(accelerate_config=launcher))
    return fingerprint_of_settings(run)


def fingerprint_from_python(**options: Any) -> dict[str, str]:
    """Return the fingerprint of a run that Python code starts with eight rows of one problem.

    `options`: config keys, and `rewards`, `quantised` and `lora` for the rewards, the quantisation
    and the words of a command about LoRA.
    """
    rows = [
        {
            "prompt": [{"role": "user", "content": "Find x."}],
            "images": [Image.new("RGB", (56, 56))],
            "answer": "1",
        }
    ]
    rewards = options.pop("rewards", "accuracy")
    quantised = options.pop("quantised", None)
    lora = options.pop("lora", ())
    peft_config = None
    if lora:
        peft_config = make_lora_config(parse(["--use_cpu", "true", "--bf16", "false", *lora])[2])
    config = AdoraGRPOConfig(
        output_dir="nowhere",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        report_to="none",
        **options,
    )
    source = model_source(
        "tiny",
        config=config,
        processor=None,
        peft_config=peft_config,
        quantization_config=quantised,
    )
    request = RunRequest(
        config=config,
        model=source,
        data_source=Datasets(Dataset.from_list(rows * 8)),
        rewards=rewards,
    )
    run = run_checks(request, RunContext.of_launch(config, output_dir_mode="ignore"))
    return fingerprint_of_settings(run)


ARGUMENTS_BY_PYTHON_CASE: dict[str, dict[str, Any]] = {
    "Python, defaults": {},
    "Python, many keys": {
        "rewards": ["easyr1", {"accuracy": {"rounding": True}}],
        "reward_weights": [1, 0.5],
        "adora_method": {
            "dapo": None,
            "adora": {"factor": {"start": 0.1, "end": 1, "shape": "linear", "steps": [0, 10]}},
        },
        "adora_stock_step": ["share_prompt"],
        "adora_truncated": "eos",
        "adora_rollouts": {"refill": 2},
        "adora_freeze": "vision_tower",
        "learning_rate": 1e-5,
        "max_steps": 10,
        "lr_scheduler_type": "constant",
    },
    "Python, an adapter in 4 bits": {
        "lora": ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"],
        "quantised": BitsAndBytesConfig(load_in_4bit=True),
        "adora_method": "grpo",
        "model_init_kwargs": {"dtype": "bfloat16"},
    },
}


def fingerprints() -> dict[str, dict[str, str]]:
    """Return the fingerprints of all shipped configs and of the runs from Python, by name."""
    with TemporaryDirectory() as folder:
        arguments = ["--rows", str(NUMBER_OF_ROWS), "--test-rows", "4"]
        for puzzle_kind in ("synthetic", "knights"):
            assert (
                data_prep([puzzle_kind, "--output", str(Path(folder, puzzle_kind)), *arguments])
                == 0
            )
        by_name = {}
        for name in ACCELERATE_CONFIG_BY_RECIPE:
            puzzle_kind = (
                "knights" if TINY_MODEL_BY_RECIPE.get(name) == "tiny_text" else "synthetic"
            )
            by_name[name] = fingerprint_of_recipe(name, Path(folder, puzzle_kind))
    return by_name | {
        name: fingerprint_from_python(**options)
        for name, options in ARGUMENTS_BY_PYTHON_CASE.items()
    }


def fingerprints_as_text(by_name: dict[str, dict[str, str]]) -> str:
    """Return the content of the file with the fingerprints.

    Entries that all have in common stand in it once, under `all`.
    """
    common = dict(set.intersection(*(set(settings.items()) for settings in by_name.values())))
    rest = {
        name: {key: value for key, value in settings.items() if key not in common}
        for name, settings in by_name.items()
    }
    return json.dumps({"all": common, **rest}, indent=1, sort_keys=True) + "\n"


# It plans every shipped config, which takes most of a minute.
@pytest.mark.slow
def test_fingerprints_of_shipped_configs_and_of_python_are_the_stored_ones(no_weights):
    """The module's docstring says how to store others, after a change that is meant."""
    assert fingerprints_as_text(fingerprints()) == STORED_FINGERPRINTS.read_text()


def brevity(completions: list[object], target: int = 10, **columns: object) -> list[float]:
    """Reward an answer of at most so many characters."""
    return [float(len(str(completion)) <= target) for completion in completions]


def reward_around(bonus: float) -> Callable[..., list[float]]:
    """Return a reward function that reads `bonus` from the function around it."""

    def with_bonus(completions: list[object], **columns: object) -> list[float]:
        return [bonus for _ in completions]

    return with_bonus


@dataclass(frozen=True)
class Brevity:
    """A reward with an option, as an object that is called."""

    target: int

    def __call__(self, completions: list[object], **columns: object) -> list[float]:
        return brevity(completions, target=self.target)


def test_a_run_from_python_is_another_one_with_any_other_reward():
    """Other rewards, another order or option of them make another fingerprint of a Python run.

    Otherwise the run would go on with another reward than it began with, without a word.
    """
    rewards = [
        "accuracy",
        "easyr1",
        ["accuracy", "easyr1"],
        ["easyr1", "accuracy"],
        {"accuracy": {"rounding": True}},
        brevity,
        ["accuracy", brevity],
        partial(brevity, target=5),
        partial(brevity, target=6),
        reward_around(bonus=0.5),
        reward_around(bonus=1.0),
        Brevity(target=5),
        Brevity(target=6),
    ]
    texts = [
        json.dumps(fingerprint_from_python(rewards=reward), sort_keys=True) for reward in rewards
    ]
    assert len(set(texts)) == len(rewards)
    assert texts[-1] == json.dumps(
        fingerprint_from_python(rewards=Brevity(target=6)), sort_keys=True
    )


def reward_that_counts(start: int) -> Callable[..., list[float]]:
    """Return a reward function that counts the rollouts it has scored, beginning at `start`."""
    count = start

    def counting(completions: list[object], **columns: object) -> list[float]:
        nonlocal count
        count += len(completions)
        return [1.0 for _ in completions]

    return counting


def test_a_run_from_python_is_the_same_one_when_its_reward_has_counted_on():
    """A second trainer in one notebook would be refused, as one with another reward."""
    texts = {
        json.dumps(fingerprint_from_python(rewards=reward_that_counts(start)), sort_keys=True)
        for start in (0, 9)
    }
    assert len(texts) == 1


def test_a_run_from_python_is_the_same_one_with_its_judge_at_another_address():
    """A judge at another address is the same reward in a fingerprint; another model is not."""
    texts = {
        rewards_as_json(
            [{"judge": {"model": "m", "base_url": f"http://{host}:8000/v1"}}, "accuracy"]
        )
        for host in ("a", "b")
    }
    assert len(texts) == 1
    assert rewards_as_json({"judge": {"model": "other"}}) not in texts


if __name__ == "__main__":
    STORED_FINGERPRINTS.write_text(fingerprints_as_text(fingerprints()))
    sys.exit()
