"""Chooses the engine that generates answers, and checks that it can.

It is vLLM or Transformers in this process, or a server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.training_prompts import read_training_config
from adora_vl.data.prompts import with_tools
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.endpoint import EndpointEngine, build_endpoint
from adora_vl.evals.inference.requests import (
    HUB_ID_PATTERN,
    AnswerEngine,
    AnswerEngineSettings,
    EngineOptions,
)
from adora_vl.evals.options import options_from
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.rollout.stopping import StopParameters
    from adora_vl.tools.run import Toolbox


def check_model(model: str) -> str:
    """Check the name of a model, and return the absolute path of its folder or its hub id.

    `tiny` and the folder of a LoRA run are names of folders too. Raises `UserError` for a name that
    is neither a model folder nor a hub id.
    """
    from adora_vl.models.load import resolve_model_name

    model = resolve_model_name(model)
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model: the folder {model!r} has no config.json; give a folder made by "
                "save_pretrained"
            )
        return str(folder.resolve())
    # `runs/tyni` has the form of a hub id too, but where there is a folder `runs` it is rather a
    # path with a slip.
    if not HUB_ID_PATTERN.fullmatch(model) or folder.parent.is_dir():
        raise UserError(
            f"model: {model!r} is neither a folder here nor a hub id of the form owner/name; a "
            "training writes its model into output_dir"
        )
    return model


def build_settings(options: EngineOptions) -> AnswerEngineSettings:
    """Turn the options of an engine into its settings, which an engine can be built from.

    A model that was trained by this package is asked with the arguments of the chat template that
    it was trained with, and its answers end where its rollouts did. Raises `UserError`.
    """
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise UserError(
            f"min_pixels: {options.min_pixels} is over max_pixels, {options.max_pixels}; lower it"
        )
    endpoint = build_endpoint(options)
    # The name of a model on a server is no folder and no hub id, so it is not checked.
    model = check_model(options.model) if endpoint is None else options.model
    training_config = read_training_config(model)
    chat_template_kwargs = training_config.get("chat_template_kwargs") or {}
    if chat_template_kwargs:
        print(
            f"chat_template_kwargs: those of the model's training, {chat_template_kwargs}",
            file=sys.stderr,
        )
    settings = options_from(
        AnswerEngineSettings,
        options,
        model=model,
        endpoint=endpoint,
        chat_template_kwargs=chat_template_kwargs,
        stop=_read_stop_parameters(training_config, is_server=endpoint is not None),
    )
    if not options.tools:
        return settings
    toolbox = _build_toolbox(options, settings)
    system_prompt = with_tools(settings.system_prompt, toolbox.schemas)
    return replace(settings, toolbox=toolbox, system_prompt=system_prompt)


def _read_stop_parameters(
    training_config: Mapping[str, Any], *, is_server: bool
) -> StopParameters | None:
    """Return the stop strings and tokens of the model's training, and say so on stderr.

    Returns None for a server, and a line says that: a server would cut the stop string off the
    answer, and a grader may need it, such as `</answer>`.
    """
    from adora_vl.rollout.stopping import StopParameters

    stop = StopParameters.from_config(training_config.get("generation_kwargs"))
    for key, value in stop.sampling.items():
        if is_server:
            print(
                f"note: {key}: the model's training ended answers at {value}, and --engine openai "
                "does not; ask it in this process, with --engine vllm",
                file=sys.stderr,
            )
        else:
            print(f"{key}: that of the model's training, {value}", file=sys.stderr)
    return None if is_server else stop


def parse_tool_options(tools: Sequence[str], mapping: str) -> ToolOptions:
    """Parse the limits of tools from a mapping in YAML, such as `{images: 4}`.

    Raises `UserError`, also where no tools are named that the limits could be of.
    """
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.utils.convert import convert

    if not tools:
        raise UserError(
            "tool_options: without --tools it changes nothing; name tools, or leave it out"
        )
    limits: ToolOptions = convert("tool_options", mapping, ToolOptions)
    return limits


def _build_toolbox(options: EngineOptions, settings: AnswerEngineSettings) -> Toolbox:
    """Build the tools that the options name, such as `zoom`, for the model to call.

    Raises `UserError` for tools that cannot be used, or whose answers have no room in `max_tokens`.
    """
    if settings.endpoint is not None:
        raise UserError(
            "tools: --engine openai answers no calls; use vllm or transformers, or leave --tools "
            "out"
        )
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.data.prompt_lengths import pixel_limits_of
    from adora_vl.data.prompts import control_tokens
    from adora_vl.tools.room import ConversationLimits, check_answer_limits
    from adora_vl.tools.run import Toolbox, build_view, choose_tools
    from adora_vl.tools.tries import nondeterminism_warnings

    tool_set = choose_tools(options.tools)
    chat = ChatProcessor.from_settings(settings)
    pixel_limits = pixel_limits_of(
        chat.processor,
        model=chat.config,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
    )
    toolbox = Toolbox(
        tool_set=tool_set,
        options=options.tool_options or ToolOptions(),
        view=build_view(chat.config, pixel_limits),
        control_tokens=control_tokens(chat.processor),
    )
    # The answers of tools have to fit into `max_tokens`, the only limit that is known here.
    conversation = ConversationLimits(
        completion_key="max_tokens", max_completion=settings.max_tokens
    )
    check_answer_limits(
        toolbox,
        processor=chat.processor,
        chat_template_kwargs=settings.chat_template_kwargs,
        limits=conversation,
    )
    for line in nondeterminism_warnings(toolbox):
        print(f"warning: {line}", file=sys.stderr)
    return toolbox


def check_loadable(settings: AnswerEngineSettings) -> None:
    """Raise `UserError` for a model folder that cannot be loaded.

    It is called before anything is written or asked, and reads the files but not the weights. A
    model on the hub or on a server is not checked.
    """
    from adora_vl.models.load import check_weights

    if settings.endpoint is None and Path(settings.model).is_dir():
        check_weights("model", settings.model)
        chat = ChatProcessor.from_settings(settings)
        if settings.engine == "vllm":
            chat.check_vllm(settings.model, settings.dtype)


def build_engine(settings: AnswerEngineSettings) -> AnswerEngine:
    """Load the model into the engine that `settings` name.

    Raises `UserError` if the model cannot be loaded.
    """
    if settings.engine == "openai":
        return EndpointEngine(settings)
    # Imported here, because it takes seconds, and a score needs no engine.
    from adora_vl.evals.inference.local import TransformersEngine, VLLMEngine

    return VLLMEngine(settings) if settings.engine == "vllm" else TransformersEngine(settings)
