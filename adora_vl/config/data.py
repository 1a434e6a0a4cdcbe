"""Keys for data of the user's own, and for the words around a problem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from adora_vl.prompt_template import template
from adora_vl.prompts import RESPONSE_FORMATS, SYSTEM_PROMPT

_ROUNDING = 1e-3  # of shares such as 0.333
_LARGEST_PROMPT = 1_000_000  # bytes of the file of a system prompt


@dataclass
class DataOptions:
    """Inherited by `AdoraScriptArguments`."""

    adora_columns: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Where dataset_name is a table, a folder with one, or a hub id: our columns and the table's, such "
            "as {problem: question, answer: label, images: image}. Null: dataset_name is a prepared folder."
        },
    )
    adora_mixture: list[float] | None = field(
        default=None,
        metadata={
            "help": "The share of each of several data sets in dataset_name, such as [0.7, 0.3]; rows of a small one "
            "are repeated. Null: every row once per epoch."
        },
    )
    adora_system_prompt_file: str | None = field(
        default=None, metadata={"help": "A UTF-8 text file with the system prompt, in place of adora_system_prompt."}
    )
    adora_prompt: str | None = field(
        default=None,
        metadata={
            "help": "The text of a problem's message from the columns of its row, such as '{problem} Choices: "
            "{choices}'; a line whose columns are all null is left out. Null: the problem alone."
        },
    )
    adora_response_format: str = field(
        default="boxed",
        metadata={
            "help": "What the default system prompt asks for: boxed, think (<think> before the answer) or think_answer "
            "(<think>, then <answer>). The rewards think_format and think_answer_format check it.",
            "choices": list(RESPONSE_FORMATS),
        },
    )


def settle_data_options(script: Any) -> None:
    """Read what the keys stand for into a script's arguments: the file, the format's prompt, JSON. Raises `UserError`.

    Twice is the same as once.
    """
    script.adora_columns = _columns(script.adora_columns)
    if isinstance(script.dataset_name, str):
        script.dataset_name = [script.dataset_name]
    _check_mixture(script.dataset_name, script.adora_mixture)
    if script.adora_prompt is not None:
        template(script.adora_prompt)
    prompt, file, form = script.adora_system_prompt, script.adora_system_prompt_file, script.adora_response_format
    if form not in RESPONSE_FORMATS:
        raise UserError(f"adora_response_format: {form!r} is not one of {', '.join(RESPONSE_FORMATS)}")
    if file is not None:
        text = _text_of(file)
        if prompt not in (SYSTEM_PROMPT, text):
            raise UserError(
                f"adora_system_prompt_file: {file!r} is given beside an adora_system_prompt; give one of them"
            )
        script.adora_system_prompt = text
    elif prompt == SYSTEM_PROMPT:
        script.adora_system_prompt = RESPONSE_FORMATS[form]


def _columns(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):  # of the command line
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f'adora_columns: {value!r:.60} is not a mapping, such as \'{{"problem": "q"}}\'') from error
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise UserError(f"adora_columns: {value!r:.60} is not a mapping, such as {{problem: question, answer: label}}")
    return dict(value)


def _check_mixture(names: list[str], weights: list[float] | None) -> None:
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise UserError(f"dataset_name: {names!r} is not a name: it is empty; name a data set")
    double = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if double is not None:
        raise UserError(f"dataset_name: {double!r} is given twice; name each data set once")
    if weights is not None and len(weights) != len(names):
        raise UserError(
            f"adora_mixture: {weights} has {len(weights)} values for the {len(names)} of dataset_name: {names}"
        )
    if weights is not None and abs(sum(weights) - 1) > _ROUNDING:
        raise UserError(
            f"adora_mixture: {weights} sum to {sum(weights):g}; write shares that sum to 1, such as [0.7, 0.3]"
        )


def _text_of(file: str) -> str:
    try:
        content = Path(file).read_bytes()
        text = content.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise UserError(f"adora_system_prompt_file: {file!r} cannot be read ({reason}); name a UTF-8 text") from error
    if not text or len(content) > _LARGEST_PROMPT:
        raise UserError(f"adora_system_prompt_file: {file!r} has {len(content)} bytes; name a file with a prompt in it")
    return text
