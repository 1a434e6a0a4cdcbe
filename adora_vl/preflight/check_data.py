"""Checks of the rows, and of what is evaluated during training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset, IterableDataset

from adora_vl.builtin.builtin_data import (
    KNIGHTS_DATA,
    RECIPE_BY_TINY_MODEL,
    SYNTHETIC_DATA,
    data_folders,
)
from adora_vl.config.batch_plan import check_row_count
from adora_vl.data.dataset import read_manifest, refuse_test_variants
from adora_vl.data.loading import load_rows
from adora_vl.data.prompt_lengths import assume_lengths
from adora_vl.data.prompts import control_tokens
from adora_vl.data.rows import has_images
from adora_vl.evaluation import (
    DataMissingError,
    EvaluationPlan,
    drop_overlong_problems,
    load_evaluation_plan,
)
from adora_vl.models import check as model_checks
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.load import pixel_limits
from adora_vl.packing.prompts import read_prompts
from adora_vl.preflight import python_columns, python_inputs
from adora_vl.preflight.resolved_run import DataInfo, ModelInfo, PromptInfo
from adora_vl.rollout.prompt_tokens import refuse_prefill
from adora_vl.tools.room import ConversationLimits, check_answer_limits
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest


def check_rows(
    request: RunRequest,
    layout: BatchLayout,
    model: ModelInfo,
    prompts: PromptInfo,
    context: RunContext,
) -> DataInfo:
    """Load the rows to train on, without those whose prompts leave no room for an answer.

    The rows are those of a data set that Python code passed, or of the data sets that a command, a
    dry run or the doctor names by keys. A dry run whose data set is not on this machine assumes the
    lengths of the prompts instead.

    Args:
        request: What the user asks for.
        layout: The sizes of the batches.
        model: The model, of which only the config is loaded.
        prompts: The processor, the tools and the limits on a prompt's length.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError` for rows that cannot be trained on, and for too few.
    """
    script_args = request.script_args
    if script_args is None:  # from Python
        data = _check_python_data(request, model, prompts)
    else:
        # Collective: every rank waits here while the first one of each machine makes the data set.
        with request.config.main_process_first(desc="making the dataset where it is missing"):
            folders = tuple(data_folders(script_args))
        missing = [folder for folder in folders if not Path(folder).is_dir()]
        if context.dry_run and missing:
            return _data_with_assumed_lengths(folders, missing[0], model, prompts, context)
        data = _load_command_data(request, script_args, folders, model, prompts, context)
        context.messages.notes.extend(_notes_on_tiny_model(request, folders))
    if data.row_count is None:
        # a stream
        return data
    try:
        check_row_count(layout, data.row_count)
    except UserError as error:
        # A dry run shows the memory all the same. Its last line is this error.
        if not context.dry_run:
            raise
        context.messages.refusals.append(str(error))
    return data


def _notes_on_tiny_model(request: RunRequest, folders: tuple[str, ...]) -> list[str]:
    """Return a note if one of the built-in tiny models is trained on other than built-in data.

    These models were trained on the built-in problems, and cannot learn from any others.
    """
    cli_args = request.cli_args
    model_name = str(cli_args.converted_values.get("model_name_or_path")) if cli_args else ""
    manifests = [read_manifest(Path(folder)) for folder in folders]
    # A folder without a manifest has other data: whatever we draw has one.
    sources = [manifest.get("source") if manifest else None for manifest in manifests]
    all_built_in = all(source in (SYNTHETIC_DATA, KNIGHTS_DATA) for source in sources)
    # `RECIPE_BY_TINY_MODEL` has the built-in models by name.
    if all_built_in or model_name not in RECIPE_BY_TINY_MODEL:
        return []
    return [
        f"{model_name} knows the built-in problems alone: on others expect no right answer. `python -m eval "
        "problems run --engine openai --base-url URL` shows what a served model does with them, "
        "and docs/hardware.md which recipe fits your GPU"
    ]


def _check_python_data(request: RunRequest, model: ModelInfo, prompts: PromptInfo) -> DataInfo:
    """Check the data sets that Python code passed, and describe the tools in their prompts.

    Raises `UserError`.
    """
    datasets = request.data_source
    assert isinstance(datasets, python_inputs.Datasets)
    refuse_test_variants(datasets.train, where="train_dataset:")
    _check_stream(request.config, datasets.train)
    tokens = control_tokens(prompts.processor)
    for key, dataset in datasets.by_key:
        python_columns.refuse_undecoded_columns(key, dataset)
        python_inputs.refuse_unusable_prompts(key, dataset, tokens)
        refuse_prefill(dataset)
    train = python_inputs.with_tool_descriptions(datasets.train, prompts.schemas)
    evaluated = python_inputs.with_tool_descriptions(datasets.evaluate, prompts.schemas)
    if prompts.schemas:  # a description of a tool may have a control token
        python_inputs.refuse_unusable_prompts("train_dataset", train, tokens)
    # The rows of a stream are checked when they are drawn.
    if python_inputs.is_plain_table(train):
        any_images = python_inputs.any_row_has_images(train)
        model_checks.check_reads_images(
            request.model.model_args, model.config, has_images=any_images
        )
        # This measures the prompts and refuses overlong ones. Rows of Python code are never left
        # out, so the numbers of the rows that it returns are not needed.
        prompts.length_filter.prompts_to_train_on(python_inputs.iterate_prompts(train), len(train))
    return DataInfo(
        train_dataset=train, eval_dataset=evaluated, prompt_lengths=prompts.length_filter.lengths
    )


def _check_stream(config: AdoraGRPOConfig, dataset: Dataset | IterableDataset) -> None:
    """Raise `UserError` for keys that do not go with a streamed data set.

    It has no length, so `max_steps` has to say that of the run. TRL shuffles it by `seed`, so
    `data_seed` would do nothing.
    """
    if not isinstance(dataset, IterableDataset):
        return
    if config.max_steps <= 0:
        raise UserError(
            f"max_steps: {config.max_steps}, but a streamed data set has no length that could end "
            "the run; set it, or load the data set whole"
        )
    if config.data_seed is not None:
        raise UserError(
            f"data_seed: {config.data_seed}, but a streamed data set is shuffled by seed; set that "
            "one, or load the data set whole"
        )


def _data_with_assumed_lengths(
    folders: tuple[str, ...],
    missing_folder: str,
    model: ModelInfo,
    prompts: PromptInfo,
    context: RunContext,
) -> DataInfo:
    """Assume the lengths of prompts for a dry run whose data set is not on this machine.

    Args:
        folders: The folders of the data sets.
        missing_folder: The first of them that is not here.
        model: The model, of which only the config is loaded.
        prompts: The processor, the tools and the limits on a prompt's length.
        context: Where the run takes place, and the messages for the user.
    """
    assumed_lengths, explanation = assume_lengths(
        prompts.length_filter.pixels, sees_images=sees_images(model.config)
    )
    context.messages.unchecked.append(
        f"the dataset {missing_folder!r} is not here, so rows and prompts are not known; {explanation}"
    )
    return DataInfo(folders=folders, train_dataset=None, prompt_lengths=assumed_lengths)


def _load_command_data(
    request: RunRequest,
    script_args: AdoraScriptArguments,
    folders: tuple[str, ...],
    model: ModelInfo,
    prompts: PromptInfo,
    context: RunContext,
) -> DataInfo:
    """Load the rows that a command names, without those whose prompts are too long.

    Args:
        request: What the user asks for.
        script_args: The command's keys of data and rewards.
        folders: The folders of the data sets.
        model: The model, of which only the config is loaded.
        prompts: The processor, the tools and the limits on a prompt's length.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError`, also for images that the model cannot read, and for overlong prompts where
    the config refuses them.
    """

    def rows_with_room(dataset: Dataset, texts: Sequence[str]) -> Sequence[int]:
        """Return the numbers of the rows whose prompts leave room for an answer.

        `texts`: the text of each row's problem.
        """
        # This comes first, because for a model without vision the tokens of images would count as
        # none.
        any_images = has_images(dataset.data.table)
        model_checks.check_reads_images(
            request.model.model_args, model.config, has_images=any_images
        )
        if request.max_rows is not None and request.max_rows < len(dataset):
            context.messages.unchecked.append(
                f"measured on the first {request.max_rows} of {len(dataset)} rows (--rows)"
            )
        return prompts.length_filter.rows_to_train_on(dataset, texts)

    # The system prompt describes the tools too.
    script_with_tools = copy(script_args)
    script_with_tools.adora_system_prompt = prompts.system_prompt
    train = load_rows(
        script_with_tools,
        folders=folders,
        seed=request.config.seed_of_rows,
        choose_rows=rows_with_room,
    )
    tokens = control_tokens(prompts.processor)
    python_inputs.refuse_unusable_prompts("dataset", train, tokens)
    return DataInfo(
        folders=folders,
        train_dataset=train,
        prompt_lengths=prompts.length_filter.lengths,
        left_out_ids=tuple(prompts.length_filter.left_out),
    )


def check_first_prompt(
    config: AdoraGRPOConfig, model: ModelInfo, prompts: PromptInfo, data: DataInfo
) -> None:
    """Raise `UserError` if the images of a model of another family cannot be handled.

    The first row is processed as in a training. In the known families this cannot fail, and the
    rows of a stream cannot be read twice.
    """
    is_known = family_of(model.config) is not None or not sees_images(model.config)
    if is_known or prompts.processor is None or not isinstance(data.train_dataset, Dataset):
        return
    read_prompts(
        [data.train_dataset[0]],
        processor=prompts.processor,
        chat_template_kwargs=config.chat_template_kwargs or {},
    )


def check_tool_reply_room(config: AdoraGRPOConfig, prompts: PromptInfo, data: DataInfo) -> None:
    """Raise `UserError` if the token limits leave no room for the reply of one of the tools.

    The shortest prompt and the fewest images of any row are assumed, so that only a tool whose
    reply can never fit is refused.
    """
    if prompts.toolbox is None:
        return
    # Without a data set the lengths are only assumed, which is no reason to refuse a tool.
    prompt_lengths: Sequence[int] = []
    if data.prompt_lengths is not None and data.train_dataset is not None:
        prompt_lengths = data.prompt_lengths.prompt_tokens
    limits = ConversationLimits(
        completion_key="max_completion_length",
        max_completion=config.max_completion_length,
        # A server's limit takes precedence over the key, as it does when rollouts are sampled.
        context=prompts.length_filter.limit if config.use_vllm else None,
        shortest_prompt=min(prompt_lengths, default=None),
        fewest_pictures=python_inputs.fewest_images(data.train_dataset),
    )
    check_answer_limits(
        prompts.toolbox,
        processor=prompts.processor,
        chat_template_kwargs=config.chat_template_kwargs or {},
        limits=limits,
    )


def check_evaluations(
    request: RunRequest,
    layout: BatchLayout,
    prompts: PromptInfo,
    data: DataInfo,
    context: RunContext,
) -> EvaluationPlan | None:
    """Load the problems that are evaluated during training; None if there are none.

    If TRL evaluates a data set of Python code, only the size of its batches is checked.

    Args:
        request: What the user asks for.
        layout: The sizes of the batches.
        prompts: The processor, the tools and the limits on a prompt's length.
        data: The rows to train on.
        context: Where the run takes place, and the messages for the user.

    Raises `UserError` for problems that cannot be evaluated.
    """
    config = request.config
    if request.trl_evaluates:
        _check_evaluation_batches(config, layout.processes)
        return None
    template = request.script_args.adora_prompt if request.script_args is not None else None
    # `load_evaluation_plan` removes keys from the config, which the report of a dry run needs.
    config_to_take_from = copy(config) if context.dry_run else config
    try:
        plan = load_evaluation_plan(config_to_take_from, data.folders, template)
    except DataMissingError as error:
        if not context.dry_run:
            raise
        context.messages.unchecked.append(f"the problems of the evaluations are not known: {error}")
        return None
    if plan is None:
        return None
    _check_pixel_limits(prompts.processor)
    return drop_overlong_problems(plan, prompts.length_filter)


def _check_pixel_limits(processor: ProcessorMixin | None) -> None:
    """Raise `UserError` for a processor with which the evaluators cannot count image tokens.

    `processor`: that of the model; None if it is not on this machine.
    """
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None and pixel_limits(image_processor) is None:
        raise UserError(
            f"eval_strategy: steps needs an image processor with limits in pixels, and "
            f"{type(image_processor).__name__} has none; give the trainer an eval_dataset, or set "
            "eval_strategy: no"
        )


def _check_evaluation_batches(config: AdoraGRPOConfig, processes: int) -> None:
    """Raise `UserError` if a batch of TRL's evaluation is no whole number of groups."""
    key = "num_generations_eval" if config.num_generations_eval else "num_generations"
    group_size = getattr(config, key)
    batch_size = config.per_device_eval_batch_size
    if batch_size * processes % group_size != 0:
        raise UserError(
            f"per_device_eval_batch_size: {batch_size} x {processes} processes is no whole "
            f"number of groups of {key}: {group_size}; set it to {group_size}"
        )
