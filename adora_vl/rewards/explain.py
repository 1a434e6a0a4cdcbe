r"""Why a response gets its reward: what was extracted, both canonical forms, the rule that decided,
the rewards.

python -m adora_vl.rewards.explain --gold '2 \sqrt { 221 }' --response 'so \boxed{\sqrt{884}}'
python -m adora_vl.rewards.explain --reward docs/my_rewards.py:brevity --response 'so \boxed{5}'
python -m adora_vl.rewards.explain --figure facts.txt --response response.txt
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from adora_vl.rewards.answer import Answer, without_currency
from adora_vl.rewards.choose import call_once, choose_rewards
from adora_vl.rewards.completion import last_answer, last_boxed
from adora_vl.rewards.entries import RewardEntry, named_rewards
from adora_vl.rewards.explain_steps import read_figure_file, step_lines
from adora_vl.rewards.grade import (
    REMEDY_BY_REASON,
    grade,
    parse_answer_for,
    verify_gold,
)
from adora_vl.rewards.presets import PRESETS, reward_for_grade
from adora_vl.rewards.relations import chain_of_numbers
from adora_vl.rewards.structured import parse_reference
from adora_vl.rewards.thinking import text_after_thinking, with_latex_boxes
from adora_vl.utils.cli import Parser, pluralize, run_command, yaml_value
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import is_users_file

TRIAL_TIMEOUT_S = 300.0  # the default of adora_reward_timeout
_MAX_PATH_CHARS = 200

# What the reasons of a grade mean. A reason `gold_x` is `x`, found in the reference answer.
RULE_IN_WORDS = {
    "same_number": "both are numbers, or both percentages, and equal, or one is a long decimal for the "
    "other",
    "same_value": "expressions with the same value at six points",
    "same_text": "no plain numbers, but the same text",
    "letter": "the letter of the right choice",
    "rounded": "the reference answer rounded to as many places as the answer has (--rounding)",
    "same_parts": "as many parts, and each one is right",
    "same_ratio": "a ratio with the same quotients, or its quotient",
    "same_part": "one of the parts of the reference answer",
    "same_equation": "the same equation, but for moved terms and a factor that is not 0",
    "same_inequality": "the same inequality, but for moved terms and a positive factor",
    "same_solutions": "the same numbers solve both",
    "different_form": "a list, point, interval, equation or inequality where the reference answer has another "
    "form",
    "different_length": "more or fewer values than the reference answer has",
    "different_part": "one part is not that of the reference answer",
    "different_label": "the value of something else",
    "different_brackets": "the ends of an interval belong to it, or do not, unlike those of the reference answer",
    "different_equation": "not the same equation",
    "different_inequality": "not the same inequality",
    "different_solutions": "other numbers solve it",
    "always_true": "it says nothing: everything or nothing solves it",
    "chain_differs": "the sides of the chain are not equal",
    "labels": "some values have names and others have none, or two have the same",
    "matrix": "a matrix, a column or several lines",
    "open_list": "a list that is not written out",
    "different_unit": "a quantity of another dimension than the reference answer",
    "different_number": "both are numbers, and not equal",
    "different_expression": "not the same expression",
    "different_text": "a number and a text, or two texts",
    "different_letter": "the letter of another choice",
    "letter_without_choice": "a letter that names none of the known choices",
    "letter_with_another_value": "a letter beside a value that is not that of its choice",
    "another_choice": "another choice has the same value, and the answer has not the text of the right one",
    "not_a_number": "a readable text or expression, but not the reference answer",
    "unevaluated": "a rational number, as arithmetic that is still to be done",
    "enumeration": "several answers, or a set, or a plus-minus",
    "interval": "an interval, a pair or a vector",
    "relation": "an inequality, an approximation or a membership",
    "percentage": "a percentage that is not the reference answer",
    "equation": "an equation with more than a name before it",
    "not_finite": "not a finite number",
    "empty_box": "nothing in the box",
    "no_box": "no complete \\boxed{} in the response",
    "not_read": "not in the grammar of answers",
    "too_long": "over 500 characters",
    "too_large": "over the cap on digits, exponents, nesting, functions or size",
    "undefined": "a division by zero, or no real value",
    "hidden_characters": "control, bidirectional or zero-width characters",
    "undecided": "large numbers cancel, and leave too few digits to decide",
    **REMEDY_BY_REASON,
}


def explain_grade(
    response: str,
    gold: str,
    choices: Sequence[str] | None = None,
    *,
    rounding: bool = False,
    answer_tags: bool = False,
    thinking_opened: bool = False,
) -> list[str]:
    """Return the lines that explain the grade of a response.

    Args:
        response: the whole response.
        gold: the reference answer.
        choices: the values of A, B, C, ...
        rounding: as in `grade`.
        answer_tags: as in `grade`.
        thinking_opened: as in `grade`.

    Raises `UserError` for a reference answer that cannot be graded against.
    """
    reason = verify_gold(gold, choices)
    if reason:
        reason_in_words = reason if ":" in reason else f"{reason}: {RULE_IN_WORDS.get(reason, '')}"
        raise UserError(f"--gold: {gold!r} cannot be graded against ({reason_in_words})")
    result = grade(
        response,
        gold,
        choices=choices,
        rounding=rounding,
        answer_tags=answer_tags,
        thinking_opened=thinking_opened,
    )
    final_response = text_after_thinking(response, thinking_opened)
    lines: list[str] = []
    whole_response = with_latex_boxes(response)
    if final_response != whole_response:
        thinking_chars = len(whole_response) - len(final_response)
        lines.append(f"thinking   {pluralize(thinking_chars, 'character')} set aside")
    extracted = "(no complete box)"
    if result.extracted is not None:
        extracted = _printable(result.extracted)
    lines.append(f"extracted  {extracted}")
    lines += _comparison_lines(final_response, gold, answer_tags=answer_tags)
    for number, pair in enumerate(result.pairs, 1):
        lines.append(
            f"part {number:<6}{_printable(pair.answer)} against {_printable(pair.reference)}: "
            f"{pair.reason}"
        )
    for letter, value in zip(ascii_uppercase, choices or (), strict=False):
        lines.append(f"choice {letter}   {_describe_answer(parse_reference(value))}")
    lines.append(
        f"rule       {result.reason}: {RULE_IN_WORDS.get(result.reason.removeprefix('gold_'), '')}"
    )
    lines.append(f"verdict    {result.verdict} ({result.ms:.1f} ms)")
    rewards = [f"{preset} {reward_for_grade(result, preset):g}" for preset in PRESETS]
    lines.append(f"rewards    {', '.join(rewards)}")
    return lines


def _comparison_lines(response: str, gold: str, *, answer_tags: bool) -> list[str]:
    """Return the lines with the parsed answer and the parsed reference answer.

    `response`: the response without its thinking.
    """
    lines: list[str] = []
    content = last_answer(response) if answer_tags else last_boxed(response)
    if content is not None:
        answer = parse_answer_for(
            parse_reference(gold), response=response, content=content, answer_tags=answer_tags
        )
        # It is parsed again, to show it with the type that it would have as a reference answer.
        if answer.raw:
            answer = parse_reference(answer.raw)
        lines.append(f"answer     {_describe_answer(answer)}")
    lines.append(f"gold       {_describe_answer(parse_reference(gold))}")
    return lines


def _describe_answer(answer: Answer) -> str:
    r"""Return the canonical text of an answer with its type, and its value where it is a number.

    - `\frac{1}{2}` gives `\frac{1}{2}  [number, 0.5]`
    - `(1, 2)` gives `(1, 2)  [ordered]`
    - `2 + 3 = 5` gives `2+3=5  [working, 5]`: a chain of numbers has the value of its last side
    """
    answer = without_currency(answer)
    text = _printable(answer.text_with_names if answer.is_structured else answer.text)
    type_name: str = answer.type
    chain = chain_of_numbers(answer.text_with_names) if type_name == "unreadable" else []
    if chain:
        answer = chain[-1].answer  # the result of the working
        type_name = "working"
    if answer.number:
        return f"{text}  [{type_name}, {float(answer.number.value):.9g}]"
    if type_name == "unreadable":
        type_name = f"{type_name}: {answer.reason}"
    return f"{text or '-'}  [{type_name}]"


def _printable(text: str) -> str:
    """Return `text` with escapes for the characters that a terminal would hide or obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def reward_lines(
    entries: Sequence[RewardEntry],
    response: str,
    columns: Mapping[str, str],
    answer_tags: bool = False,
    thinking_opened: bool = False,
) -> list[str]:
    """Return lines that say what each reward gives for a response, without a model.

    Args:
        entries: as in `adora_reward`.
        response: the whole response.
        columns: the columns of the row that the response belongs to.
        answer_tags: as in `grade`.
        thinking_opened: as in `grade`.

    Raises `UserError` where a reward fails.
    """
    chosen = choose_rewards(entries, answer_tags=answer_tags)
    chosen.check_columns(columns)
    log_lines: list[str] = []

    def log_extra(name: str, values: Sequence[object]) -> None:
        log_lines.append(f"logged     {name}: {_printable(str(values[0]))}")

    def log_metric(name: str, value: float) -> None:
        log_lines.append(f"logged     {name}: {value:g}")

    arguments: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": columns.get("problem", "")}]],
        "completions": [[{"role": "assistant", "content": response}]],
        "completion_ids": [[0]],  # one token in place of those that no model has made
        "thinking_opened": [thinking_opened],
        **{name: [value] for name, value in columns.items()},
        "trainer_state": None,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    lines = []
    for entry, function in zip(chosen.entries, chosen.functions, strict=True):
        unscored: dict[int, str] = {}  # filled with why the response has no score
        scores = call_once(
            entry,
            function=function,
            arguments=arguments,
            timeout=TRIAL_TIMEOUT_S,
            unscored=unscored,
        )
        score = scores[0]
        text = f"None ({unscored.get(0, 'not scored')})" if score is None else f"{score:g}"
        lines.append(f"reward     {entry} {text}")
    return [*lines, *log_lines]


