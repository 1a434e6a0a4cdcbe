"""Makes rows of problems whose facts determine their answers.

A row has the question in words, the answer of the solver, and the redrawn figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from adora_vl.conversion.columns import PRESETS
from adora_vl.conversion.pipeline import SplitRows
from adora_vl.conversion.problem import RawProblem
from adora_vl.data.images import png_bytes
from adora_vl.geometry.exact import rounded
from adora_vl.geometry.expressions import number_of
from adora_vl.geometry.figure import Verdict, written
from adora_vl.geometry.forms import Form, points_of
from adora_vl.geometry.shapes import terms_of
from adora_vl.geometry.verdict import verdict
from adora_vl.utils.cli import amount
from data_prep.logic_forms import facts_in_words
from data_prep.question_words import question_in_words
from data_prep.redraw import can_be_drawn, draw_form

if TYPE_CHECKING:
    from datasets import Features

SOLVED = "geometry3k, solved"  # the source of such rows
ROUND = "Round to the nearest hundredth."
_FIRST_TEST = 2401  # Geometry3K's numbers from here on are its test split
# A label counts as the value where it was rounded as books round: by so much, or by this share.
_ROUNDING = 0.06
_ROUNDING_SHARE = 0.006


@dataclass(frozen=True)
class Text:
    """A problem's wording and label, from a table."""

    split: str
    problem: str
    answer: str


def features_with_figure() -> Features:
    """Return the schema with the columns `facts` and `figure` behind it."""
    return replace(
        PRESETS["geometry3k"].columns, extras=(("facts", "facts"), ("figure", "figure"))
    ).features


def solved_problems(
    forms: Mapping[str, Form], texts: Mapping[str, Text] | None
) -> dict[str, SplitRows]:
    """Return the rows of all forms that the facts determine, by split.

    Says how many are left out, and why.

    Without `texts` the question of the form is put into words, and the split goes by Geometry3K's
    numbers. With them a label that the facts contradict is refused when its row is read.
    """
    readers_by_split: dict[str, list[Callable[[], RawProblem]]] = {}
    left_out: Counter[str] = Counter()
    chosen = dict(forms)
    if texts is not None:
        chosen = {name: form for name, form in forms.items() if name in texts}
    # Names are numbers without leading zeros, so that the longer one is the larger.
    ordered = sorted(chosen.items(), key=lambda item: (len(item[0]), item[0]))
    for name, form in tqdm(ordered, desc="solve", unit="form", disable=None):
        text = texts[name] if texts is not None else _text_of(name, form)
        result = verdict(form, looks=False, repair=False)
        if result.status != "answered":
            left_out[f"are {result.status}"] += 1
            continue
        if text is None or not can_be_drawn(drawable(form, result)):
            left_out["cannot be put into words or drawn"] += 1
            continue
        if not shows_what_is_asked(form):
            left_out["ask for a point that the picture does not have"] += 1
            continue
        read_row = partial(_row, name, form, text, result)
        readers_by_split.setdefault(text.split, []).append(read_row)
    for reason, count in sorted(left_out.items()):
        print(f"{amount(count, 'problem')} left out: they {reason}")
    return {
        split: SplitRows(partial(iter, readers), len(readers))
        for split, readers in readers_by_split.items()
    }


def solved_figure(form: Form) -> str | None:
    """Return the figure of a form whose facts determine its answer, as it is stored.

    None for any other form.
    """
    result = verdict(form, looks=False, repair=False)
    if result.status != "answered" or result.figure is None:
        return None
    return written(result.figure)


def drawable(form: Form, result: Verdict) -> Form:
    """Return the form with its own places, or with those of its figure.

    The figure's are taken where some point of the form has no place.
    """
    if can_be_drawn(form) or result.figure is None:
        return form
    return replace(form, points={name: (x, -y) for name, (x, y) in result.figure.at.items()})


def shows_what_is_asked(form: Form) -> bool:
    """Return whether all points that the question names stand in the picture."""
    drawn_points = {name for row in form.rows for name in row}
    drawn_points |= {
        name for (centre, _), points in form.rounds.items() for name in (centre, *points)
    }
    question_points = {name for term in terms_of(form.question) for name in points_of(term)}
    return question_points <= drawn_points


def _text_of(name: str, form: Form) -> Text | None:
    """Return the question of a form in words, without a label; None where it has no words.

    The split goes by the number of the problem, which `name` is.
    """
    problem = question_in_words(form)
    if problem is None:
        return None
    is_test = name.isdecimal() and int(name) >= _FIRST_TEST
    return Text(split="test" if is_test else "train", problem=problem, answer="")


def _row(name: str, form: Form, text: Text, result: Verdict) -> RawProblem:
    """Return one row, with the picture redrawn.

    Raises `RowError` where its label is another than the facts give.
    """
    assert result.value is not None, "it is answered"
    problem, answer = with_rounding(text.problem, result)
    row_id = f"geometry3k/{text.split}/{name}"
    facts = facts_in_words(form, problem)
    raw = RawProblem(
        id=row_id,
        split=text.split,
        source=SOLVED,
        origin=f"problem {name}",
        images=(png_bytes(draw_form(drawable(form, result))),),
        problem=problem,
        answer=answer if not text.answer else text.answer,
        extras={
            "facts": facts,
            "figure": written(result.figure) if result.figure is not None else None,
        },
        notes={} if facts else {"no_facts": row_id},
    )
    label = number_of(text.answer) if text.answer else None
    if label is not None and abs(label - result.value) > max(
        _ROUNDING, _ROUNDING_SHARE * abs(label)
    ):
        wrong = f"the label is {text.answer!r:.60}, and the facts of its diagram give {answer}"
        raise raw.refuse("other_answer", wrong, "correct the label or the facts of")
    return raw


def with_rounding(problem: str, result: Verdict) -> tuple[str, str]:
    """Return the text of a problem, and its answer.

    An answer without a short form is rounded, and the text then asks for that.
    """
    assert result.value is not None, "it is answered"
    if result.answer is not None:
        return problem, result.answer
    # `Round ...` or `round ...`: the question says already how its answer is rounded.
    if "ound to the nearest" not in problem:
        problem = f"{problem} {ROUND}"
    return problem, rounded(result.value, 2)
