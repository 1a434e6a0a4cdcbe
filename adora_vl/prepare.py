"""From the arguments to a checked run: everything that needs no weights, so that a mistake costs seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.store import facts_of
from adora_vl.commands import amount
from adora_vl.errors import UserError
from adora_vl.rollout.environment import prepare_engine_environment
from adora_vl.versions import check_versions

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

    from adora_vl.checkpoint.fingerprint import Fingerprint
    from adora_vl.checkpoint.resume import Start
    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.arithmetic import BatchPlan
    from adora_vl.evaluation import EvaluationPlan
    from adora_vl.rewards import ChosenRewards

_held: list[Any] = []  # the lock on output_dir, until this process ends


@dataclass(frozen=True)
class Run:
    """A training command, read and checked."""

    script: AdoraScriptArguments
    config: AdoraGRPOConfig
    model: ModelConfig
    dataset: Dataset
    plan: BatchPlan
    start: Start
    fingerprint: Fingerprint
    evaluations: EvaluationPlan | None  # of the evaluations on the way
    data: list[str]  # the folders of its data sets
    rewards: ChosenRewards

    def manifest(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What `manifest.json` says of it at its start."""
        from adora_vl.report.manifest import run_manifest

        return run_manifest(
            self.script,
            self.config,
            self.model,
            arguments=arguments,
            data=self.data,
            rows=len(self.dataset),
            fingerprint=self.fingerprint,
            plan=self.plan.describe(),
            processes=self.config.world_size,
            checkpoint=self.start.checkpoint,
            rewards=self.rewards.hashes,
        )

    @property
    def finished(self) -> Path | None:
        """The checkpoint of the last step, where the run is there already. `transformers` would take one step more."""
        checkpoint = Path(self.start.checkpoint) if self.start.checkpoint else None
        over = checkpoint is not None and 0 < self.config.max_steps <= facts_of(checkpoint)["step"]
        return checkpoint if over else None


def prepare(arguments: Sequence[str], *, to_train: bool = True) -> Run:
    """Read and check everything that can be checked without loading a weight. Raises `UserError`.

    With `to_train` false nothing of `output_dir` is looked at, held or cleared.
    """
    check_versions(use_vllm=False)
    prepare_engine_environment()
    from adora_vl.assets import resolve_model
    from adora_vl.checkpoint.resume import Start
    from adora_vl.config.command_line import parse
    from adora_vl.config.given import config_file
    from adora_vl.config.run_checks import check_machines, check_run, costs_of
    from adora_vl.evaluation import take_evaluations
    from adora_vl.hub import notes_on
    from adora_vl.memory.sharding import machines_of
    from adora_vl.models.check import check_family, check_model
    from adora_vl.models.load import check_weights, load_config
    from adora_vl.prompts import asks_for_answer_tags
    from adora_vl.rewards import choose_rewards
    from adora_vl.rollout_log.backends import prepare_trackers
    from adora_vl.rows import has_images
    from adora_vl.training_data import load_rows

    script, config, model = parse(arguments)
    check_versions(config.use_vllm)
    prepare_trackers(config.report_to, config.output_dir)
    _check_upload(config)
    if not model.model_name_or_path:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    file = config_file(arguments)
    folders = [*([file.parent] if file else []), Path.cwd()]
    rewards = choose_rewards(
        script.adora_reward, script.adora_reward_options, rounding=script.adora_rounding,
        answer_tags=asks_for_answer_tags(script.adora_system_prompt, script.adora_prompt), folders=folders,
        output_dir=Path(config.output_dir),
    )  # fmt: skip
    weights = config.reward_weights
    if weights is not None and len(weights) != len(rewards.functions):
        raise UserError(f"reward_weights: {weights} has {len(weights)} values for adora_reward: {script.adora_reward}")
    with config.main_process_first(desc="building the tiny model where it is missing"):
        model.model_name_or_path = resolve_model(model.model_name_or_path)
    model_config = load_config(model.model_name_or_path, model.model_revision)
    data = _folders(script, config)
    dataset = load_rows(script, data, config.seed)
    _try(rewards, dataset, config)
    notes = [*notes_on(model.model_name_or_path), *check_family(model, config, model_config)]
    check_model(model, model_config, has_images=has_images(dataset.data.table))
    check_machines(config, config.world_size, machines_of())
    plan = check_run(config, model, model_config, len(dataset), config.world_size)
    evaluations = take_evaluations(config, data, script.adora_prompt)
    check_weights("model_name_or_path", model.model_name_or_path)
    start, now = _choose_start(script, config, model, data, rewards) if to_train else (Start(None, []), {})
    if config.process_index == 0 and to_train:
        lines = [
            f"{amount(len(dataset), 'training problem')}; {plan.describe()}",
            *notes,
            *costs_of(config),
            *start.notes,
        ]
        print("\n".join(lines), flush=True)
    return Run(script, config, model, dataset, plan, start, now, evaluations, data, rewards)


