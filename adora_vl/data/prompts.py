"""Prompts of rows: the conversation that the model reads, and the user's template for its text."""

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from adora_vl.utils.cli import printable, shown
from adora_vl.utils.errors import UserError, did_you_mean

# characters of a prompt on the screen; a longer one is a mistake, as `inspect` lists the longest
_SHOWN_PROMPT = 20_000
PLACEHOLDER = "<image>"  # in a problem: the place of its next image
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
_TOOLS = """# Tools

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
_MADE = "multiple_choice"  # a name that is no column: the choices of the row, and what to answer
_CHOICES = "choices"  # a column that a data set may lack, as one without any choices does
NAMES_OF_CHOICES = (_MADE, _CHOICES)
_HIDDEN = ("answer", "answer_raw", "meta")  # the reference answer, and what gives it away


@dataclass(frozen=True)
class Template:
    """A template, read and checked.

    `lines`: each line as pieces of (text, name of a column or None).
    """

    source: str
    lines: tuple[tuple[tuple[str, str | None], ...], ...]

    @property
    def names(self) -> list[str]:
        """The names that it has in braces, each once."""
        return list(
            dict.fromkeys(name for line in self.lines for _, name in line if name is not None)
        )

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""
        return list(dict.fromkeys(_CHOICES if name == _MADE else name for name in self.names))

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise `UserError` for a column that the data set `where` lacks."""
        usable_columns = [name for name in columns if name not in (*_HIDDEN, "images", "prompt")]
        for name in self.columns:
            if name not in usable_columns and name != _CHOICES:
                close = did_you_mean(name, [*usable_columns, _MADE])
                raise UserError(
                    f"adora_prompt: {name!r} is no column of {where}{close}; it has "
                    f"{', '.join(usable_columns)}"
                )

    def asks_the_problem_alone(self, *, with_choices: bool) -> bool:
        """Return whether the text of every row is its problem alone.

        `with_choices`: whether some row has choices.
        """
        values = dict.fromkeys(self.columns, "another column")
        return self({**values, "problem": "?", _CHOICES: ["!"] if with_choices else None}) == "?"

    def __call__(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row, without the lines whose columns are all null or empty lists."""
        choices = row.get(_CHOICES)
        values = {**row, _CHOICES: choices, _MADE: multiple_choice(choices)}
        lines = []
        for line in self.lines:
            line_values = [values[name] for _, name in line if name is not None]
            if line_values and all(value in (None, [], ()) for value in line_values):
                continue
            text = ""
            for piece, name in line:
                text += piece
                if name:
                    text += _value_text(values[name])
            lines.append(text)
        return "\n".join(lines)


def template(source: str) -> Template:
    """Read a template.

    Raises `UserError` for anything but text and `{column}`; `{{` and `}}` are braces.
    """
    if not isinstance(source, str) or not source.strip():
        raise UserError(
            f"adora_prompt: {source!r} is not a text such as '{{problem}}'; write one, or leave "
            "it out"
        )
    try:
        pieces = list(string.Formatter().parse(source))
    except ValueError as error:
        raise _wrong(source, f"cannot be read ({error})") from None
    # Each line has (text, None) and ("", column) in turn.
    lines: list[list[tuple[str, str | None]]] = [[]]
    for text, name, form, conversion in pieces:
        for number, line_text in enumerate(text.split("\n")):
            if number > 0:
                lines.append([])
            lines[-1].append((line_text, None))
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            field = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise _wrong(
                source, f"has {field!r:.60} in braces, which is not the plain name of a column"
            )
        if name in _HIDDEN:
            raise _wrong(source, f"has {{{name}}}, which would tell the model the answer")
        lines[-1].append(("", name))
    parsed = Template(source, tuple(map(tuple, lines)))
    if not parsed.names:
        raise _wrong(source, "names no column, so every prompt would be the same")
    return parsed


def _value_text(value: object) -> str:
    """Return a column's value as text of a prompt: a list as `(A) 12 (B) 13`, null as nothing."""
    if isinstance(value, list | tuple):
        return " ".join(lettered(value))
    if value is None:
        return ""
    return str(value)


def _wrong(source: str, why: str) -> UserError:
    """Return the error of a template."""
    return UserError(
        f"adora_prompt: {shown(source)} {why}; write {{column}} for a value, and {{{{ or }}}} for "
        "a brace"
    )


def lettered(values: Sequence[Any]) -> list[str]:
    """Return the values with letters, `(A) 12`, `(B) 13`, in the form of MathVista.

    Values after the 26th get numbers, from 27 on.
    """
    values = without_letters(values)
    letters = [
        *ascii_uppercase,
        *(str(number) for number in range(len(ascii_uppercase) + 1, len(values) + 1)),
    ]
    return [f"({letter}) {value}" for letter, value in zip(letters, values, strict=False)]


_OWN_LETTER = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])\s*[.):、：])\s*(?=\S)")


