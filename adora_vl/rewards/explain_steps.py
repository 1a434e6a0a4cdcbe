"""Explains the reward `steps`: each claim of a response on a figure, with its verdict.

`python -m adora_vl.rewards.explain --figure` prints it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from adora_vl.geometry.checked import CheckedClaim, ClaimVerdict
from adora_vl.geometry.figure import figure_as_json, figure_from_json
from adora_vl.geometry.logic_form import LogicForm, read_form_from_record
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.rewards.steps import ClaimCheck, check_claims
from adora_vl.utils.errors import UserError, describe_error

_WORDS_BY_VERDICT: dict[ClaimVerdict, str] = {
    "new": "true, new",
    "given": "true, given",
    "nothing": "true, nothing new",
    "again": "true, again",
    "false": "false",
    "follows": "false, follows",
    "open": "open",
    "unread": "unread",
}
# What the words mean, for the lines below the claims.
_MEANING_BY_VERDICT: dict[ClaimVerdict, str] = {
    "nothing": "an identity, or arithmetic on what is known",
    "follows": "false because of an earlier false claim; counted once",
    "open": "the facts do not say whether it holds",
    "unread": "not understood; it costs nothing",
}
_VERDICT_WIDTH = max(map(len, _WORDS_BY_VERDICT.values())) + 2


def read_figure_file(path: Path) -> str:
    """Return the solved figure of a file, as a row of data stores it.

    The file has facts in words, a logic form in JSON, or a stored figure. Raises `UserError` where
    the facts determine no figure.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--figure: {str(path)!r} cannot be read ({describe_error(error)})"
        ) from error
    form = _parse_logic_form(text, path)
    if form is None:  # the file has a solved figure already
        return text
    result = solve_form(form, try_repair=False)
    if result.status != "answered" or result.figure is None:
        raise UserError(
            f"--figure: {str(path)!r} has no figure to check claims on: {result.status}, "
            f"{result.why}; `python -m data_prep solve {path}` says more"
        )
    return figure_as_json(result.figure)


def _parse_logic_form(text: str, path: Path) -> LogicForm | None:
    """Return the form that a file has; None where it has a stored figure. Raises `UserError`."""
    if not text.lstrip().startswith("{"):
        return read_form_from_text(text)
    try:
        record = json.loads(text)
        if "at" in record:  # a stored figure: it has the coordinates of its points under this key
            figure_from_json(text)
            return None
        return read_form_from_record(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--figure: {str(path)!r} is neither facts in words nor a logic form nor a stored "
            f"figure ({describe_error(error)})"
        ) from error


def step_lines(response: str, figure: str) -> list[str]:
    """Return a line for each claim of a response, and what the reward `steps` gives for it."""
    check = check_claims(response, figure)
    lines = [_claim_line(claim) for claim in check.claims]
    if not lines:
        lines.append("no claim on the figure")
    verdicts = {claim.verdict for claim in check.claims}
    lines += [
        f"  {_WORDS_BY_VERDICT[name]}: {meaning}"
        for name, meaning in _MEANING_BY_VERDICT.items()
        if name in verdicts
    ]
    return [*lines, _summary_line(check)]


def _claim_line(checked_claim: CheckedClaim) -> str:
    """Return the line of a claim: its verdict, its words, and whether it is the answer itself."""
    words = " ".join(checked_claim.claim.words.split())
    is_right_answer = checked_claim.is_answer and checked_claim.is_true
    mark = "   (the answer itself, no step)" if is_right_answer else ""
    return f"{_WORDS_BY_VERDICT[checked_claim.verdict]:<{_VERDICT_WIDTH}}{words}{mark}"


def _summary_line(check: ClaimCheck) -> str:
    """Return the line with the reward, and how many claims are new, false or unread."""
    counts = Counter(claim.verdict for claim in check.claims)
    return (
        f"steps {check.reward:.3g}   new {check.new_count}, false {check.false_count}, "
        f"unread {counts['unread']}, of {len(check.claims)} claims"
    )
