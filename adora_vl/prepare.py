"""From the arguments to a checked run: everything that needs no weights, so that a mistake costs seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.store import facts_of
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import written_to
from adora_vl.utils.launch import fewer_than_asked, prepare_engine_environment, use_expandable_segments
from adora_vl.utils.versions import check_versions

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig
    from trl import ModelConfig

    from adora_vl.checkpoint.fingerprint import Fingerprint
    from adora_vl.checkpoint.resume import StartPoint
    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.batch_plan import BatchPlan
    from adora_vl.data.prompt_lengths import OverlongPrompts
    from adora_vl.evaluation import EvaluationPlan
    from adora_vl.rewards import ChosenRewards

_held: list[Any] = []  # the locks on output_dir, kept until this process ends


@dataclass(frozen=True)
class Run:
    """A training command, read and checked."""

    script: AdoraScriptArguments
    config: AdoraGRPOConfig
    model: ModelConfig
    dataset: Dataset
    plan: BatchPlan
    start: StartPoint
    fingerprint: Fingerprint
    evaluations: EvaluationPlan | None  # of the evaluations on the way
    data: list[str]  # the folders of its data sets
    rewards: ChosenRewards
    left_out: list[str]  # ids of the rows that adora_overlong_prompts: drop leaves out

    def manifest(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What `manifest.json` says of it at its start."""
        from adora_vl.record.manifest import run_manifest

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
            left_out=len(self.left_out),
        )

    @property
    def finished(self) -> Path | None:
        """The checkpoint of the last step, if the run has reached it: Transformers would take one step more."""
        checkpoint = Path(self.start.checkpoint) if self.start.checkpoint else None
        over = checkpoint is not None and 0 < self.config.max_steps <= facts_of(checkpoint)["step"]
        return checkpoint if over else None


def prepare(arguments: Sequence[str], *, to_train: bool = True) -> Run:
    """Read and check everything that can be checked without loading a weight. Raises `UserError`.

    With `to_train` false nothing of `output_dir` is looked at, held or cleared.
    """
    check_versions(use_vllm=False)
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.builtin.assets import resolve_model
    from adora_vl.checkpoint.resume import StartPoint
    from adora_vl.config.batch_plan import check_rows
    from adora_vl.config.checks import check_machines, check_run, costs_of, rewards_of
    from adora_vl.config.command_line import parse
    from adora_vl.data.loading import as_asked
    from adora_vl.evaluation import fitting_evaluations, take_evaluations
    from adora_vl.models.check import LOST_UPDATES, check_family, loses_updates
    from adora_vl.models.load import check_weights, load_config
    from adora_vl.planning.sharding import machines_of
    from adora_vl.record.trackers import prepare_trackers
    from adora_vl.rollout.engine_settings import refuse_on_cpu
    from adora_vl.utils.hub import notes_on

    script, config, model = parse(arguments)
    check_versions(config.use_vllm)
    prepare_trackers(config.report_to, config.output_dir)
    _check_upload(config)
    if not model.model_name_or_path:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    rewards = rewards_of(arguments, script, config)
    with config.main_process_first(desc="building the tiny model where it is missing"):
        model.model_name_or_path = resolve_model(model.model_name_or_path)
    model_config = load_config(model.model_name_or_path, model.model_revision)
    data = _folders(script, config)
    notes = [*notes_on(model.model_name_or_path), *check_family(model, config, model_config)]
    if loses_updates(model, model_config, deepspeed=config.deepspeed_plugin is not None):
        notes.append(LOST_UPDATES)
    check_machines(config, config.world_size, machines_of())
    plan = check_run(config, model, model_config, config.world_size)
    if config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(model_config, config.vllm_enable_sleep_mode)
    overlong = _overlong_prompts(script, config, model, model_config)
    dataset = _rows(script, config, model, model_config, data, overlong)
    check_rows(plan, len(dataset))
    _try(rewards, dataset, config)
    evaluations = take_evaluations(config, data, script.adora_prompt)
    if evaluations is not None:
        evaluations = fitting_evaluations(evaluations, overlong)
    check_weights("model_name_or_path", model.model_name_or_path)
    asked, left_out = as_asked(script, dataset.data.table), overlong.left_out
    start, now = (
        _choose_start(asked, config, model, data, rewards, left_out) if to_train else (StartPoint(None, []), {})
    )
    if config.process_index == 0 and to_train:
        facts = f"{amount(len(dataset), 'training problem')}; {plan.describe()}"
        lines = [facts, *filter(None, [fewer_than_asked()]), *notes, *costs_of(config), *start.notes]
        print("\n".join(lines), flush=True)
    return Run(script, config, model, dataset, plan, start, now, evaluations, data, rewards, left_out)


def _check_upload(config: AdoraGRPOConfig) -> None:
    """Transformers makes the repository when the weights are loaded."""
    from adora_vl.utils.hub import no_hub

    if config.push_to_hub and no_hub():
        raise UserError(f"push_to_hub: true, but {no_hub()}; set it to false and upload output_dir afterwards")


