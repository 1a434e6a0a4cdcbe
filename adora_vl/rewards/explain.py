r"""Why a response gets its reward: what was extracted, both canonical forms, the rule that decided, the rewards.

python -m adora_vl.rewards.explain --gold '2 \sqrt { 221 }' --response 'so \boxed{\sqrt{884}}'
python -m adora_vl.rewards.explain --reward docs/my_rewards.py:brevity --response 'so \boxed{5}'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, NoReturn

from adora_vl.errors import UserError
from adora_vl.rewards.boxed import last_answer, last_boxed
from adora_vl.rewards.forms import Form, read
from adora_vl.rewards.grade import Grade, grade, verify_gold
from adora_vl.rewards.own import is_own
from adora_vl.rewards.presets import PRESETS, reward

TRY_TIMEOUT_S = 300.0  # the default of adora_reward_timeout

# What the reasons of a grade mean, for both sides: `gold_x` is `x` found in the gold.
RULES = {
    "same_number": "both are numbers, or both percentages, and equal to within 1e-6 relative (integers exactly)",
    "same_value": "sympy finds the same value (at several points where there are unknowns)",
    "same_text": "no plain numbers, but the same text",
    "letter": "the letter of the right choice",
    "rounded": "the gold rounded to as many places as the answer has (--rounding)",
    "different_number": "both are numbers, and not equal",
    "different_expression": "not the same expression",
    "different_text": "a number and a text, or two texts",
    "different_letter": "the letter of another choice",
    "letter_without_choice": "a letter that names none of the known choices",
    "not_a_number": "a readable text or expression, but not the gold",
    "unevaluated": "arithmetic that is still to be done",
    "enumeration": "several answers, or a set, or a plus-minus",
    "interval": "an interval, a pair or a vector",
    "relation": "an inequality, an approximation or a membership",
    "percentage": "a percentage that is not the gold",
    "equation": "an equation with more than a name before it",
    "not_finite": "not a finite number",
    "empty_box": "nothing in the box",
    "no_box": "no complete \\boxed{} in the response",
    "not_read": "not in the grammar of answers",
    "too_long": "over 500 characters",
    "too_large": "over the cap on digits, exponents, nesting or size",
    "undefined": "a division by zero, or no real value",
    "hidden_characters": "control, bidirectional or zero-width characters",
    "undecided": "sympy cannot work with the answer",
    "deadline": "sympy did not decide before the deadline; its worker was killed",
    "memory": "sympy ran out of its memory limit",
    "worker_died": "the worker died twice on it",
    "no_worker": "no worker could be started: is sympy installed?",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def explanation(
    response: str,
    gold: str,
    choices: Sequence[str] | None = None,
    *,
    rounding: bool = False,
    answer_tags: bool = False,
) -> list[str]:
    """The lines of the explanation. Raises `UserError` for a gold that cannot be graded against."""
    reason = verify_gold(gold, choices)
    if reason:
        raise UserError(f"--gold: {gold!r} cannot be graded against ({reason}: {RULES.get(reason, '')})")
    found = grade(response, gold, choices=choices, rounding=rounding, answer_tags=answer_tags)
    lines = [f"extracted  {_shown(found.extracted) if found.extracted is not None else '(no complete box)'}"]
    given = last_answer(response) if answer_tags else last_boxed(response)
    if given is not None:
        lines.append(f"answer     {_described(read(given))}")
    lines.append(f"gold       {_described(read(gold))}")
    for letter, value in zip(ascii_uppercase, choices or (), strict=False):
        lines.append(f"choice {letter}   {_described(read(value))}")
    lines.append(f"rule       {found.reason}: {RULES.get(found.reason.removeprefix('gold_'), '')}")
    lines.append(f"verdict    {found.verdict} ({found.ms:.1f} ms, {_where(found)})")
    return [*lines, f"rewards    {', '.join(f'{preset} {reward(found, preset):g}' for preset in PRESETS)}"]


def _where(found: Grade) -> str:
    return "by sympy in a worker, its start included" if found.symbolic else "without sympy"


def _described(form: Form) -> str:
    """The canonical text with its kind, and its value where it is a number."""
    text = _shown(form.text) if form.text or form.kind != "unreadable" else "-"
    if form.number:
        return f"{text}  [{form.kind}, {float(form.number.value):.9g}]"
    kind = form.kind.replace("_", " ")
    sound = form.kind in {"text", "expression", "percentage"}
    return f"{text}  [{kind}]" if sound else f"{text}  [{kind}: {form.reason}]"


def _shown(text: str) -> str:
    """`text` with what a terminal would hide or obey spelled out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def tried(
    entries: Sequence[str], response: str, columns: Mapping[str, str], options: str | None, answer_tags: bool = False
) -> list[str]:
    """What each reward of `entries` gives for a response, without a model. Raises `UserError` where one fails."""
    from adora_vl.rewards.chosen import call_once, choose_rewards

    chosen = choose_rewards(entries, options, answer_tags=answer_tags)
    chosen.check_columns(columns)
    noted: list[str] = []
    arguments: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": columns.get("problem", "")}]],
        "completions": [[{"role": "assistant", "content": response}]],
        "completion_ids": [[0]],
        **{name: [value] for name, value in columns.items()},
        "trainer_state": None,
        "log_extra": lambda name, values: noted.append(f"logged     {name}: {_shown(str(values[0]))}"),
        "log_metric": lambda name, value: noted.append(f"logged     {name}: {value:g}"),
    }
    lines = []
    for entry, function in zip(entries, chosen.functions, strict=True):
        (found,) = call_once(entry, function, arguments, TRY_TIMEOUT_S)
        lines.append(f"reward     {entry} {'None (not scored)' if found is None else format(found, 'g')}")
    return [*lines, *noted]


def _columns(options: argparse.Namespace) -> dict[str, str]:
    """The columns of the row that the response belongs to."""
    columns = {} if options.gold is None else {"answer": options.gold}
    for word in options.column:
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"--column: {word!r} is not NAME=VALUE")
        columns[name] = value
    return columns


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0 done, whatever the verdict; 2 the user's input is wrong."""
    parser = _Parser(prog="python -m adora_vl.rewards.explain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gold", help="the right answer, as a dataset has it")
    parser.add_argument("--response", required=True, help="the whole response; - reads it from standard input")
    parser.add_argument("--choices", nargs="+", metavar="VALUE", help="the values of A, B, C, ...")
    parser.add_argument("--rounding", action="store_true", help="also accept a decimal that is the gold rounded")
    parser.add_argument("--answer-tags", action="store_true", help="also accept <answer>5</answer>, without a box")
    parser.add_argument("--reward", nargs="+", default=[], metavar="FILE.py:FUNCTION", help="as adora_reward")
    parser.add_argument("--reward-options", metavar="JSON", help="as adora_reward_options")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=VALUE", help="a column of the row")
    try:
        options = parser.parse_args(arguments)
        if options.gold is None and not options.reward:
            raise UserError("give --gold to see how the answer is graded, or --reward to try a reward")
        response = sys.stdin.read() if options.response == "-" else options.response
        lines = []
        if options.gold is not None and not (options.reward and all(map(is_own, options.reward))):
            accepted = {"rounding": options.rounding, "answer_tags": options.answer_tags}
            lines = explanation(response, options.gold, options.choices, **accepted)
        if options.reward:
            columns = _columns(options)
            lines += tried(options.reward, response, columns, options.reward_options, options.answer_tags)
        print("\n".join(lines))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was graded", file=sys.stderr)
        return 130  # as in `adora_vl.commands`, which the rewards do not know
    return 0


if __name__ == "__main__":
    sys.exit(main())
