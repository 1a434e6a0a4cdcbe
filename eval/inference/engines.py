"""Which engine generates answers, vLLM or Transformers in this process or a server, and whether it
can.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.utils.errors import UserError, refuse
from eval.inference.chat import ChatProcessor
from eval.inference.endpoint import EndpointEngine, endpoint_of
from eval.inference.provenance import trained_with
from eval.inference.requests import HUB_ID, AnswerEngine, AnswerEngineSettings, EngineName

if TYPE_CHECKING:
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.tools.run import Toolbox


def default_engine() -> EngineName:
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def check_model(model: str) -> str:
    """The absolute path of a model folder, a LoRA run or `tiny`, or a hub id unchanged.

    Raises `UserError`.
    """
    from adora_vl.models.load import local_model

    model = local_model(model)
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model: the folder {model!r} has no config.json; give a folder made by "
                "save_pretrained"
            )
        return str(folder.resolve())
    # `runs/tyni` has the form of a hub id too, but if there is a folder `runs` it is rather a
    # mistyped path.
    if not HUB_ID.fullmatch(model) or folder.parent.is_dir():
        raise UserError(
            f"model: {model!r} is neither a folder here nor a hub id of the form owner/name"
        )
    return model


def settings_of(options: Namespace) -> AnswerEngineSettings:
    """The engine that the options of a command ask for. Raises `UserError`."""
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise UserError(
            f"min_pixels: {options.min_pixels} is over max_pixels, {options.max_pixels}; lower it"
        )
    endpoint = endpoint_of(options)
    model = check_model(options.model) if endpoint is None else options.model
    given = {
        each.name: vars(options)[each.name]
        for each in fields(AnswerEngineSettings)
        if each.name in options
    }
    template = trained_with(model).get("chat_template_kwargs") or {}
    if template:
        print(f"chat_template_kwargs: those of the model's training, {template}", file=sys.stderr)
    settings = AnswerEngineSettings(
        **{**given, "model": model, "endpoint": endpoint, "template": template}
    )
    return (
        replace(settings, toolbox=_toolbox_of(options, settings))
        if getattr(options, "tools", None)
        else settings
    )


def tool_options_of(options: Namespace) -> ToolOptions:
    """The limits of tools that the options ask for. Raises `UserError`."""
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.config.values import convert

    refuse(
        (
            not options.tools,
            "tool_options: without --tools it changes nothing; name tools, or leave it out",
        )
    )
    limits: ToolOptions = convert("tool_options", options.tool_options, ToolOptions)
    return limits


def _toolbox_of(options: Namespace, settings: AnswerEngineSettings) -> Toolbox:
    """The tools of the options, for what this model sees. Raises `UserError`."""
    if settings.endpoint is not None:
        raise UserError(
            "tools: --engine openai answers no calls; use vllm or transformers, or leave --tools "
            "out"
        )
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.data.prompt_lengths import limits_of
    from adora_vl.data.prompts import control_tokens
    from adora_vl.tools.room import Room, refuse_no_room
    from adora_vl.tools.run import Toolbox, choose_tools, view_of
    from adora_vl.tools.tries import unsteady_tools

    chosen = choose_tools(options.tools)
    chat = ChatProcessor.of(settings)
    pixels = limits_of(chat.processor, chat.config, settings.min_pixels, settings.max_pixels)
    view = view_of(chat.config, pixels)
    limits = options.tool_options or ToolOptions()
    toolbox = Toolbox(chosen, limits, view, control_tokens(chat.processor))
    room = Room("max_tokens", settings.max_tokens, context=None, prompt=None, pictures=None)
    refuse_no_room(toolbox, chat.processor, settings.template, room)
    for line in unsteady_tools(toolbox):
        print(f"warning: {line}", file=sys.stderr)
    return toolbox


def check_loadable(settings: AnswerEngineSettings) -> None:
    """Raise `UserError` for a model folder that cannot be loaded, before anything is written or
    asked.
    """
    from adora_vl.models.load import check_weights

    if settings.endpoint is None and Path(settings.model).is_dir():
        check_weights("model", settings.model)
        chat = ChatProcessor.of(settings)
        if settings.engine == "vllm":
            chat.check_vllm(settings.model, settings.dtype)


def build_engine(settings: AnswerEngineSettings) -> AnswerEngine:
    """Load the model into the engine that `settings` name.

    Raises `UserError` if the model cannot be loaded.
    """
    if settings.engine == "openai":
        return EndpointEngine(settings)
    from eval.inference.local import (
        TransformersEngine,
        VLLMEngine,
    )  # seconds, and a score needs no engine

    return VLLMEngine(settings) if settings.engine == "vllm" else TransformersEngine(settings)
