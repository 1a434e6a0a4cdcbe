"""Prompts of rows: the conversation that the model reads, and the user's template for its text."""

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_uppercase
from typing import Any

from adora_vl.utils.cli import printable, short_repr
from adora_vl.utils.errors import UserError, did_you_mean

# characters of a prompt on the screen; a longer one is a mistake, as `inspect` lists the longest
_MAX_SHOWN_CHARACTERS = 20_000
IMAGE_PLACEHOLDER = "<image>"  # in a problem: the place of its next image
# Qwen2.5-VL's tokenizer reads each of these in a prompt as the token itself, not as text: an image
# without pixels ends the forward, an <|im_end|> ends the user's turn.
PICTURE_TOKENS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
)
CONTROL_TOKENS = (
    *PICTURE_TOKENS,
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
# The prompt of the ADORA reference's recipe (shadecloak/ADORA, VLM preset).
SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
# The words for `adora_system_prompt`. What two of them ask for beside the box has the wording of
# R1's template.
SYSTEM_PROMPTS = {
    "boxed": SYSTEM_PROMPT,
    "think": (
        "First think about the reasoning process, then give the answer. The reasoning process is enclosed within "
        r"<think> </think> tags, and the final answer after them stands within \boxed{}."
    ),
    "think_answer": (
        "First think about the reasoning process, then give the answer. The reasoning process and the answer are "
        r"enclosed within <think> </think> and <answer> </answer> tags, and the final answer stands within \boxed{}: "
        r"<think> reasoning process here </think><answer> \boxed{answer here} </answer>"
    ),
}
# What Qwen2.5's template writes behind the system prompt for the schemas of tools; those of
# Qwen3-VL write the same.
_TOOLS_TEMPLATE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
NO_CALLS_LEFT = "No calls are left."
# Both the letter and the value are graded as right; a letter is what most models give, and what
# MathVista asks for.
_ASKS_FOR_A_LETTER = "Answer with the letter of the right choice."
Message = dict[str, Any]
DEFAULT_PROMPT = "{problem}\n{multiple_choice}"
# a name in templates that is no column: the choices of the row, and a request for a letter
_CHOICE_BLOCK_NAME = "multiple_choice"
_CHOICES_COLUMN = "choices"  # a column that a data set may lack, as one without any choices does
NAMES_OF_CHOICES = (_CHOICE_BLOCK_NAME, _CHOICES_COLUMN)
_ANSWER_COLUMNS = ("answer", "answer_raw", "meta")  # the reference answer, and what gives it away


@dataclass(frozen=True)
class Template:
    """A user's template for the text of a prompt (`adora_prompt`), such as `{problem} ({unit})`."""

    source: str

    @cached_property
    def names(self) -> list[str]:
        """The names that the template has in braces, each once."""
        return _names_in_braces(self.source)

    @cached_property
    def names_by_line(self) -> list[tuple[str, list[str]]]:
        """The lines of the template, each with the names that it has in braces."""
        return [(line, _names_in_braces(line)) for line in self.source.split("\n")]

    @property
    def columns(self) -> list[str]:
        """The columns of a row that the template reads, each once."""
        columns = [_CHOICES_COLUMN if name == _CHOICE_BLOCK_NAME else name for name in self.names]
        return list(dict.fromkeys(columns))

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise `UserError` for a column of the template that a data set lacks.

        `columns` are those of the data set, and `where` names it in the error.
        """
        usable_columns = [
            name for name in columns if name not in (*_ANSWER_COLUMNS, "images", "prompt")
        ]
        for name in self.columns:
            # A data set without any choices may lack their column.
            if name not in usable_columns and name != _CHOICES_COLUMN:
                hint = did_you_mean(name, [*usable_columns, _CHOICE_BLOCK_NAME])
                raise UserError(
                    f"adora_prompt: {name!r} is no column of {where}{hint}; it has "
                    f"{', '.join(usable_columns)}"
                )

    def asks_the_problem_alone(self, *, with_choices: bool) -> bool:
        """Return whether the template gives each row its problem alone, as without a template.

        `with_choices` says whether some row has choices.
        """
        # Fill the template with a row whose columns all differ from its problem.
        row: dict[str, Any] = dict.fromkeys(self.columns, "another column")
        problem = "?"
        row["problem"] = problem
        row[_CHOICES_COLUMN] = ["!"] if with_choices else None
        return self(row) == problem

    def __call__(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row without the lines whose columns are all null or empty lists."""
        choices = row.get(_CHOICES_COLUMN)
        values = {**row, _CHOICES_COLUMN: choices, _CHOICE_BLOCK_NAME: multiple_choice(choices)}
        lines = []
        for line, names in self.names_by_line:
            are_empty = all(values[name] in (None, [], ()) for name in names)
            if names and are_empty:
                continue
            texts = {name: _value_text(values[name]) for name in names}
            lines.append(line.format_map(texts))
        return "\n".join(lines)


def _names_in_braces(text: str) -> list[str]:
    """Return the names in the braces of a format string of Python, each once."""
    names = (name for _, name, _, _ in string.Formatter().parse(text) if name is not None)
    return list(dict.fromkeys(names))


def read_template(source: str) -> Template:
    """Return a user's template for prompts, after a check of its text.

    The text has names of columns in braces, `{problem}`; `{{` and `}}` are braces.

    Raises `UserError` for any other text.
    """
    if not isinstance(source, str) or not source.strip():
        raise UserError(
            f"adora_prompt: {source!r} is not a text such as '{{problem}}'; write one, or leave "
            "it out"
        )
    try:
        pieces = list(string.Formatter().parse(source))
    except ValueError as error:
        raise _template_error(source, f"cannot be read ({error})") from None
    # Each piece of Python's formatter is a text and the field after it.
    for _, name, format_spec, conversion in pieces:
        if name is None:  # the last text has no field after it
            continue
        if not name.isidentifier() or format_spec or conversion:
            field = name
            if conversion:
                field += f"!{conversion}"
            if format_spec:
                field += f":{format_spec}"
            raise _template_error(
                source, f"has {field!r:.60} in braces, which is not the plain name of a column"
            )
        if name in _ANSWER_COLUMNS:
            raise _template_error(source, f"has {{{name}}}, which would tell the model the answer")
    template = Template(source)
    if not template.names:
        raise _template_error(source, "names no column, so every prompt would be the same")
    return template


def _value_text(value: object) -> str:
    """Return a column's value as text of a prompt: a list as `(A) 12 (B) 13`, null as nothing."""
    if isinstance(value, list | tuple):
        return " ".join(with_letters(value))
    if value is None:
        return ""
    return str(value)


def _template_error(source: str, why: str) -> UserError:
    """Return the error for a template that cannot be used.

    `why` says what is wrong, in words that follow the text of the template: `names no column`.
    """
    return UserError(
        f"adora_prompt: {short_repr(source)} {why}; write {{column}} for a value, and {{{{ or }}}} for "
        "a brace"
    )


def with_letters(values: Sequence[Any]) -> list[str]:
    """Return the values with letters, `(A) 12`, `(B) 13`, in the form of MathVista.

    Values after the 26th get numbers, from 27 on.
    """
    lettered_values = []
    for number, value in enumerate(without_letters(values)):
        label = str(number + 1)
        if number < len(ascii_uppercase):
            label = ascii_uppercase[number]
        lettered_values.append(f"({label}) {value}")
    return lettered_values


_CHOICE_LETTER_PATTERN = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])\s*[.):、：])\s*(?=\S)")