def without_letters(values: Sequence[Any]) -> Sequence[Any]:
    """Return the choices without letters of their own: `3`, `4` for `A. 3`, `B. 4`.

    They are returned unchanged unless all of them have letters, in order from A.
    """
    if len(values) < 2 or not _OWN_LETTER.match(str(values[0])):
        return values
    matches = [_OWN_LETTER.match(str(value)) for value in values]
    if [match and (match[1] or match[2]) for match in matches] != list(
        ascii_uppercase[: len(values)]
    ):
        return values
    return [
        str(value)[match.end() :] for value, match in zip(values, matches, strict=True) if match
    ]


def multiple_choice(choices: Sequence[str] | None) -> str | None:
    """Return what stands below a problem with choices: a line for each, and what to answer.

    None without any choice.
    """
    return "\n".join(["Choices:", *lettered(choices), _ASKS_FOR_A_LETTER]) if choices else None


def asks_for_answer_tags(*prompts: str | None) -> bool:
    """Return whether a system prompt or a template asks for `<answer> </answer>`.

    An answer may then stand between these tags alone, without a box.
    """
    return any("<answer>" in (prompt or "") for prompt in prompts)


def control_tokens(processor: object) -> tuple[str, ...]:
    """Return the texts that a processor or tokenizer reads as tokens of its own.

    They are `CONTROL_TOKENS` and the special tokens of its vocabulary. `processor`: None where it
    is not known.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = [token.content for token in added if token.special]
    return tuple(dict.fromkeys([*CONTROL_TOKENS, *special]))


def control_token_in(value: object, tokens: Sequence[str] = CONTROL_TOKENS) -> str | None:
    """Return the first of `tokens` in a text, or in any text of lists and mappings, else None."""
    if isinstance(value, str):
        return next((token for token in tokens if token in value), None)
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    for item in inside:
        token = control_token_in(item, tokens)
        if token is not None:
            return token
    return None


def problem_with_messages(prompt: object, tokens: Sequence[str] = CONTROL_TOKENS) -> str | None:
    """Return what makes a finished prompt unusable, or None where nothing does.

    A finished prompt contains what templates, tools and environments have put into it.

    `prompt`: messages, or a text of TRL's, which its user has written with the marks of turns
    already, so only those of pictures are refused in it.
    """
    token = control_token_in(prompt, PICTURE_TOKENS if isinstance(prompt, str) else tokens)
    if token is not None:
        return f"its prompt has the model's own token {token}; remove it from the text"
    if not isinstance(prompt, list):
        return None
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
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
    tools_text = _TOOLS.format(
        "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    )
    return f"{system_prompt}\n\n{tools_text}" if system_prompt else tools_text


def tool_response(parts: Sequence[Any]) -> list[Any]:
    """Return a tool's reply, texts and pictures, between the template's marks for a user's turn."""
    return ["<tool_response>\n", *parts, "\n</tool_response>"]


def conversation(problem: str, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """Return the messages for a problem without `<image>`.

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

    The parts stand at each `<image>` of the problem, or before the text where it has none.
    """
    messages = conversation(problem, system_prompt)
    messages[-1] = {"role": "user", "content": _parts(problem, n_images)}
    return messages


def conversations(
    problems: list[str], n_images: list[int], system_prompt: str | None
) -> list[list[Message]]:
    """Return the conversations of a whole data set, all in one form.

    A column of a table has one type, so all contents are plain texts, or all are lists of parts if
    any problem has an image inside its text.
    """
    if not any(PLACEHOLDER in problem for problem in problems):
        return [conversation(problem, system_prompt) for problem in problems]
    all_messages = []
    for problem, count in zip(problems, n_images, strict=True):
        messages = conversation_with_images(problem, count, system_prompt)
        if system_prompt:
            messages[0] = {"role": "system", "content": [{"type": "text", "text": system_prompt}]}
        all_messages.append(messages)
    return all_messages


def as_text(messages: Sequence[Message]) -> str:
    """Return a conversation for a person.

    Each role stands above its text, `<image>` where an image is.
    """
    lines = []
    for message in messages:
        parts = message.get("content") or ""
        text = parts
        if not isinstance(parts, str):
            text = "".join(part.get("text", PLACEHOLDER) for part in parts)
        lines += [f"[{message['role']}]", text]
    return "\n".join(lines)


def _parts(problem: str, n_images: int) -> list[Message]:
    """Return a problem as parts of a message: images in their places, or before the text."""
    if PLACEHOLDER not in problem:
        images: list[Message] = [{"type": "image"} for _ in range(n_images)]
        return [*images, {"type": "text", "text": problem}]
    assert problem.count(PLACEHOLDER) == n_images, "the rows are checked before"
    parts: list[Message] = []
    for number, text in enumerate(problem.split(PLACEHOLDER)):
        if number > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def shown_lines(prompt: str) -> list[str]:
    """Return the lines of a prompt for a terminal."""
    hidden = len(prompt) - _SHOWN_PROMPT
    lines = [printable(line) for line in prompt[:_SHOWN_PROMPT].split("\n")]
    return [*lines, f"... {hidden} more characters"] if hidden > 0 else lines
