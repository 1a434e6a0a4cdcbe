"""Whether two answers are the same, by their types: the rules of numbers, expressions, texts, lists
and relations.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from adora_vl.rewards.answer import (
    NO_VALUE,
    UNREAD,
    Answer,
    amount,
    in_radians_or_degrees,
    in_unit,
    plain,
)
from adora_vl.rewards.canonical import NAMED_VALUE
from adora_vl.rewards.figures import in_one_spelling
from adora_vl.rewards.forms import as_form, bare, working
from adora_vl.rewards.grammar import NotReadError, Tree, in_radians, read_formula, unknowns
from adora_vl.rewards.numeric import factor_between, same_function, same_number
from adora_vl.rewards.solutions import same_solutions
from adora_vl.rewards.units import RADIANS

Verdict = Literal["correct", "wrong", "unparseable"]
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+))?")
_DECIMAL_COMMA = re.compile(r"[^,;0-9]*[0-9]+,(?![0-9]{3}(?![0-9]))[0-9]+[^,;]*")
_THOUSANDS_TOO = re.compile(r"[+-]?[0-9]{1,3}(?:[. ][0-9]{3})+,[0-9]+")  # `1.234,5`
_NEARLY = re.compile(r"(?:\\approx(?![A-Za-z])|≈)([^=<>≈]+)")
_FEW_LETTERS = re.compile("[a-z]{2,3}")
_RIGHT_ANGLED = re.compile(r"(?<![A-Za-z])right[- ]?angled(?= ?triangle)")
_OVERLINED = re.compile(r"\\overline\{([A-Z](?: ?[A-Z])*)\}")
_CAPITALISED = re.compile(r"(?<![A-Za-z\\])[A-Z][a-z]+(?![A-Za-z])")
_BETWEEN_LETTERS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
# A reference answer that is rounded itself, as 0.5 need not be.
_ROUNDED = re.compile(r"-?(?=(?:\.?[0-9]){3,})[0-9]+\.[0-9]+")
_IN_DIGITS = re.compile(r"[+-]?[0-9]*\.?[0-9]+")
_UNIT_LETTER = re.compile(r"([+-]?[0-9.]*[0-9]) ?([hgLl])")  # beside a quantity, no unknown


@dataclass(frozen=True)
class Pair:
    """How one part of an answer was compared with its part of the reference answer; `-` where there
    is none.
    """

    answer: str
    reference: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """The verdict on two answers, the rule that decided, and the parts of a form."""

    verdict: Verdict
    reason: str
    pairs: tuple[Pair, ...] = ()


def compare(answer: Answer, reference: Answer, rounding: bool = False) -> Compared:
    """The verdict on an answer from `plain`; where `reference`, from `read`, is a form, it is read
    as one, too.

    `rounding`: a decimal may be the reference answer rounded.
    """
    if reference.is_form:
        return _same_form(as_form(answer), as_form(reference), rounding)
    if reference.kind == "unreadable" and reference.reason != "not_read":
        return Compared("wrong", f"gold_{reference.refusal or reference.reason}")
    if reference.kind == "number" and answer.reason in {"equation", "relation"}:
        chain = working(answer.whole)
        if len(chain) > 1 or (chain and chain[0][0] == "="):
            return _same_chain(chain, reference)
    return _same_value(_as_value(answer, reference), _measured(reference, answer), rounding)


def _same_chain(chain: Sequence[tuple[str, Answer]], reference: Answer) -> Compared:
    r"""Right if all numbers of a chain are the reference answer.

    An approximation has to be so to its digits, and what stands before one to those of a reference
    answer in digits: `20\sqrt{3} \approx 34.64`.
    """
    rounded = "." in reference.text and any(sign == "~" for sign, _ in chain)
    sure = False
    for sign, value in chain:
        worked_out = replace(value, real=value.real and replace(value.real, unevaluated=False))
        found = _same_value(worked_out, reference, False)
        sure = sure or found.verdict == "correct"
        near = sign == "~" and reference.real and _is_rounded(value.text, reference.real.value)
        near = near or (
            rounded and sign != "~" and value.real and _is_rounded(reference.text, value.real.value)
        )
        if found.verdict != "correct" and (not near or found.reason == "different_unit"):
            return (
                Compared("wrong", "chain_differs") if found.reason == "different_number" else found
            )
    return Compared("correct", "same_number") if sure else Compared("wrong", "chain_differs")


def _as_value(answer: Answer, reference: Answer) -> Answer:
    r"""The value in `y = 2x + 1` and `|AB| = 5`, and in `x \approx 5` for a reference answer in
    digits, else itself.
    """
    value = answer
    label = answer.whole.partition("=")[0] if "=" in answer.raw else ""
    if answer.reason == "enumeration" and reference.real:
        grouped = _THOUSANDS_TOO.fullmatch(answer.text)
        if grouped or _DECIMAL_COMMA.fullmatch(answer.text):
            text = re.sub("[. ]", "", answer.text) if grouped else answer.text
            return replace(plain(text.replace(",", ".")), unit=answer.unit)
    answer = value = _measured(answer, reference)
    if answer.reason in NO_VALUE and answer.kind != "percentage":
        match = NAMED_VALUE.fullmatch(answer.whole)
        nearly = _NEARLY.fullmatch(answer.whole)
        in_digits = _IN_DIGITS.fullmatch(reference.text)
        if nearly and in_digits and _ROUNDED.fullmatch(reference.text):
            return plain(nearly[1])
        if not match or (match[2] != "=" and not in_digits):
            return answer
        label = match[1]
        value = plain(match[3])
    names_itself = value.kind == "expression" and (
        label == value.text or label in unknowns(value.tree or ())
    )
    return Answer("unreadable", answer.text, "equation") if names_itself else value  # f(x) = f(x)


def _measured(one: Answer, other: Answer) -> Answer:
    """`5 L` as litres beside a quantity, else itself."""
    letter = _UNIT_LETTER.fullmatch(one.whole) if other.unit and not one.unit else None
    return plain(rf"{letter[1]}\text{{{letter[2]}}}") if letter else one


def _same_value(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    unit = answer.unit
    if unit and reference.unit:
        dimension = reference.unit.dimension
        if {unit.dimension, dimension} == {"angle", RADIANS}:
            answer = in_radians_or_degrees(answer, dimension)
        elif unit.dimension == dimension:
            answer = in_unit(answer, reference.unit)
        else:
            return Compared("wrong", "different_unit")
    elif unit and unit.dimension == RADIANS and not _may_be_radians(answer):
        return Compared("wrong", "different_unit")
    by_text = answer.kind in {"text", "expression", "percentage"} or answer.reason == "not_read"
    if by_text and _same_text(answer.text, reference.text):
        return Compared("correct", "same_text")
    if reference.real is None and reference.ratio:
        return _same_ratio(answer, reference)
    answer = amount(answer)
    reference = amount(reference)
    if not answer.is_value:
        return Compared("unparseable" if answer.reason in UNREAD else "wrong", answer.reason)
    if (answer.kind == "percentage") != (reference.kind == "percentage"):
        return Compared("wrong", "percentage" if answer.kind == "percentage" else "different_text")
    given = answer.real
    wanted = reference.real
    if given and given.unevaluated and not (wanted and wanted.unevaluated):
        return Compared("wrong", "unevaluated")
    if given and wanted:
        same = same_number(given, wanted)
        if not same and rounding and "." in answer.text and _is_rounded(answer.text, wanted.value):
            return Compared("correct", "rounded")
        if same is None:
            return Compared("unparseable", "undecided")
        return Compared("correct", "same_number") if same else Compared("wrong", "different_number")
    formula = _formula_of(reference, answer)
    if formula and not (answer.tree and reference.tree and _same_names(answer, reference)):
        return _same_formula(answer, formula)
    if not answer.tree or not reference.tree:
        return Compared("wrong", answer.reason or "different_text")
    if unknowns(answer.tree) != unknowns(reference.tree):
        return Compared(
            "wrong", "different_expression" if unknowns(reference.tree) else "not_a_number"
        )
    found = same_function(answer.tree, reference.tree)
    if found == "equal":
        return Compared("correct", "same_value")
    return (
        Compared("wrong", "different_expression")
        if found == "different"
        else Compared("unparseable", found)
    )


def _same_ratio(answer: Answer, reference: Answer) -> Compared:
    r"""The verdict where the reference answer is a ratio of numbers: its terms may have a common
    factor, and one of two terms may be their quotient, `\frac{3}{4}` for `3:4`.
    """
    terms = answer.ratio
    wanted = reference.ratio
    if answer.kind == "number" and answer.real and len(wanted) == 2:
        same = not answer.real.unevaluated and same_number(answer.real, wanted[0] / wanted[1])
        return Compared("correct", "same_ratio") if same else Compared("wrong", "different_number")
    if len(terms) != len(wanted):
        return Compared("wrong", answer.reason or "different_text")
    try:
        pairs = zip(terms[1:], wanted[1:], strict=True)
        same = all(same_number(terms[0] / term, wanted[0] / other) for term, other in pairs)
    except NotReadError:
        return Compared("wrong", "different_number")
    return Compared("correct", "same_ratio") if same else Compared("wrong", "different_number")


def _formula_of(reference: Answer, answer: Answer) -> Tree | None:
    r"""The tree of a reference answer that is a formula of quantities, else None.

    Letters by themselves, such as `ab`, are one where the answer multiplies: `a \cdot b`.
    """
    if reference.kind not in {"text", "expression"}:
        return None
    text = reference.text
    if _FEW_LETTERS.fullmatch(text) and r"\cdot" in answer.text:
        text = f"1{text}"
    tree = read_formula(text)
    return tree if tree is not None and unknowns(tree) else None


def _same_names(answer: Answer, reference: Answer) -> bool:
    return unknowns(answer.tree or ()) == unknowns(reference.tree or ())


def _same_formula(answer: Answer, reference: Tree) -> Compared:
    r"""The verdict where the reference answer is a formula, in which letters side by side are
    multiplied.
    """
    tree = answer.tree
    if answer.kind in {"text", "expression"}:
        tree = read_formula(answer.text) or answer.tree
    if tree is None or unknowns(tree) != unknowns(reference):
        return Compared("wrong", "different_expression" if tree else answer.reason)
    found = same_function(tree, reference)
    if found in {"equal", "different"}:
        same = found == "equal"
        return (
            Compared("correct", "same_value") if same else Compared("wrong", "different_expression")
        )
    return Compared("unparseable", found)


def _may_be_radians(answer: Answer) -> bool:
    """Whether an angle without a unit in the reference answer can be meant: it has pi in it, or is
    less than a whole turn. 30 radians are no 30.
    """
    if answer.tree is None:
        return False
    return in_radians(answer.tree) or (answer.real is not None and answer.real.size < 2 * math.pi)


def _same_text(answer: str, reference: str) -> bool:
    """Whether two canonical texts are the same but for spaces, capital letters of words, and the
    name that a figure has.
    """
    if answer == reference:
        return True
    return _in_one_spelling(answer) == _in_one_spelling(reference)


def _in_one_spelling(text: str) -> str:
    text = in_one_spelling(text)
    if "angled" in text:
        text = _RIGHT_ANGLED.sub("right", text)
    return unspaced(text)


def unspaced(text: str) -> str:
    r"""`text` without the spaces between letters: `A B` and `\overline{AB}` are the side `AB`.

    Those between digits tell numbers apart.

    A word counts the same with a capital letter: `True` is `true`, while the side `AB` is not `ab`.
    """
    if "\\" in text:
        text = _OVERLINED.sub(r"\1", text)
    text = _CAPITALISED.sub(lambda word: word[0].lower(), text)
    return _BETWEEN_LETTERS.sub("", text) if " " in text else text


def _is_rounded(text: str, reference: Any) -> bool:
    """Whether `text` is a decimal with places, and equals the reference rounded half up to as many
    of them.
    """
    match = _DECIMAL.fullmatch(text)
    if not match or text in {"", "+", "-"}:
        return False
    scale = 10 ** len(match[1] or "")
    rounded = (int(abs(reference) * scale * 2) + 1) // 2
    return bool(Fraction(text) * scale == (rounded if reference >= 0 else -rounded))


def _same_form(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    if answer.kind == "unreadable":
        return Compared(
            "unparseable" if answer.reason in UNREAD else "wrong", answer.refusal or answer.reason
        )
    if "(" in answer.label or "(" in reference.label:
        function = _as_function(answer, reference)
        reference = _as_function(reference, answer)
        answer = function
    kinds = answer.kind, reference.kind
    # their names may differ: `W(n) = 1` and `W(x) = 1`
    functions = "(" in reference.label and "(" in answer.label
    decoration = reference.is_value or functions or kinds == ("equation", "equation")
    if (
        reference.label
        and answer.label
        and not decoration
        and bare(answer.label) != bare(reference.label)
    ):
        return Compared(
            "wrong", "different_label", (Pair(answer.label, reference.label, "different_label"),)
        )
    if reference.kind == "ordered" and reference.brackets == "()" and not reference.label:
        point = _point(answer, len(reference.parts))
        answer = point or answer
        if answer.kind == "expression" and answer.tree:
            return _same_vector(answer, reference)
    if reference.kind == "unordered" and answer.kind == "text" and not answer.label:
        answer = _letters(answer, reference)
    if answer.solution and reference.solution and kinds != ("ordered", "ordered"):
        same = same_solutions(answer.solution, reference.solution)
        return (
            Compared("correct", "same_solutions")
            if same
            else Compared("wrong", "different_solutions")
        )
    if reference.kind == "equation" and answer.is_value and reference.parts and not answer.label:
        return _same_form(answer, reference.parts[0], rounding)
    if reference.kind == "unordered":
        return _same_list(answer, reference, rounding)
    if answer.is_value and reference.is_value:
        found = _same_value(answer, reference, rounding)
        return Compared(
            found.verdict, found.reason, (Pair(_shown(answer), _shown(reference), found.reason),)
        )
    if answer.kind != reference.kind:
        return Compared("wrong", "different_form")
    if reference.kind in {"equation", "inequality"}:
        return _same_relations(answer, reference)
    if len(reference.parts) == 2 and answer.brackets != reference.brackets:
        return Compared("wrong", "different_brackets")
    return _in_order(answer, reference, rounding)


_OF_X = re.compile(r"[A-Za-z]\(([a-z])\)")


def _as_function(answer: Answer, other: Answer) -> Answer:
    """What is said of `f(x)` or `y` where the other answer says it of `y` or `f(x)`: its value."""
    mine = _OF_X.fullmatch(bare(answer.label))
    theirs = _OF_X.fullmatch(bare(other.label))
    if mine and mine[1] not in unknowns(answer.tree or ()):
        return answer
    if mine and bare(other.label) == "y" and other.kind == "equation":
        return replace(answer, label="")
    if theirs and bare(answer.label) == "y" and answer.kind == "equation" and answer.parts:
        if theirs[1] not in unknowns(answer.parts[0].tree or ()):
            return answer
        return replace(answer.parts[0], label=other.label)
    return answer


def _point(answer: Answer, dimensions: int) -> Answer | None:
    """`x = 3, y = -4` as the point `(3, -4)`; None for anything else."""
    if answer.kind != "unordered" or answer.label:
        return None
    names = [bare(part.label) for part in answer.parts]
    axes = list("xyz")[:dimensions]
    if sorted(names) != axes:
        return None
    parts = [answer.parts[names.index(axis)] for axis in axes]
    if not all(part.is_value for part in parts):
        return None
    return replace(
        answer,
        kind="ordered",
        parts=tuple(replace(part, label="") for part in parts),
        brackets="()",
        solution=None,
    )


def _same_vector(answer: Answer, reference: Answer) -> Compared:
    r"""The verdict on `3\mathbf{i} + 4\mathbf{j}` for `(3, 4)`."""
    axes = "ijk"[: len(reference.parts)]
    numbers = [part.tree for part in reference.parts if part.real]
    if len(numbers) != len(axes) or not unknowns(answer.tree or ()) <= set(axes):
        return Compared("wrong", "different_form")
    terms = [
        (1, ("product", ("*", number), ("*", ("unknown", axis))))
        for number, axis in zip(numbers, axes, strict=True)
    ]
    same = same_function(answer.tree or (), ("sum", *terms)) == "equal"
    return Compared("correct", "same_value") if same else Compared("wrong", "different_expression")


def _letters(answer: Answer, reference: Answer) -> Answer:
    """`AC` as the two letters of a list of letters, such as `A, C`; else the answer itself."""
    letters = answer.text.replace(" ", "")
    alone = all(re.fullmatch("[A-Z]", part.text) and not part.label for part in reference.parts)
    if not alone or not re.fullmatch("[A-Z]{2,}", letters) or len(set(letters)) < len(letters):
        return answer
    return replace(answer, kind="unordered", parts=tuple(plain(letter) for letter in letters))


def _shown(answer: Answer) -> str:
    return f"{answer.label}={answer.text}" if answer.label and answer.is_value else answer.text


def _same_list(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """The verdict where the reference answer is a list or set.

    A tuple of names or for names is in their order.
    """
    labels = [part.label for part in reference.parts]
    if answer.brackets == "()" and any(labels):
        by_name = all(part.label for part in answer.parts)
        return (_in_any_order if by_name else _in_order)(answer, reference, rounding)
    if answer.is_value and len(reference.parts) == 1:
        return _same_form(answer, reference.parts[0], rounding)
    if answer.kind != "unordered":
        return Compared("wrong", "different_form")
    if not all(labels) or any(part.label for part in answer.parts):
        return _in_any_order(answer, reference, rounding)
    if answer.label:  # AB = 4, 5 for AB = 4, CD = 5
        return Compared("wrong", "different_label")
    return _in_order(answer, reference, rounding)


def _in_order(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    pairs = []
    if _other_names(answer, reference):
        return Compared("wrong", "different_label")
    for given, wanted in zip(answer.parts, reference.parts, strict=True):
        found = _same_form(given, wanted, rounding)
        pairs.append(Pair(_shown(given), _shown(wanted), found.reason))
        if found.verdict != "correct":
            return Compared(found.verdict, "different_part", tuple(pairs))
    return Compared("correct", "same_parts", tuple(pairs))


def _other_names(answer: Answer, reference: Answer) -> bool:
    """Whether parts are named in another order, or all by the name of one.

    Where nothing has a name, x is before y.
    """
    names, wanted = ([bare(part.label) for part in side.parts] for side in (answer, reference))
    order = wanted if any(wanted) else list("xyz")
    places = [order.index(name) for name in names if name and name in order]
    return places != sorted(places) or (answer.label != "" and bare(answer.label) in wanted)


def _in_any_order(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Each part of the answer with one of the reference answer, by name where both have names."""
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    by_label = all(part.label for part in reference.parts)
    left = list(reference.parts)
    pairs: list[Pair] = []
    for given in answer.parts:
        named = [one for one in left if not by_label or bare(given.label) == bare(one.label)]
        found = next(
            (one for one in named if _same_form(given, one, rounding).verdict == "correct"), None
        )
        if found is None:
            return Compared(
                "wrong", "different_part", (*pairs, Pair(_shown(given), "-", "different_part"))
            )
        left.remove(found)
        pairs.append(Pair(_shown(given), _shown(found), "same_part"))
    return Compared("correct", "same_parts", tuple(pairs))


def _same_relations(answer: Answer, reference: Answer) -> Compared:
    """Each relation of the answer is one of the reference answer, but for a factor, which keeps the
    sign of `<`.
    """
    if len(answer.relations) != len(reference.relations):
        return Compared("wrong", "different_form")
    left = list(reference.relations)
    for sign, tree in answer.relations:
        for one in left:
            same_names = unknowns(tree) == unknowns(one[1])
            factor = factor_between(tree, one[1]) if sign == one[0] and same_names else 0
            if factor > 0 or (factor and sign in {"=", "!="}):
                left.remove(one)
                break
        else:
            return Compared("wrong", f"different_{reference.kind}")
    return Compared("correct", f"same_{reference.kind}")