def without_letters(values: Sequence[Any]) -> Sequence[Any]:
    """Return the choices without letters of their own: `3`, `4` for `A. 3`, `B. 4`.

    They are returned unchanged unless all of them have letters, in order from A.
    """
    if len(values) < 2 or not _CHOICE_LETTER_PATTERN.match(str(values[0])):
        return values
    texts = []
    for number, value in enumerate(values):
        match = _CHOICE_LETTER_PATTERN.match(str(value))
        if match is None or number >= len(ascii_uppercase):
            return values
        letter = match[1] or match[2]  # `(A)`, or `A.` and the like
        if letter != ascii_uppercase[number]:
            return values
        texts.append(str(value)[match.end() :])
    return texts


def multiple_choice(choices: Sequence[str] | None) -> str | None:
    """Return the text below a problem with choices: a line for each, and a request for a letter.

    Returns None without any choice.
    """
    if not choices:
        return None
    return "\n".join(["Choices:", *with_letters(choices), _ASKS_FOR_A_LETTER])


def asks_for_answer_tags(*prompts: str | None) -> bool:
    """Return whether a system prompt or a template asks for `<answer> </answer>`.

    An answer may then stand between these tags alone, without a box.
    """
    return any("<answer>" in (prompt or "") for prompt in prompts)