def _folders(script: AdoraScriptArguments, config: AdoraGRPOConfig) -> list[str]:
    """The folders of the data sets, made by the first rank where they are missing."""
    from adora_vl.builtin.assets import data_folders

    with config.main_process_first(desc="making the dataset where it is missing"):
        return data_folders(script)


def _rows(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, model: ModelConfig, model_config: PretrainedConfig,
    data: list[str], overlong: OverlongPrompts,
) -> Dataset:  # fmt: skip
    """The rows to train on: those that the model can read and whose prompts leave room for an answer."""
    from adora_vl.data.loading import load_rows
    from adora_vl.data.rows import has_images
    from adora_vl.models.check import check_model

    def fitting(rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        check_model(model, model_config, has_images=has_images(rows.data.table))  # a tokenizer alone counts no images
        return overlong.fitting(rows, texts)

    return load_rows(script, data, config.seed, fitting)


def _overlong_prompts(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, model: ModelConfig, model_config: PretrainedConfig
) -> OverlongPrompts:
    """What finds the prompts that leave no room for an answer. The first rank alone asks a server for its limit."""
    from accelerate.utils import broadcast_object_list

    from adora_vl.data.prompt_lengths import (
        OverlongPrompts,
        context_limit,
        limits_of,
        served_length,
        tokenizer_counter,
        uncountable,
    )
    from adora_vl.models.load import limit_pixels, load_processor

    speaks, on_server = config.process_index == 0, config.use_vllm and config.vllm_mode == "server"
    served = [served_length(config) if speaks and on_server else None]
    if config.world_size > 1 and on_server:
        broadcast_object_list(served)
    limit = context_limit(config, model_config, served[0])
    unknown = uncountable(model_config) or ("" if limit else "neither a key nor the model has a limit")
    if speaks and unknown:
        print(f"the lengths of the prompts are not checked: {unknown}")
    elif speaks and on_server and served[0] is None:
        print(f"the vLLM server does not answer yet, so prompts are held against {limit.name if limit else None}")
    processor = load_processor(str(model.model_name_or_path), model.model_revision)
    limit_pixels(processor, config.min_pixels, config.max_pixels)
    return OverlongPrompts(
        None if unknown else limit,
        tokenizer_counter(processor, script.adora_system_prompt, config.chat_template_kwargs),
        limits_of(processor, model_config, config.min_pixels, config.max_pixels),
        script.adora_overlong_prompts,
        speaks=speaks,
    )


def _try(rewards: ChosenRewards, dataset: Dataset, config: AdoraGRPOConfig) -> None:
    """Check that the data set has the columns of the user's own reward functions, and score two rows with them."""
    from transformers import TrainerState

    from adora_vl.rewards import try_rewards

    rewards.check_columns([name for name in dataset.column_names if name != "prompt"])
    rows = [dataset[number] for number in range(min(2, len(dataset)))] if rewards.own else []
    try_rewards(rewards, rows, config.adora_reward_timeout, TrainerState())


def _choose_start(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, model: ModelConfig, data: list[str], rewards: ChosenRewards,
    left_out: list[str],
) -> tuple[StartPoint, Fingerprint]:  # fmt: skip
    """Where the run starts, which the first rank decides from `output_dir` and its checkpoints. Raises `UserError`,
    also where the ranks do not share `output_dir` or were not given the same run.
    """
    from accelerate.utils import broadcast_object_list

    from adora_vl.checkpoint.fingerprint import check_ranks, fingerprint, leave_token, sharding_of
    from adora_vl.checkpoint.resume import choose_start, lock_output_dir
    from adora_vl.checkpoint.stop import STOPPED_FILE
    from adora_vl.checkpoint.writer import begun, refuse_own_files

    name, revision = str(model.model_name_or_path), model.model_revision
    own = fingerprint(
        script, config, model, data=data, model=name, revision=revision, processes=config.world_size,
        sharding=sharding_of(config), rewards=rewards.hashes, left_out=left_out,
    )  # fmt: skip
    output_dir, wanted = Path(config.output_dir), config.resume_from_checkpoint
    chosen: StartPoint | None = None
    refusal = token = ""
    if config.process_index == 0:
        try:
            with written_to("output_dir", output_dir):
                ours = begun(output_dir)
            if ours:  # else no lock is put into somebody's folder before it was looked at
                _held.append(lock_output_dir(output_dir))
            refuse_own_files(output_dir, config.overwrite_output_dir)
            if output_dir.is_dir():  # a lock that this process holds already is the same one
                _held.append(lock_output_dir(output_dir))
            inputs = [("model_name_or_path", name), *(("dataset_name", folder) for folder in data)]
            chosen = choose_start(output_dir, wanted, config.overwrite_output_dir, own, inputs)
            _held.append(lock_output_dir(output_dir))
            (output_dir / STOPPED_FILE).unlink(missing_ok=True)
            token = leave_token(output_dir) if config.world_size > 1 else ""
        except UserError as error:
            refusal = str(error)
    told: list[Any] = [chosen, own, refusal, token]
    if config.world_size > 1:
        broadcast_object_list(told)
    start, first, refusal, token = told
    if refusal:
        raise UserError(refusal)
    if config.world_size > 1:
        check_ranks(output_dir, token, first, own)
    return start, first
