"""Sides of an equation in a sentence: `2x + 1`, `AB * BC / 2`, `area of triangle ABC`, `sin A`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from adora_vl.geometry.draft import (
    POINT_PATTERN,
    SHAPE_PATTERN,
    LogicFormDraft,
    SentenceError,
    make_term,
    polygon_kind,
    split_point_names,
)
from adora_vl.geometry.expressions import ExpressionError, parse_expression
from adora_vl.geometry.logic_form import Term
from adora_vl.utils.errors import did_you_mean

MAX_PARTS = 60  # numbers, measures and signs of one side of an equation
_MAX_BRACKETS = 10  # brackets in brackets; deeper ones are no problem of a school book
_CORNERS = rf"(?:{POINT_PATTERN}){{3,}}"
# Words that say what is measured. A side without one of them and without a point is a value.
_MEASURE_PATTERN = (
    "angle|arc|distance|radius|diameter|circumference|area|perimeter|height|side|scale factor"
    "|sin|cos|tan"
)
_ATOM_PATTERN = re.compile(
    rf"""\s*(?:
    (?P<exterior>exterior\s*angle\s*(?:at\s*)?{POINT_PATTERN}(?!{POINT_PATTERN}))
    |(?P<angle>(?:exterior\s*)?angle\s*(?:{POINT_PATTERN}{POINT_PATTERN}{POINT_PATTERN}|{POINT_PATTERN}|\d+))
    |(?P<distance>distance\s*(?:from\s*|between\s*)?{POINT_PATTERN}\s*(?:and\s*)?(?:{POINT_PATTERN}){{1,2}})
    |(?P<length>length\s*(?:(?:minor|major)\s*)?arc\s*(?:{POINT_PATTERN}){{2,3}})
    |(?P<arc>(?:(?:minor|major)\s*)?arc\s*(?:{POINT_PATTERN}){{2,3}})
    |(?P<trig>(?:sin|cos|tan)\s*(?:angle\s*)?(?:{POINT_PATTERN}{POINT_PATTERN}{POINT_PATTERN}|{POINT_PATTERN}|\d+|[a-z](?![a-z])))
    |(?P<scale>scale\ factor\s*(?:{SHAPE_PATTERN})?\s*{_CORNERS}\s*(?:and\s*)?(?:{SHAPE_PATTERN})?\s*{_CORNERS})
    |(?P<circle>(?:radius|diameter|circumference)(?:\s*circle)?(?:\s*{POINT_PATTERN}(?!{POINT_PATTERN}))?
               |area\s*circle(?:\s*{POINT_PATTERN}(?!{POINT_PATTERN}))?)
    |(?P<sector>area\s*sector\s*(?:{POINT_PATTERN}){{3}})
    |(?P<extent>(?:area|perimeter|height)(?:\s*(?:{SHAPE_PATTERN}|polygon)\b)?(?:\s*{_CORNERS})?)
    |(?P<side>side(?:\s*(?:{SHAPE_PATTERN}|polygon)\b)?(?:\s*{_CORNERS})?(?!\s*{POINT_PATTERN}))
    |(?P<segment>{POINT_PATTERN}{POINT_PATTERN}(?!{POINT_PATTERN}))
    |(?P<number>\d+(?:\.\d+)?|\.\d+|\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}
               |(?:\\?sqrt|√)\s*(?:\{{[^{{}}]*\}}|\([^()]*\)|\d+)|\\?pi|π|[a-z](?![a-z]))
    |(?P<sign>[-+*/^()])
    )""",
    re.VERBOSE,
)
# The known words of the atoms above, to suggest one for a word that is not known.
WORDS = (
    *("exterior", "angle", "length", "minor", "major", "arc", "scale", "factor", "side"),
    *("radius", "diameter", "circumference", "circle", "area", "perimeter", "height", "sector"),
    *("distance", "between"),
    *("sin", "cos", "tan", "sqrt", "pi", "frac"),
    *SHAPE_PATTERN.split("|"),
)


def read_side(draft: LogicFormDraft, text: str) -> Term:
    """Read one side of an equation: a measure, a value, or sums and products of them.

    Shapes and segments that it names are added to the draft. Raises `SentenceError` with the word
    that is not known.
    """
    plain = text.strip()
    if not re.search(POINT_PATTERN, plain) and not re.search(_MEASURE_PATTERN, plain):
        return _read_value(plain)
    pieces = _split_into_pieces(plain)
    if len(pieces) > MAX_PARTS:
        raise SentenceError(f"one side has {len(pieces)} parts, over {MAX_PARTS}")
    return _SideParser(draft, pieces).all()


def check_word(word: str, words: Sequence[str] = WORDS) -> None:
    """Raise `SentenceError` for a word that is not in `words`, with the nearest of them."""
    if word not in words:
        raise SentenceError(f"{word!r} is no word that is known{did_you_mean(word, words)}")


def _read_value(plain: str) -> Term:
    """Read a value of numbers and letters, which stays as it is written.

    Raises `SentenceError` where it is no value, and for a word that is not known.
    """
    for word in re.findall(r"(?<![\\a-z])[a-z]{3,}", plain):
        check_word(word)
    try:
        parse_expression(plain)
    except ExpressionError as error:
        raise SentenceError(str(error)) from None
    return Term(head=plain.replace("√", "\\sqrt"))


def _split_into_pieces(plain: str) -> list[tuple[str, str]]:
    """Split a side into measures, values and signs, each with its kind.

    The kinds are the names of the groups in `_ATOM_PATTERN`. Raises `SentenceError` for anything
    else.
    """
    pieces: list[tuple[str, str]] = []
    position = 0
    while position < len(plain):
        match = _ATOM_PATTERN.match(plain, position)
        if match is None or match.lastgroup is None:
            rest = plain[position:].strip()
            word = re.match(r"[A-Za-z']+", rest)
            if word and word[0].islower():
                check_word(word[0])
            raise SentenceError(f"{rest!r:.40} is no length, angle, area or number")
        pieces.append((match.lastgroup, match[match.lastgroup].strip()))
        position = match.end()
        while position < len(plain) and plain[position].isspace():
            position += 1
    return pieces


class _SideParser:
    """Parses the pieces of one side: sums, products, quotients and squares of measures.

    Each piece is its kind and its text. `next_index` is the index of the piece that is read next,
    and `depth` how deep the brackets are nested.
    """

    def __init__(self, draft: LogicFormDraft, pieces: Sequence[tuple[str, str]]) -> None:
        self.draft = draft
        self.pieces = list(pieces)
        self.next_index = 0
        self.depth = 0

    def peek(self) -> str:
        """Return the next sign, or the kind of the next piece; empty at the end."""
        if self.next_index >= len(self.pieces):
            return ""
        kind, text = self.pieces[self.next_index]
        return text if kind == "sign" else kind

    def all(self) -> Term:
        """Return the term of all pieces. Raises `SentenceError` where some remain."""
        side = self.sum()
        if self.next_index < len(self.pieces):
            raise SentenceError(
                f"{self.pieces[self.next_index][1]!r} stands where nothing can stand"
            )
        return side

    def sum(self) -> Term:
        """Parse products with plus and minus between them.

        Raises `SentenceError` where brackets are nested too deep.
        """
        self.depth += 1
        if self.depth > _MAX_BRACKETS:
            raise SentenceError(f"it has brackets over {_MAX_BRACKETS} deep")
        side = self.product()
        while self.peek() in ("+", "-"):
            head = "Add" if self.pieces[self.next_index][1] == "+" else "Sub"
            self.next_index += 1
            side = make_term(head, side, self.product())
        self.depth -= 1
        return side

    def product(self) -> Term:
        """Parse powers with times, divided by or nothing between them: `2 AB` is a product too."""
        product = self.power()
        while True:
            sign = self.peek()
            if sign in ("*", "/"):
                self.next_index += 1
                head = "Mul" if sign == "*" else "Div"
                product = make_term(head, product, self.power())
            elif sign and sign not in ("+", "-", ")"):
                product = make_term("Mul", product, self.power())
            else:
                return product

    def power(self) -> Term:
        """Parse a measure, a value or a bracket, squared as often as `^2` stands behind it.

        A square binds closer than a product or a minus before it: `2 * AB^2` is twice the square.
        """
        if self.peek() == "-":
            self.next_index += 1
            return make_term("Sub", Term(head="0"), self.power())
        power = self.atom()
        while self.peek() == "^":
            self.next_index += 1
            if self.next_index >= len(self.pieces) or self.pieces[self.next_index][1] != "2":
                raise SentenceError("only squares are known behind ^ here")
            self.next_index += 1
            power = make_term("SquareOf", power)
        return power

    def atom(self) -> Term:
        """Parse a bracket, a measure or a value. Raises `SentenceError` for anything else."""
        if self.next_index >= len(self.pieces):
            raise SentenceError("something is missing behind a sign")
        kind, text = self.pieces[self.next_index]
        self.next_index += 1
        if kind == "sign":
            if text != "(":
                raise SentenceError(f"{text!r} stands where nothing can stand")
            side = self.sum()
            if self.peek() != ")":
                raise SentenceError("a bracket is not closed")
            self.next_index += 1
            return side
        return _READER_BY_ATOM_KIND[kind](self.draft, text)


# Atoms


def _read_angle(draft: LogicFormDraft, text: str) -> Term:
    """Read an angle by its number, its corner or its three points, whose sides are then drawn."""
    name = re.sub(r"^(?:exterior\s*)?angle", "", text).strip()
    if name.isdigit():
        return make_term("MeasureOf", Term(head=f"angle {name}"))
    names = split_point_names(name)
    if len(names) == 3:
        draft.draw_line(names[0], names[1])
        draft.draw_line(names[1], names[2])
    return make_term("MeasureOf", make_term("Angle", *names))


def _read_exterior_angle(draft: LogicFormDraft, text: str) -> Term:
    """Read an exterior angle: what the inner angle at a corner lacks to 180 degrees."""
    corner = split_point_names(text)[-1]
    return make_term("Sub", Term(head="180"), make_term("MeasureOf", make_term("Angle", corner)))


def _read_arc(draft: LogicFormDraft, text: str) -> Term:
    """Read the angle of an arc by its two ends, or by its ends and a point between them."""
    return make_term("MeasureOf", _named_arc(draft, text))


def _read_arc_length(draft: LogicFormDraft, text: str) -> Term:
    """Read how long an arc is: "length of arc AB". An arc without this word is its angle."""
    return make_term("LengthOf", _named_arc(draft, text.removeprefix("length").strip()))


def _named_arc(draft: LogicFormDraft, text: str) -> Term:
    """Return the arc that a text names, such as "minor arc AB", as a term.

    Its ends lie on the only circle. Three letters name the way round already, so that "minor" or
    "major" says nothing more then.
    """
    names = split_point_names(text)
    draft.put_arc_on_circle(names[0], names[-1])
    arc = make_term("Arc", *names)
    size = text.partition("arc")[0].strip()
    return make_term(size.capitalize(), arc) if size and len(names) == 2 else arc


def _read_distance(draft: LogicFormDraft, text: str) -> Term:
    """Read the distance of two points, or of a point from a line: "distance from O to AB"."""
    point, *ends = split_point_names(text)
    if len(ends) == 1:
        return make_term("LengthOf", draft.draw_line(point, ends[0]))
    return make_term("DistanceOf", point, draft.draw_line(ends[0], ends[1]))


def _read_trigonometric(draft: LogicFormDraft, text: str) -> Term:
    """Read the sine, cosine or tangent of an angle or of a letter, such as "sin A"."""
    head = f"{text[:3].capitalize()}Of"
    rest = text[3:].strip()
    if re.fullmatch("[a-z]", rest):
        return make_term(head, rest)
    return make_term(head, _read_angle(draft, rest))


def _read_circle_measure(draft: LogicFormDraft, text: str) -> Term:
    """Read radius, diameter, circumference or area of a circle: "radius O" or "radius" alone."""
    head = re.match("[a-z]+", text)
    assert head is not None, "the pattern begins with a word"
    match = re.search(rf"{POINT_PATTERN}$", text)
    centre = match[0] if match else None
    return make_term(f"{head[0].capitalize()}Of", draft.name_circle(centre))


def _read_shape(draft: LogicFormDraft, text: str) -> Term:
    """Read the shape behind the first word of a measure: "area of triangle ABC".

    Without corners it is the last shape of its kind. A kind that says something of it, as in "area
    of rectangle ABCD", is a fact as well. Raises `SentenceError` for too many corners.
    """
    words = re.findall("[a-z]+", text)
    kind = words[1] if len(words) > 1 else None
    names = split_point_names(text)
    if not names:
        return draft.last_polygon(kind)
    plain_kind = polygon_kind("".join(names))
    if plain_kind == "polygon":
        raise SentenceError(f"{''.join(names)} has more corners than are known")
    if kind in (None, "polygon", plain_kind):
        return draft.draw_polygon(plain_kind.capitalize(), names)
    return draft.add_shape(kind, "".join(names))


def _read_polygon_measure(draft: LogicFormDraft, text: str) -> Term:
    """Read the area, the perimeter or the height of a polygon."""
    shape = _read_shape(draft, text)
    words = {"area": "AreaOf", "perimeter": "PerimeterOf", "height": "HeightOf"}
    return make_term(words[text.split()[0]], shape)


def _read_side_of_polygon(draft: LogicFormDraft, text: str) -> Term:
    """Read the side of a polygon whose sides are all equal: "side of square ABCD".

    Raises `SentenceError` for any other polygon, since it does not say which side is meant.
    """
    shape = _read_shape(draft, text)
    is_special = (
        make_term("Regular", shape) in draft.facts or make_term("Equilateral", shape) in draft.facts
    )
    if shape.head not in ("Square", "Rhombus") and not is_special:
        raise SentenceError("it does not say which side is meant; name its two ends")
    return make_term("LengthOf", draft.draw_line(shape.names[0], shape.names[1]))


def _read_sector(draft: LogicFormDraft, text: str) -> Term:
    """Read the area of a sector: "area of sector AOB" has the centre between its ends."""
    return make_term("AreaOf", make_term("Sector", *split_point_names(text)))


def _read_scale_factor(draft: LogicFormDraft, text: str) -> Term:
    """Read the ratio of the sides of one polygon to those of a similar one."""
    first, second = [split_point_names(names) for names in re.findall(_CORNERS, text)]
    heads = [polygon_kind("".join(names)).capitalize() for names in (first, second)]
    return make_term(
        "ScaleFactorOf", draft.draw_polygon(heads[0], first), draft.draw_polygon(heads[1], second)
    )


def _read_segment(draft: LogicFormDraft, text: str) -> Term:
    """Draw a segment, and read its length. Raises `SentenceError` where both ends are one."""
    start, end = split_point_names(text)
    if start == end:
        raise SentenceError(f"{text} is no segment; it begins where it ends")
    return make_term("LengthOf", draft.draw_line(start, end))


def _read_number(draft: LogicFormDraft, text: str) -> Term:
    """Return a number or a letter as it is written."""
    return Term(head=text.replace("√", "\\sqrt"))


_READER_BY_ATOM_KIND: dict[str, Callable[[LogicFormDraft, str], Term]] = {
    "angle": _read_angle,
    "exterior": _read_exterior_angle,
    "arc": _read_arc,
    "distance": _read_distance,
    "length": _read_arc_length,
    "trig": _read_trigonometric,
    "circle": _read_circle_measure,
    "extent": _read_polygon_measure,
    "side": _read_side_of_polygon,
    "sector": _read_sector,
    "scale": _read_scale_factor,
    "segment": _read_segment,
    "number": _read_number,
}