def _check_upload(config: AdoraGRPOConfig) -> None:
    """Transformers makes the repository when the weights are loaded."""
    from adora_vl.hub import no_hub

    if config.push_to_hub and no_hub():
        raise UserError(f"push_to_hub: true, but {no_hub()}; set it to false and upload output_dir afterwards")


def _folders(script: AdoraScriptArguments, config: AdoraGRPOConfig) -> list[str]:
    """The folders of the data sets, made by the first rank where they are missing."""
    from adora_vl.training_data import data_folders

    with config.main_process_first(desc="making the dataset where it is missing"):
        return data_folders(script)


def _try(rewards: ChosenRewards, dataset: Dataset, config: AdoraGRPOConfig) -> None:
    """Own reward functions get the columns that they need, and score two rows."""
    from transformers import TrainerState

    from adora_vl.rewards import try_rewards

    rewards.check_columns([name for name in dataset.column_names if name != "prompt"])
    rows = [dataset[number] for number in range(min(2, len(dataset)))] if rewards.own else []
    try_rewards(rewards, rows, config.adora_reward_timeout, TrainerState())


def _choose_start(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, model: ModelConfig, data: list[str], rewards: ChosenRewards
) -> tuple[Start, Fingerprint]:
    """The first rank looks at `output_dir` and its checkpoints, all ranks do what it found. Raises `UserError`, also
    where the ranks do not share `output_dir` or were not given the same run.
    """
    from accelerate.utils import broadcast_object_list

    from adora_vl.checkpoint.fingerprint import fingerprint, sharding_of
    from adora_vl.checkpoint.ranks import check_ranks, leave_token
    from adora_vl.checkpoint.resume import choose_start, hold, refuse_foreign
    from adora_vl.checkpoint.stop import STOPPED_FILE

    name, revision = str(model.model_name_or_path), model.model_revision
    own = fingerprint(
        script, config, model, data=data, model=name, revision=revision, processes=config.world_size,
        sharding=sharding_of(config), rewards=rewards.hashes,
    )  # fmt: skip
    output_dir, wanted = Path(config.output_dir), config.resume_from_checkpoint
    found: list[Any] = [None, own, None, ""]
    if config.process_index == 0:
        try:
            refuse_foreign(output_dir)  # before a lock is put into somebody's folder
            if output_dir.is_dir():
                _held.append(hold(output_dir))
            inputs = [("model_name_or_path", name), *(("dataset_name", folder) for folder in data)]
            found[0] = choose_start(output_dir, wanted, config.overwrite_output_dir, own, inputs)
            _held.append(hold(output_dir))
            (output_dir / STOPPED_FILE).unlink(missing_ok=True)
            found[3] = leave_token(output_dir) if config.world_size > 1 else ""
        except UserError as error:
            found[2] = str(error)
    if config.world_size > 1:
        broadcast_object_list(found)
    start, first, refusal, token = found
    if refusal:
        raise UserError(refusal)
    if config.world_size > 1:
        check_ranks(output_dir, token, first, own)
    return start, first
