"""Checks of the prompts and the rows, and of what is evaluated during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset

from adora_vl.builtin.builtin_data import KNIGHTS_DATA, STARTS, SYNTHETIC_DATA, data_folders
from adora_vl.config.batch_plan import check_row_count
from adora_vl.data import prompt_lengths as lengths
from adora_vl.data.dataset import data_hash, read_manifest, refuse_for_evaluation
from adora_vl.data.loading import load_rows
from adora_vl.data.prompts import control_token_in, control_tokens, with_tools
from adora_vl.data.rows import has_images
from adora_vl.data.token_counters import (
    CHARACTERS_A_TOKEN,
    TokenCounter,
    character_counter,
    message_counter,
    tokenizer_counter,
)
from adora_vl.evaluation import (
    DataMissingError,
    EvaluationPlan,
    fitting_evaluations,
    take_evaluations,
)
from adora_vl.models import check as fits
from adora_vl.models.adapter import processor_folder
from adora_vl.models.families import sees_images
from adora_vl.models.load import limit_pixels, load_processor
from adora_vl.preflight import python_inputs
from adora_vl.preflight.facts import DataFacts, ModelFacts, PromptFacts
from adora_vl.rollout.prompt_tokens import refuse_prefill
from adora_vl.tools.room import Room, refuse_no_room
from adora_vl.tools.run import Toolbox, ToolSet, view_of
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import Messages, RunContext
    from adora_vl.preflight.request import RunRequest


def check_prompts(
    request: RunRequest,
    model: ModelFacts,
    tools: ToolSet,
    context: RunContext,
    messages: Messages,
) -> PromptFacts:
    """Load the processor, limit its pixels, and work out how long a prompt may be.

    Raises `UserError`.
    """
    config = request.config
    processor = request.model.processor
    if processor is None:
        processor = _load_processor(model, context, messages)
    if processor is not None:
        limit_pixels(processor, config.min_pixels, config.max_pixels)
    pixels = lengths.resize_limits_of(
        processor,
        model=model.config,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    tokens = control_tokens(processor)
    _refuse_control_tokens(config.chat_template_kwargs or {}, tokens)
    if tools.environments is not None:
        tools.environments.control_tokens = tokens
    toolbox = None
    if tools.functions:
        toolbox = Toolbox(
            chosen=tools,
            options=config.adora_tool_options,
            view=view_of(model.config, pixels),
            control_tokens=tokens,
        )
    system_prompt = None
    if request.script is not None:
        schemas = toolbox.schemas if toolbox is not None else []
        system_prompt = with_tools(request.script.adora_system_prompt, schemas)
    unknown = lengths.uncountable(model.config)
    speaks = request.is_main_process and not context.dry_run
    # Every rank comes here with the same model, so that either all ask for the limit or none does.
    limit = None if unknown else _limit(request, model, context)
    if limit is None and speaks:
        print(
            "the lengths of the prompts are not checked: "
            f"{unknown or 'neither a key nor the model has a limit'}"
        )
    return PromptFacts(
        processor=processor,
        toolbox=toolbox,
        system_prompt=system_prompt,
        lengths=lengths.OverlongPrompts(
            limit,
            _counter(request, processor, system_prompt),
            pixels,
            request.script.adora_overlong_prompts if request.script is not None else None,
            speaks=speaks,
            paper=context.dry_run,
            max_rows=request.max_rows,
        ),
    )


def _load_processor(
    model: ModelFacts, context: RunContext, messages: Messages
) -> ProcessorMixin | None:
    """Load the processor; None, with a line for the user, where a dry run cannot reach the hub."""
    name = processor_folder(model.adapters, model.name, sees=sees_images(model.config))
    try:
        processor: ProcessorMixin = load_processor(name, model.revision)
    except UserError:
        if not context.dry_run or Path(name).is_dir():
            raise
        guess = f"{CHARACTERS_A_TOKEN} characters per token, images follow the published rule"
        messages.unknown.append(
            f"the processor of {name} cannot be reached: text is estimated at {guess}"
        )
        return None
    return processor


def _refuse_control_tokens(options: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Raise `UserError` for a control token in `chat_template_kwargs`.

    The values stand in every prompt, where such a token would end a turn. A `chat_template` among
    them is left out: a whole template needs the tokens.
    """
    values = {name: value for name, value in options.items() if name != "chat_template"}
    token = control_token_in(values, tokens)
    if token is not None:
        raise UserError(
            f"chat_template_kwargs: it has the model's own token {token}; remove it from the text"
        )


def _counter(
    request: RunRequest, processor: ProcessorMixin | None, system_prompt: str | None
) -> TokenCounter:
    """Return the function that counts the tokens of prompts, exact where the processor is here."""
    template = request.config.chat_template_kwargs
    if request.script is None:
        return message_counter(processor, template)
    if processor is None:
        return character_counter(system_prompt)
    return tokenizer_counter(processor, system_prompt, template)