def _parse_entry(word: str) -> Any:
    """Return an entry of `--reward`: a name, or a mapping such as `{steps: {gate: true}}`."""
    return yaml_value(word) if word.startswith("{") else word


def _parse_columns(options: argparse.Namespace) -> dict[str, str]:
    """Return the columns that the options `--gold` and `--column` give. Raises `UserError`."""
    columns = {} if options.gold is None else {"answer": options.gold}
    for word in options.column:
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"--column: {word!r} is not NAME=VALUE")
        columns[name] = value
    return columns


def _read_response(word: str, *, may_be_file: bool) -> str:
    """Return the response that `--response` gives: the word itself, standard input, or a file."""
    if word == "-":
        return sys.stdin.read()
    try:
        if may_be_file and Path(word).is_file():
            return Path(word).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        # Looking for a file fails too where the text is too long for a path. Such a text is the
        # response itself.
        if "\n" not in word and len(word) < _MAX_PATH_CHARS:
            raise UserError(f"--response: {word!r} cannot be read ({error})") from error
    return word


def _build_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="python -m adora_vl.rewards.explain",
        description="Say what an answer would score, and why: the answer that was read, its form, and the "
        "rule that decided.",
    )
    parser.add_argument("--gold", help="the right answer, as a dataset has it")
    parser.add_argument(
        "--response",
        required=True,
        help="the whole response; - reads it from standard input, and with --figure it may be a file",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FACTS",
        help="facts, or a stored figure: checks each claim of the response on it",
    )
    parser.add_argument("--choices", nargs="+", metavar="VALUE", help="the values of A, B, C, ...")
    parser.add_argument(
        "--rounding",
        action="store_true",
        help="also accept the reference answer rounded to a decimal",
    )
    parser.add_argument(
        "--answer-tags", action="store_true", help="also accept <answer>5</answer>, without a box"
    )
    parser.add_argument("--thinking-opened", action="store_true", help="the prompt ends in <think>")
    parser.add_argument(
        "--reward",
        nargs="+",
        type=_parse_entry,
        default=[],
        metavar="FILE.py:FUNCTION",
        help="as adora_reward, with options too",
    )
    parser.add_argument(
        "--column", action="append", default=[], metavar="NAME=VALUE", help="a column of the row"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 0 done, whatever the verdict; 2 the user's input is wrong.
    """
    parser = _build_parser()

    def command() -> None:
        """Print how the response is graded, which of its claims hold, and what rewards return."""
        options = parser.parse_args(arguments)
        if options.gold is None and not options.reward and options.figure is None:
            raise UserError(
                "give --gold to see how the answer is graded, --figure to check its claims, or "
                "--reward to try a reward"
            )
        response = _read_response(options.response, may_be_file=options.figure is not None)
        lines = []
        # Functions of the user's own grade as they like, so that our verdict would mislead.
        only_user_functions = options.reward and all(
            is_users_file(reward.name) for reward in named_rewards(options.reward)
        )
        if options.gold is not None and not only_user_functions:
            lines = explain_grade(
                response,
                gold=options.gold,
                choices=options.choices,
                rounding=options.rounding,
                answer_tags=options.answer_tags,
                thinking_opened=options.thinking_opened,
            )
        if options.figure is not None:
            lines += step_lines(response, read_figure_file(options.figure))
        if options.reward:
            lines += reward_lines(
                options.reward,
                response,
                _parse_columns(options),
                answer_tags=options.answer_tags,
                thinking_opened=options.thinking_opened,
            )
        print("\n".join(lines))

    return run_command(command, interrupt_note="nothing was graded")


if __name__ == "__main__":
    sys.exit(main())