def control_tokens(processor: object) -> tuple[str, ...]:
    """Return the texts that a tokenizer reads as control tokens, and not as text.

    They are `CONTROL_TOKENS` and the special tokens of its vocabulary. `processor` is a processor
    or a tokenizer, or None where it is not known.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special_texts = [token.content for token in added_tokens if token.special]
    # Both may have the same text, which is returned once.
    return tuple(dict.fromkeys([*CONTROL_TOKENS, *special_texts]))


def find_control_token(value: object, tokens: Sequence[str] = CONTROL_TOKENS) -> str | None:
    """Return the first of `tokens` in a text, or in any text of lists and mappings, else None."""
    if isinstance(value, str):
        return next((token for token in tokens if token in value), None)
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    for item in items:
        token = find_control_token(item, tokens)
        if token is not None:
            return token
    return None


_MESSAGE_EXAMPLE = '[{"role": "user", "content": "..."}]'


def fault_in_messages(prompt: object, tokens: Sequence[str]) -> str | None:
    """Return what makes a finished prompt unusable, as a sentence, or None where nothing does.

    A finished prompt contains what templates, tools and environments have put into it.

    Args:
        prompt: messages, or a text, which TRL takes too.
        tokens: the control tokens, which messages must not have in their texts. A text may have the
            tokens that mark turns, since its user has applied the chat template already. It must
            not have those of pictures.
    """
    refused_tokens = PICTURE_TOKENS if isinstance(prompt, str) else tokens
    token = find_control_token(prompt, refused_tokens)
    if token is not None:
        return f"its prompt has the model's own token {token}; remove it from the text"
    if isinstance(prompt, str) and prompt:
        return None
    if not isinstance(prompt, list) or not prompt:
        return f"its prompt is {short_repr(prompt)}; write messages, such as {_MESSAGE_EXAMPLE}"
    for message in prompt:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message:
            return (
                f"its prompt has the message {short_repr(message)} without a role; write messages, "
                f"such as {_MESSAGE_EXAMPLE}"
            )
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            if isinstance(part, Mapping) and part.get("image") is not None:
                return (
                    "its prompt has a picture inside a message; put it into the column 'images', "
                    'and {"type": "image"} in its place'
                )
    return None


def with_tools(system_prompt: str | None, schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the system prompt followed by the schemas of the tools, or unchanged without tools."""
    if not schemas:
        return system_prompt
    tools_text = _TOOLS_TEMPLATE.format(
        "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    )
    return f"{system_prompt}\n\n{tools_text}" if system_prompt else tools_text


def tool_response(parts: Sequence[Any]) -> list[Any]:
    """Return a tool's reply, texts and pictures, between the template's marks for a user's turn."""
    return ["<tool_response>\n", *parts, "\n</tool_response>"]


def conversation(problem: str, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """Return the messages for a problem without `<image>`: the system prompt and the problem.

    TRL puts the row's images before the text of the first user message. Where a problem has
    `<image>`, `conversation_with_images` says where each image stands.
    """
    messages: list[Message] = [{"role": "user", "content": problem}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def conversation_with_images(
    problem: str, n_images: int, system_prompt: str | None = SYSTEM_PROMPT
) -> list[Message]:
    """Return the messages for a problem with one image part per image, as chat templates expect.

    An image part stands at each `<image>` of the problem, or all stand before a text without any.
    For example, `In <image>, find x.` has a text part `In `, an image part and a text part
    `, find x.`
    """
    messages = conversation(problem, system_prompt)
    messages[-1] = {"role": "user", "content": _message_parts(problem, n_images)}
    return messages


def conversations(
    problems: list[str], n_images: list[int], system_prompt: str | None
) -> list[list[Message]]:
    """Return the messages of each row of a data set, as a column of a table.

    A column has one type. So all contents are plain texts; if any problem has an image inside its
    text, all are lists of parts.

    Args:
        problems: the text of each row.
        n_images: how many images each row has.
        system_prompt: the system prompt of every conversation; None for none.
    """
    if not any(IMAGE_PLACEHOLDER in problem for problem in problems):
        return [conversation(problem, system_prompt) for problem in problems]
    all_messages = []
    for problem, count in zip(problems, n_images, strict=True):
        messages = conversation_with_images(problem, count, system_prompt)
        if system_prompt:
            messages[0] = {"role": "system", "content": [{"type": "text", "text": system_prompt}]}
        all_messages.append(messages)
    return all_messages


def messages_as_text(messages: Sequence[Message]) -> str:
    """Return messages as a text for a person, with `[role]` above each and `<image>` for images."""
    lines = []
    for message in messages:
        content = message.get("content") or ""
        text = content
        if not isinstance(content, str):
            text = "".join(part.get("text", IMAGE_PLACEHOLDER) for part in content)
        lines += [f"[{message['role']}]", text]
    return "\n".join(lines)


def _message_parts(problem: str, n_images: int) -> list[Message]:
    """Return a problem as parts of a message, with an image part at each `<image>`.

    The images come before the text where it has no `<image>`.
    """
    if IMAGE_PLACEHOLDER not in problem:
        images: list[Message] = [{"type": "image"} for _ in range(n_images)]
        return [*images, {"type": "text", "text": problem}]
    assert problem.count(IMAGE_PLACEHOLDER) == n_images, "the rows are checked before"
    parts: list[Message] = []
    for number, text in enumerate(problem.split(IMAGE_PLACEHOLDER)):
        if number > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def lines_for_terminal(prompt: str) -> list[str]:
    """Return the lines of a prompt as a terminal can show them; a very long one is cut."""
    lines = [printable(line) for line in prompt[:_MAX_SHOWN_CHARACTERS].split("\n")]
    hidden_characters = len(prompt) - _MAX_SHOWN_CHARACTERS
    if hidden_characters > 0:
        lines.append(f"... {hidden_characters} more characters")
    return lines