def _limit(
    request: RunRequest, model: ModelFacts, context: RunContext
) -> lengths.ContextLimit | None:
    """Return the limit on the length of a prompt with its answer; None where nothing limits it.

    Collective with a server: rank 0 alone asks it for its limit, and broadcasts the reply.
    """
    config = request.config
    on_server = config.use_vllm and config.vllm_mode == "server"
    served_length = None
    if on_server and context.local:
        if request.is_main_process:
            served_length = lengths.served_length(config)
        if config.world_size > 1:
            broadcast_list = [served_length]
            broadcast_object_list(broadcast_list)
            served_length = broadcast_list[0]
    limit = lengths.context_limit(config, model.config, served_length)
    if on_server and served_length is None and request.is_main_process and not context.dry_run:
        print(
            "the vLLM server does not answer yet, so prompts are held against "
            f"{limit.name if limit else None}"
        )
    return limit


def check_rows(
    request: RunRequest,
    layout: BatchLayout,
    model: ModelFacts,
    prompts: PromptFacts,
    context: RunContext,
    messages: Messages,
) -> DataFacts:
    """Load the rows that the model can read and whose prompts leave room for an answer.

    Raises `UserError`.
    """
    script = request.script
    if script is None:
        data = _python_rows(request, model, prompts)
    else:
        # Collective: every rank waits here while the first one of each machine makes the data set.
        with request.config.main_process_first(desc="making the dataset where it is missing"):
            folders = tuple(data_folders(script))
        missing = [folder for folder in folders if not Path(folder).is_dir()]
        if context.dry_run and missing:
            return _assumed_rows(folders, missing[0], model, prompts, messages)
        data = _command_rows(request, script, folders, model, prompts, messages)
        messages.notes.extend(_note_of_foreign_rows(request, folders))
    if data.rows is None:
        return data
    try:
        check_row_count(layout, data.rows)
    except UserError as error:
        # A dry run shows the memory all the same, and ends with this line.
        if not context.dry_run:
            raise
        messages.refusals.append(str(error))
    return data


def _note_of_foreign_rows(request: RunRequest, folders: tuple[str, ...]) -> list[str]:
    """Say that a built-in tiny model cannot learn from problems that are not drawn here."""
    cli_args = request.cli_args
    name = str(cli_args.values.get("model_name_or_path")) if cli_args else ""
    manifests = [read_manifest(Path(folder)) for folder in folders]
    drawn_here = (SYNTHETIC_DATA, KNIGHTS_DATA)
    drawn = all(manifest is None or manifest.get("source") in drawn_here for manifest in manifests)
    if drawn or name not in STARTS:
        return []
    return [
        f"{name} knows the drawn problems alone: on yours expect no right answer. `python -m eval "
        "problems run --engine openai --base-url URL` shows what a served model does with them, "
        "and docs/hardware.md which recipe fits your GPU"
    ]


def _data_facts(
    train: Dataset | IterableDataset,
    prompts: PromptFacts,
    *,
    folders: tuple[str, ...] = (),
    evaluated: python_inputs.AnyDatasets | None = None,
) -> DataFacts:
    """Return the facts of rows that are here, whose lengths have been measured."""
    return DataFacts(
        folders=folders,
        train=train,
        evaluated=evaluated,
        rows=None if isinstance(train, IterableDataset) else len(train),
        measured=prompts.lengths.lengths,
        left_out=tuple(prompts.lengths.left_out),
    )


def _python_rows(request: RunRequest, model: ModelFacts, prompts: PromptFacts) -> DataFacts:
    """Check the data sets that Python code passed, and tell of the tools in their prompts."""
    datasets = request.rows
    assert isinstance(datasets, python_inputs.Datasets)
    train = python_inputs.with_tool_descriptions(datasets.train, prompts.schemas)
    evaluated = python_inputs.with_tool_descriptions(datasets.evaluate, prompts.schemas)
    refuse_for_evaluation(datasets.train, where="train_dataset:")
    for dataset in (datasets.train, datasets.evaluate):
        refuse_prefill(dataset)
    _check_stream(request.config, datasets.train)
    tokens = control_tokens(prompts.processor)
    python_inputs.refuse_unusable_prompts("train_dataset", train, tokens)
    python_inputs.refuse_unusable_prompts("eval_dataset", evaluated, tokens)
    if python_inputs.is_stored(train):
        any_images = python_inputs.check_prompts(train)
        fits.check_sees(request.model.keys, model.config, has_images=any_images)
        prompts.lengths.prompts_to_train_on(python_inputs.prompts_of(train), len(train))
    return _data_facts(train, prompts, evaluated=evaluated)


def _check_stream(config: AdoraGRPOConfig, dataset: Dataset | IterableDataset) -> None:
    """Raise `UserError` for `data_seed`, by which TRL does not shuffle a streamed data set."""
    seed = config.data_seed
    if isinstance(dataset, IterableDataset) and seed is not None:
        raise UserError(
            f"data_seed: {seed}, but a streamed data set is shuffled by seed; set that one, or "
            "load the data set whole"
        )


