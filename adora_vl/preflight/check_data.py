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
from adora_vl.data.context_limit import ContextLimit, context_limit, served_length, why_uncountable
from adora_vl.data.dataset import data_hash, read_manifest, refuse_for_evaluation
from adora_vl.data.loading import load_rows
from adora_vl.data.overlong_prompts import REMEMBERED_ROWS, OverlongPrompts
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
    leave_out_overlong,
    take_evaluations,
)
from adora_vl.models import check as fits
from adora_vl.models.adapter import find_processor_folder
from adora_vl.models.families import sees_images
from adora_vl.models.load import limit_pixels, load_processor
from adora_vl.preflight import python_inputs
from adora_vl.preflight.facts import DataFacts, ModelFacts, PromptFacts
from adora_vl.rollout.prompt_tokens import refuse_prefill
from adora_vl.tools.room import ConversationLimits, refuse_no_room
from adora_vl.tools.run import Toolbox, ToolSet, build_view
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
    """Load the processor, build the tools and the system prompt, and limit the prompts' lengths.

    Args:
        request: What the user asks for.
        model: The model, of which only the config is loaded.
        tools: The tools and environments of the run.
        context: Where the run takes place.
        messages: Lines for the user are added to these.

    Raises `UserError` for a processor that cannot be loaded, and for control tokens in texts.
    """
    config = request.config
    processor = request.model.processor
    if processor is None:
        processor = _load_processor(model, context, messages)
    if processor is not None:
        limit_pixels(processor, config.min_pixels, config.max_pixels)
    # The smallest and largest image that the processor resizes to.
    pixel_limits = lengths.resize_limits_of(
        processor,
        model=model.config,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    # The model's special tokens, such as the end of a turn, which no text may contain.
    tokens = control_tokens(processor)
    _refuse_control_tokens(config.chat_template_kwargs or {}, tokens)
    if tools.environments is not None:
        tools.environments.control_tokens = tokens
    toolbox = None
    if tools.functions:
        toolbox = Toolbox(
            chosen=tools,
            options=config.adora_tool_options,
            view=build_view(model.config, pixel_limits),
            control_tokens=tokens,
        )
    system_prompt = None
    if request.script is not None:
        schemas = toolbox.schemas if toolbox is not None else []
        system_prompt = with_tools(request.script.adora_system_prompt, schemas)
    return PromptFacts(
        processor=processor,
        toolbox=toolbox,
        system_prompt=system_prompt,
        lengths=_overlong_prompts(request, model, context, processor, system_prompt, pixel_limits),
    )


def _overlong_prompts(
    request: RunRequest,
    model: ModelFacts,
    context: RunContext,
    processor: ProcessorMixin | None,
    system_prompt: str | None,
    pixel_limits: lengths.ResizeLimits,
) -> OverlongPrompts:
    """Return what finds the prompts that leave no room for an answer. Collective with a server.

    If there is no limit on the length, or the model's image tokens cannot be counted, a line says
    so.

    `pixel_limits`: the smallest and largest image that the processor resizes to.
    """
    is_speaking = request.is_main_process and not context.dry_run
    # Why image tokens cannot be counted; empty if they can. All ranks have the same model, so that
    # either all of them ask for the limit below or none does.
    uncountable_reason = why_uncountable(model.config)
    limit = None
    if not uncountable_reason:
        limit = _context_limit(request, model, context)
    if limit is None and is_speaking:
        reason = uncountable_reason or "neither a key nor the model has a limit"
        print(f"the lengths of the prompts are not checked: {reason}")
    # What becomes of overlong prompts. Python code has no such key.
    error_or_drop = None
    if request.script is not None:
        error_or_drop = request.script.adora_overlong_prompts
    return OverlongPrompts(
        limit,
        _token_counter(request, processor, system_prompt),
        pixel_limits,
        error_or_drop,
        speaks=is_speaking,
        is_dry_run=context.dry_run,
        max_rows=request.max_rows,
    )


def _load_processor(
    model: ModelFacts, context: RunContext, messages: Messages
) -> ProcessorMixin | None:
    """Load the model's processor, or that of the adapter if it has one of its own.

    None, with a line in `messages`, if a dry run cannot reach the hub. Raises `UserError`.
    """
    name = find_processor_folder(model.adapters, model.name, sees=sees_images(model.config))
    try:
        processor: ProcessorMixin = load_processor(name, model.revision)
    except UserError:
        # A folder that is here has a fault, which a dry run reports too.
        is_on_hub = not Path(name).is_dir()
        if not context.dry_run or not is_on_hub:
            raise
        messages.unknown.append(
            f"the processor of {name} cannot be reached: text is estimated at "
            f"{CHARACTERS_A_TOKEN} characters per token, images follow the published rule"
        )
        return None
    return processor


def _refuse_control_tokens(options: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Raise `UserError` for one of the model's control tokens in `chat_template_kwargs`.

    The template writes these values into every prompt, where such a token could end a turn.

    `options`: the value of `chat_template_kwargs`. `tokens`: the model's control tokens.
    """
    # A whole template may be among the options, and it needs the tokens.
    values = {name: value for name, value in options.items() if name != "chat_template"}
    token = control_token_in(values, tokens)
    if token is not None:
        raise UserError(
            f"chat_template_kwargs: it has the model's own token {token}; remove it from the text"
        )


def _token_counter(
    request: RunRequest, processor: ProcessorMixin | None, system_prompt: str | None
) -> TokenCounter:
    """Return the function that counts the tokens of prompts.

    It counts exactly with a processor. Without one it estimates by the number of characters.
    `system_prompt`: that of a command; the prompts of Python code have theirs already.
    """
    template_kwargs = request.config.chat_template_kwargs
    if request.script is None:
        return message_counter(processor, template_kwargs)
    if processor is None:
        return character_counter(system_prompt)
    return tokenizer_counter(processor, system_prompt, template_kwargs)


def _context_limit(
    request: RunRequest, model: ModelFacts, context: RunContext
) -> ContextLimit | None:
    """Return the limit on the tokens of a prompt with its answer; None if nothing limits them.

    A vLLM server has a limit of its own. Collective then: rank 0 asks the server, and broadcasts
    its reply.
    """
    config = request.config
    # None without a server, and if it does not answer.
    server_tokens = None
    if config.uses_servers and context.on_this_machine:
        if request.is_main_process:
            server_tokens = served_length(config)
        if config.world_size > 1:
            broadcast_list = [server_tokens]
            broadcast_object_list(broadcast_list)
            server_tokens = broadcast_list[0]
    limit = context_limit(config, model.config, server_tokens)
    is_speaking = request.is_main_process and not context.dry_run
    if config.uses_servers and server_tokens is None and is_speaking:
        limit_name = limit.name if limit is not None else None
        print(f"the vLLM server does not answer yet, so prompts are held against {limit_name}")
    return limit


def check_rows(
    request: RunRequest,
    layout: BatchLayout,
    model: ModelFacts,
    prompts: PromptFacts,
    context: RunContext,
    messages: Messages,
) -> DataFacts:
    """Load the rows to train on, without those whose prompts leave no room for an answer.

    A dry run whose data set is not on this machine assumes the lengths of the prompts instead.

    `layout`: the sizes of the batches. Lines for the user are added to `messages`. Raises
    `UserError` for rows that cannot be trained on, and for too few.
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
        messages.notes.extend(_notes_on_tiny_model(request, folders))
    if data.rows is None:
        # a stream
        return data
    try:
        check_row_count(layout, data.rows)
    except UserError as error:
        # A dry run shows the memory all the same, and ends with this line.
        if not context.dry_run:
            raise
        messages.refusals.append(str(error))
    return data


def _notes_on_tiny_model(request: RunRequest, folders: tuple[str, ...]) -> list[str]:
    """Return a note if one of the built-in tiny models is trained on other than built-in data.

    These models were trained on the built-in problems, and cannot learn from any others.
    """
    cli_args = request.cli_args
    model_name = str(cli_args.values.get("model_name_or_path")) if cli_args else ""
    built_in_sources = (SYNTHETIC_DATA, KNIGHTS_DATA)
    manifests = [read_manifest(Path(folder)) for folder in folders]
    all_built_in = all(
        manifest is None or manifest.get("source") in built_in_sources for manifest in manifests
    )
    if all_built_in or model_name not in STARTS:
        return []
    return [
        f"{model_name} knows the drawn problems alone: on others expect no right answer. `python -m eval "
        "problems run --engine openai --base-url URL` shows what a served model does with them, "
        "and docs/hardware.md which recipe fits your GPU"
    ]


def _python_rows(request: RunRequest, model: ModelFacts, prompts: PromptFacts) -> DataFacts:
    """Check the data sets that Python code passed, and describe the tools in their prompts.

    Raises `UserError`.
    """
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
    # The rows of a stream are checked when they are drawn.
    if python_inputs.is_plain_table(train):
        any_images = python_inputs.check_prompts(train)
        fits.check_reads_images(request.model.keys, model.config, has_images=any_images)
        prompts.lengths.prompts_to_train_on(python_inputs.prompts_of(train), len(train))
    return DataFacts(train=train, evaluated=evaluated, measured=prompts.lengths.lengths)


def _check_stream(config: AdoraGRPOConfig, dataset: Dataset | IterableDataset) -> None:
    """Raise `UserError` for `data_seed` with a streamed data set, which TRL shuffles by `seed`."""
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
    """Assume the lengths of prompts for a dry run whose data set is not on this machine.

    `missing`: the first of the `folders` that is not here.
    """
    assumed_lengths, explanation = lengths.assume_lengths(
        prompts.lengths.pixels, sees=sees_images(model.config)
    )
    messages.unknown.append(
        f"the dataset {missing!r} is not here, so rows and prompts are not known; {explanation}"
    )
    return DataFacts(folders=folders, train=None, measured=assumed_lengths)


def _command_rows(
    request: RunRequest,
    script: AdoraScriptArguments,
    folders: tuple[str, ...],
    model: ModelFacts,
    prompts: PromptFacts,
    messages: Messages,
) -> DataFacts:
    """Load the rows that a command names, without those whose prompts are too long.

    `script`: the command's keys of data and rewards. Raises `UserError`.
    """
    # The system prompt describes the tools too.
    script_with_tools = copy(script)
    script_with_tools.adora_system_prompt = prompts.system_prompt
    train = load_rows(
        script_with_tools,
        folders=folders,
        seed=request.config.seed_of_rows,
        choose_rows=partial(_rows_with_room, request, folders, model, prompts, messages),
    )
    tokens = control_tokens(prompts.processor)
    python_inputs.refuse_unusable_prompts("dataset", train, tokens)
    return DataFacts(
        folders=folders,
        train=train,
        measured=prompts.lengths.lengths,
        left_out=tuple(prompts.lengths.left_out),
    )


def _rows_with_room(
    request: RunRequest,
    folders: tuple[str, ...],
    model: ModelFacts,
    prompts: PromptFacts,
    messages: Messages,
    dataset: Dataset,
    texts: Sequence[str],
) -> Sequence[int]:
    """Return the numbers of the rows whose prompts leave room for an answer.

    `dataset`: the rows. `texts`: their prompts' texts. Raises `UserError` for images that the model
    cannot read, and for overlong prompts where the config refuses them.
    """
    # First of all, because the token counter of a model without vision would count no image.
    any_images = has_images(dataset.data.table)
    fits.check_reads_images(request.model.keys, model.config, has_images=any_images)
    if request.max_rows is not None and request.max_rows < len(dataset):
        messages.unknown.append(
            f"measured on the first {request.max_rows} of {len(dataset)} rows (--rows)"
        )
    # Counting the tokens of few rows is fast, so that nothing is remembered on disk.
    if len(dataset) < REMEMBERED_ROWS:
        return prompts.lengths.rows_to_train_on(dataset, texts)
    assert request.script is not None, "only a command names folders"
    split = request.script.dataset_train_split
    sources = [data_hash(Path(folder), split) for folder in folders]
    # Collective: the first rank of each machine counts, and the others read what it remembers.
    with request.config.main_process_first(desc="counting the tokens of the prompts"):
        return prompts.lengths.rows_to_train_on(dataset, texts, sources)


def check_room(config: AdoraGRPOConfig, prompts: PromptFacts, data: DataFacts) -> None:
    """Raise `UserError` if the token limits leave no room for the answer of one of the tools.

    The shortest prompt with the fewest images is taken, so that only what can never fit is refused.
    """
    if prompts.toolbox is None:
        return
    # Without a data set the lengths are only assumed, and no limit is checked by them.
    prompt_lengths: Sequence[int] = []
    if data.measured is not None and data.train is not None:
        prompt_lengths = data.measured.prompt_tokens
    limits = ConversationLimits(
        completion_key="max_completion_length",
        max_completion=config.max_completion_length,
        max_context=config.vllm_max_model_length,
        shortest_prompt=min(prompt_lengths, default=None),
        fewest_pictures=python_inputs.fewest_images(data.train),
    )
    refuse_no_room(
        prompts.toolbox,
        processor=prompts.processor,
        template_arguments=config.chat_template_kwargs or {},
        limits=limits,
    )


def check_evaluations(
    request: RunRequest,
    layout: BatchLayout,
    prompts: PromptFacts,
    data: DataFacts,
    context: RunContext,
    messages: Messages,
) -> EvaluationPlan | None:
    """Load the problems that are evaluated during training; None if there are none.

    If TRL evaluates a data set of Python code, only the size of its batches is checked. Lines for
    the user are added to `messages`. Raises `UserError`.
    """
    config = request.config
    if request.trl_evaluates:
        _check_evaluation_batches(config, layout.processes)
        return None
    template = request.script.adora_prompt if request.script is not None else None
    # `take_evaluations` removes keys from the config. The report of a dry run needs them.
    config_to_take_from = copy(config) if context.dry_run else config
    try:
        plan = take_evaluations(config_to_take_from, data.folders, template)
    except DataMissingError as error:
        if not context.dry_run:
            raise
        messages.unknown.append(f"the problems of the evaluations are not known: {error}")
        return None
    return leave_out_overlong(plan, prompts.lengths) if plan is not None else None


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
