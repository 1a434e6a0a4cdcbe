"""The entry point: read the config, build, train, report.

accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train --config configs/train/smoke_cpu.yaml
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.errors import UserError
from adora_vl.rollout.environment import prepare_engine_environment
from adora_vl.versions import check_versions

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.trainer import AdoraGRPOTrainer


def load_training_data(script: AdoraScriptArguments, config: AdoraGRPOConfig) -> Dataset:
    """The prepared rows with a conversational `prompt` column; images are decoded when a row is read."""
    from adora_vl.assets import resolve_dataset
    from adora_vl.prompts import conversation
    from data_prep.storage import load_split

    with config.main_process_first(desc="making the dataset where it is missing"):
        folder = resolve_dataset(script.dataset_name, script.adora_synthetic_rows)
    dataset = load_split(folder, script.dataset_train_split)
    prompts = [conversation(problem, script.adora_system_prompt) for problem in dataset["problem"]]
    return dataset.add_column("prompt", prompts)


def build_trainer(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, model: ModelConfig, dataset: Dataset
) -> AdoraGRPOTrainer:
    """Weights are loaded here, and nowhere before."""
    from trl import get_peft_config

    from adora_vl.rewards import reward_functions
    from adora_vl.trainer import AdoraGRPOTrainer

    own: dict[str, Any] = {"revision": model.model_revision, "dtype": model.dtype}
    if model.attn_implementation is not None:
        own["attn_implementation"] = model.attn_implementation
    config.model_init_kwargs = {**own, **(config.model_init_kwargs or {})}
    return AdoraGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward_functions(script.adora_reward, rounding=script.adora_rounding),
        args=config,
        train_dataset=dataset,
        peft_config=get_peft_config(model),
    )


def prepare(arguments: Sequence[str]) -> tuple[AdoraScriptArguments, AdoraGRPOConfig, ModelConfig, Dataset]:
    """Read and check everything that can be checked without loading a weight. Raises `UserError`."""
    check_versions(use_vllm=False)
    prepare_engine_environment()
    from adora_vl.assets import resolve_model
    from adora_vl.cli import parse
    from adora_vl.models.load import load_config
    from adora_vl.preflight import check_run
    from adora_vl.rewards import reward_functions

    script, config, model = parse(arguments)
    check_versions(config.use_vllm)
    if not model.model_name_or_path:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    functions = reward_functions(script.adora_reward)
    weights = config.reward_weights
    if weights is not None and len(weights) != len(functions):
        raise UserError(f"reward_weights: {weights} has {len(weights)} values for adora_reward: {script.adora_reward}")
    with config.main_process_first(desc="building the tiny model where it is missing"):
        model.model_name_or_path = resolve_model(model.model_name_or_path)
    model_config = load_config(model.model_name_or_path, model.model_revision)
    dataset = load_training_data(script, config)
    checkpoint_to_resume(config)
    plan = check_run(config, model, model_config, len(dataset), config.world_size)
    if config.process_index == 0:
        print(f"{len(dataset)} training problems; {plan.describe()}", flush=True)
    return script, config, model, dataset


def checkpoint_to_resume(config: AdoraGRPOConfig) -> str | None:
    """`resume_from_checkpoint`: a folder, or `true` for the newest one in `output_dir`.

    Raises `UserError` where there is none.
    """
    from transformers.trainer_utils import get_last_checkpoint

    wanted = config.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() == "true":
        newest = get_last_checkpoint(config.output_dir) if Path(config.output_dir).is_dir() else None
        if newest is None:
            raise UserError(f"resume_from_checkpoint: true, but {config.output_dir!r} holds no checkpoint-N folder")
        return str(newest)
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise UserError(f"resume_from_checkpoint: {str(wanted)!r} is no checkpoint folder (no trainer_state.json)")
    return str(wanted)


def train(arguments: Sequence[str]) -> None:
    """Train, save the model with its processor into `output_dir`, and print what happened and where to look."""
    from adora_vl.report.summary import print_summary

    script, config, model, dataset = prepare(arguments)
    trainer = build_trainer(script, config, model, dataset)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(config))
    seconds = time.perf_counter() - started
    trainer.save_model(config.output_dir)
    trainer.save_state()
    model_folder = trainer.save_merged() or Path(config.output_dir)
    if trainer.accelerator.is_main_process:
        print_summary(trainer.state.log_history, config, model_folder, seconds)
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.end_training()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 the user's input is wrong (one line), 1 anything else, with a traceback."""
    try:
        train(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank finds the same mistake; once is enough
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
