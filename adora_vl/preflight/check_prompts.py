"""Checks of what turns a row into a prompt: processor, tools, system prompt and length limits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _get_template_variables

from adora_vl.data.context_limit import (
    ContextLimit,
    context_limit,
    server_context_length,
    why_uncountable,
)
from adora_vl.data.images import PixelLimits
from adora_vl.data.overlong_prompts import PromptLengthFilter
from adora_vl.data.prompt_lengths import pixel_limits_of
from adora_vl.data.prompts import control_tokens, find_control_token, with_tools
from adora_vl.data.token_counters import (
    CHARACTERS_A_TOKEN,
    TokenCounter,
    character_counter,
    message_counter,
    tokenizer_counter,
)
from adora_vl.models.adapter import find_processor_folder
from adora_vl.models.families import sees_images
from adora_vl.models.load import limit_pixels, load_processor
from adora_vl.preflight.resolved_run import ModelInfo, PromptInfo
from adora_vl.tools.run import Toolbox, ToolSet, build_view
from adora_vl.utils.errors import UserError, describe_error, did_you_mean

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest


def check_prompts(
    request: RunRequest,
    model: ModelInfo,
    tools: ToolSet,
    context: RunContext,
) -> PromptInfo:
    """Load the processor, build the tools and the system prompt, and limit the prompts' lengths.

    Args:
        request: What the user asks for.
        model: The model, of which only the config is loaded.
        tools: The tools and environments of the run.
        context: Where the run takes place.

    Raises `UserError` for a processor that cannot be loaded, and for control tokens in texts.
    """
    config = request.config
    processor = request.model.processor
    if processor is None:
        processor = _load_processor(model, context)
    if processor is not None:
        limit_pixels(processor, config.min_pixels, config.max_pixels)
    # The smallest and largest image that the processor resizes to.
    pixel_limits = pixel_limits_of(
        processor,
        model=model.config,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    # The model's special tokens, such as the end of a turn, which no text may contain.
    tokens = control_tokens(processor)
    _refuse_control_tokens(config.chat_template_kwargs or {}, tokens)
    if processor is not None:
        _refuse_unread_template_options(config.chat_template_kwargs or {}, processor)
    toolbox = None
    if tools.functions:
        toolbox = Toolbox(
            tool_set=tools,
            options=config.adora_tool_options,
            view=build_view(model.config, pixel_limits),
            control_tokens=tokens,
        )
    system_prompt = None
    if request.script_args is not None:
        schemas = toolbox.schemas if toolbox is not None else []
        system_prompt = with_tools(request.script_args.adora_system_prompt, schemas)
    return PromptInfo(
        processor=processor,
        toolbox=toolbox,
        system_prompt=system_prompt,
        length_filter=_build_length_filter(
            request, model, context, processor, system_prompt, pixel_limits
        ),
    )


def _build_length_filter(
    request: RunRequest,
    model: ModelInfo,
    context: RunContext,
    processor: ProcessorMixin | None,
    system_prompt: str | None,
    pixel_limits: PixelLimits,
) -> PromptLengthFilter:
    """Build the object that finds prompts without room for an answer. Collective with a server.

    A line is printed if nothing limits the length, or if the model's image tokens cannot be
    counted.

    Args:
        request: What the user asks for.
        model: The model, of which only the config is loaded.
        context: Where the run takes place.
        processor: The model's; None where a dry run cannot reach it.
        system_prompt: That of a command; None from Python, where the rows have it.
        pixel_limits: The smallest and largest image that the processor resizes to.
    """
    prints_lines = request.is_main_process and not context.dry_run
    # Why image tokens cannot be counted; empty if they can. All ranks have the same model, so that
    # either all of them ask for the limit below or none does.
    uncountable_reason = why_uncountable(model.config)
    limit = None
    if not uncountable_reason:
        limit = _context_limit(request, model, context)
    if limit is None and prints_lines:
        reason = uncountable_reason or "neither a key nor the model has a limit"
        print(f"the lengths of the prompts are not checked: {reason}")
    # What becomes of overlong prompts. Python code has no such key.
    error_or_drop = None
    if request.script_args is not None:
        error_or_drop = request.script_args.adora_overlong_prompts
    return PromptLengthFilter(
        limit,
        counter=_token_counter(request, processor, system_prompt),
        pixels=pixel_limits,
        error_or_drop=error_or_drop,
        prints_warnings=prints_lines,
        is_dry_run=context.dry_run,
        max_rows=request.max_rows,
    )


def _load_processor(model: ModelInfo, context: RunContext) -> ProcessorMixin | None:
    """Load the processor of the adapter, or of the model if the adapter has none.

    None, with a line for the user, if a dry run cannot reach the hub. Raises `UserError`.
    """
    name = find_processor_folder(model.adapters, model.name, reads_images=sees_images(model.config))
    try:
        processor: ProcessorMixin = load_processor(name, model.revision)
    except UserError:
        # A folder on this machine that cannot be loaded has a fault, which a dry run reports too.
        is_on_hub = not Path(name).is_dir()
        if not context.dry_run or not is_on_hub:
            raise
        context.messages.unchecked.append(
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
    token = find_control_token(values, tokens)
    if token is not None:
        raise UserError(
            f"chat_template_kwargs: it has the model's own token {token}; remove it from the text"
        )


# Arguments of `apply_chat_template` that are the user's to choose.
_TEMPLATE_ARGUMENTS = ("chat_template", "documents")


def _refuse_unread_template_options(options: Mapping[str, Any], processor: ProcessorMixin) -> None:
    """Raise `UserError` for an option of `chat_template_kwargs` that the template does not read.

    Transformers hands such an option to the tokenizer and the image processor of the trainer, where
    it may cut prompts or resize images. The engine would not know of it.

    `options`: the value of `chat_template_kwargs`.
    """
    template = options.get("chat_template") or processor.chat_template
    # A processor may have several templates by name; the named one, or "default", is used.
    if isinstance(processor.chat_template, Mapping):
        templates = processor.chat_template
        template = templates.get(options.get("chat_template") or "default", template)
    if not options or not isinstance(template, str):
        return
    try:
        # By these Transformers tells options of the template from those of the processor.
        variables = _get_template_variables(template)
    except TemplateError as error:
        raise UserError(
            f"chat_template_kwargs: chat_template: it cannot be read ({describe_error(error)})"
        ) from error
    set_by_trainer = {*inspect.signature(processor.apply_chat_template).parameters}
    for name in options:
        if name in _TEMPLATE_ARGUMENTS:
            continue
        if name in set_by_trainer:
            raise UserError(f"chat_template_kwargs: {name} is for the trainer to set; leave it out")
        if name not in variables:
            choices = sorted(variables - set_by_trainer - {"messages"})
            raise UserError(
                f"chat_template_kwargs: {name} is no variable of the model's chat template"
                f"{did_you_mean(name, choices)}; leave it out"
            )


def _token_counter(
    request: RunRequest, processor: ProcessorMixin | None, system_prompt: str | None
) -> TokenCounter:
    """Return the function that counts the tokens of prompts.

    With a processor it counts exactly. Without one it estimates by the number of characters.

    `system_prompt`: the system prompt of a command. Prompts of Python code contain theirs already.
    """
    template_kwargs = request.config.chat_template_kwargs
    if request.script_args is None:
        return message_counter(processor, template_kwargs)
    if processor is None:
        return character_counter(system_prompt)
    return tokenizer_counter(processor, system_prompt, template_kwargs)


def _context_limit(
    request: RunRequest, model: ModelInfo, context: RunContext
) -> ContextLimit | None:
    """Return the limit on the tokens of a prompt with its answer; None if nothing limits them.

    A key, the config of the model, or a vLLM server limits them.

    A vLLM server has a limit of its own. Collective then: rank 0 asks the server, and broadcasts
    its reply.
    """
    config = request.config
    # The server's limit in tokens; None without a server, and if the server does not answer.
    server_limit = None
    if config.uses_servers and context.on_this_machine:
        if request.is_main_process:
            server_limit = server_context_length(config)
        if config.world_size > 1:
            broadcast_list = [server_limit]
            broadcast_object_list(broadcast_list)
            server_limit = broadcast_list[0]
    limit = context_limit(config, model.config, server_limit)
    prints_lines = request.is_main_process and not context.dry_run
    if config.uses_servers and server_limit is None and prints_lines:
        limit_name = limit.name if limit is not None else None
        print(f"the vLLM server does not answer yet, so prompts are held against {limit_name}")
    return limit