def _assumed_rows(
    folders: tuple[str, ...],
    missing: str,
    model: ModelFacts,
    prompts: PromptFacts,
    messages: Messages,
) -> DataFacts:
    """Assume the lengths of prompts for a dry run whose data set is not on this machine."""
    sees = sees_images(model.config)
    guess, words = lengths.assume_lengths(prompts.lengths.pixels, sees=sees)
    messages.unknown.append(
        f"the dataset {missing!r} is not here, so rows and prompts are not known; {words}"
    )
    return DataFacts(
        folders=folders, train=None, evaluated=None, rows=None, measured=guess, left_out=()
    )


def _command_rows(
    request: RunRequest,
    script: AdoraScriptArguments,
    folders: tuple[str, ...],
    model: ModelFacts,
    prompts: PromptFacts,
    messages: Messages,
) -> DataFacts:
    """Load the rows that a command names, with the system prompt that tools add to."""
    with_all_prompts = copy(script)
    with_all_prompts.adora_system_prompt = prompts.system_prompt
    train = load_rows(
        with_all_prompts,
        folders=folders,
        seed=request.config.seed_of_rows,
        fitting=partial(_fitting, request, folders, model, prompts, messages),
    )
    tokens = control_tokens(prompts.processor)
    python_inputs.refuse_unusable_prompts("dataset", train, tokens)
    return _data_facts(train, prompts, folders=folders)


def _fitting(
    request: RunRequest,
    folders: tuple[str, ...],
    model: ModelFacts,
    prompts: PromptFacts,
    messages: Messages,
    dataset: Dataset,
    texts: Sequence[str],
) -> Sequence[int]:
    """Return the numbers of the rows whose prompts leave room for an answer.

    Images are checked first: a tokenizer alone would count none, and a model that cannot read
    them would be found out only later.
    """
    any_images = has_images(dataset.data.table)
    fits.check_sees(request.model.keys, model.config, has_images=any_images)
    if request.max_rows is not None and request.max_rows < len(dataset):
        messages.unknown.append(
            f"measured on the first {request.max_rows} of {len(dataset)} rows (--rows)"
        )
    if len(dataset) < lengths.REMEMBERED_ROWS:
        return prompts.lengths.rows_to_train_on(dataset, texts)
    assert request.script is not None, "only a command names folders"
    split = request.script.dataset_train_split
    sources = [data_hash(Path(folder), split) for folder in folders]
    # Collective: the first rank of each machine counts, and the others read what it remembers.
    with request.config.main_process_first(desc="counting the tokens of the prompts"):
        return prompts.lengths.rows_to_train_on(dataset, texts, sources)


def check_room(config: AdoraGRPOConfig, prompts: PromptFacts, data: DataFacts) -> None:
    """Check that the limits on tokens leave room for an answer of each tool. Raises `UserError`."""
    if prompts.toolbox is None:
        return
    # without a data set the lengths are assumed, and prove nothing
    prompt_lengths: Sequence[int] = []
    if data.measured is not None and data.train is not None:
        prompt_lengths = data.measured.prompt
    limits = Room(
        key="max_completion_length",
        completion=config.max_completion_length,
        context=config.vllm_max_model_length,
        prompt=min(prompt_lengths, default=None),
        pictures=python_inputs.fewest_images(data.train),
    )
    refuse_no_room(
        prompts.toolbox,
        processor=prompts.processor,
        template=config.chat_template_kwargs or {},
        room=limits,
    )


def check_evaluations(
    request: RunRequest,
    layout: BatchLayout,
    prompts: PromptFacts,
    data: DataFacts,
    context: RunContext,
    messages: Messages,
) -> EvaluationPlan | None:
    """Load the problems that are evaluated during training; None for none.

    Where TRL evaluates a data set from Python, only its batches are checked: they have to be whole
    groups. Raises `UserError`.
    """
    config = request.config
    if request.trl_evaluates:
        _check_evaluation_batches(config, layout.processes)
        return None
    template = request.script.adora_prompt if request.script is not None else None
    # `take_evaluations` takes keys out of the config, which the report of a dry run reads again.
    taken_from = copy(config) if context.dry_run else config
    try:
        plan = take_evaluations(taken_from, data.folders, template)
    except DataMissingError as error:
        if not context.dry_run:
            raise
        messages.unknown.append(f"the problems of the evaluations are not known: {error}")
        return None
    return fitting_evaluations(plan, prompts.lengths) if plan is not None else None


def _check_evaluation_batches(config: AdoraGRPOConfig, processes: int) -> None:
    """Raise `UserError` for a batch of TRL's evaluations that is not made of whole groups."""
    key = "num_generations_eval" if config.num_generations_eval else "num_generations"
    batch = config.per_device_eval_batch_size
    group = getattr(config, key)
    if batch * processes % group:
        raise UserError(
            f"per_device_eval_batch_size: {batch} x {processes} processes is no whole "
            f"number of groups of {key}: {group}; set it to {group}"
        )
