"""The text form: facts as a teacher writes them, one a sentence, become a form.

    triangle ABC
    AB = 5, BC = 7, angle ABC = 40
    D on AC, BD bisects angle ABC
    find AD

Points are capital letters. Without places the order comes from words: D on AC lies between A and C,
and the corners of a named shape go round. `A at 120, 56` gives a place, in pixels with y downwards,
as a screenshot has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from adora_vl.geometry.expressions import ExpressionError, parsed
from adora_vl.geometry.forms import Form, Point, Term
from adora_vl.geometry.shapes import CORNERS
from adora_vl.utils.errors import UserError, did_you_mean

MAX_TEXT = 20_000  # characters
MAX_PARTS = 60  # numbers, measures and signs of one side of an equation
_P = r"[A-Z]'?"
_SEGMENT = rf"({_P})({_P})"
_NAMES = rf"((?:{_P}){{3,}})"
_SHAPES = "|".join(name.lower() for name in CORNERS)
_PLACE = r"(-?\d+(?:\.\d+)?)"
# Signs and other spellings, by the words of the grammar below.
_SPELLINGS = (
    (r"\\?°|\\circ|\^\s*\{?\\circ\}?|\bdegrees?\b", ""),
    (r"[∠∡]|\\angle\b|\bm\s*∠|\bm\s+(?=angle\b)", " angle "),
    (r"\\?⌒|\\widehat", " arc "),
    (r"\|\||[∥]|\\parallel\b", " parallel "),
    (r"[⊥]|\\perp\b", " perpendicular "),
    (r"[≅]|\\cong\b", " congruent "),
    (r"[~∼]|\\sim\b", " similar "),
    (r"[△]|\\triangle\b", " triangle "),
    (r"[⊙]|\\odot\b", " circle "),
    (r"[·×]|\\cdot\b|\\times\b", "*"),
    (r"−", "-"),
    (r"\bequals\b", "="),
    (r"\b(?:is|are|the|to|of|lies|lie|segments?|lines?|point)\b", " "),
    (r"\b(?:a|an)\s+(?=[a-z]{3})", " "),
    (r"\s+", " "),
)


@dataclass
class _Draft:
    """The form so far."""

    facts: list[Term] = field(default_factory=list)
    question: list[Term] = field(default_factory=list)
    lines: dict[tuple[str, str], None] = field(default_factory=dict)
    circles: dict[str, list[str]] = field(default_factory=dict)
    places: dict[str, Point] = field(default_factory=dict)

    def line(self, start: str, end: str) -> Term:
        """The segment between two points, which is drawn."""
        if (end, start) not in self.lines and start != end:
            self.lines[start, end] = None
        return term("Line", start, end)

    def polygon(self, head: str, names: Sequence[str]) -> Term:
        """A shape with these corners, whose sides are drawn."""
        for i in range(len(names)):
            self.line(names[i - 1], names[i])
        return term(head, *names)

    def circle(self, centre: str | None) -> Term:
        """The circle with this centre; without a centre the only one. Raises `_NotReadError`."""
        if centre is None:
            if len(self.circles) != 1:
                raise _NotReadError("it does not say which circle is meant; name its centre")
            centre = next(iter(self.circles))
        self.circles.setdefault(centre, [])
        return term("Circle", centre)

    def on_circle(self, point: str, centre: str | None) -> Term:
        """The fact that a point lies on a circle, which then has it."""
        circle = self.circle(centre)
        name = circle.names[0]
        if point not in self.circles[name]:
            self.circles[name].append(point)
        return term("PointLiesOnCircle", point, term("Circle", name, "radius_0_0"))


class _NotReadError(ValueError):
    """A sentence is not one of the grammar."""


def term(head: str, *arguments: str | Term) -> Term:
    """A term with arguments that are names or terms."""
    parts = tuple(Term(head=part) if isinstance(part, str) else part for part in arguments)
    return Term(head=head, arguments=parts)


def form_of_text(text: str) -> Form:
    """Read facts and a question.

    Raises `UserError` with the line and the sentence that cannot be read.
    """
    if len(text) > MAX_TEXT:
        raise UserError(f"facts: the text has {len(text)} characters, over {MAX_TEXT}")
    draft = _Draft()
    for number, sentence in _sentences(text):
        try:
            _read(draft, sentence)
        except _NotReadError as error:
            raise UserError(f"facts: line {number}, {sentence!r:.80}: {error}") from None
    if not draft.question:
        raise UserError("facts: nothing is asked; add a line such as 'find AC' or 'find x'")
    return Form(
        lines=tuple(draft.lines),
        circles=tuple(draft.circles),
        points=dict(draft.places),
        facts=tuple(str(fact) for fact in draft.facts),
        question=tuple(str(goal) for goal in draft.question),
    )


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences with the numbers of their lines: between points, semicolons, commas and ends of
    lines.

    A comma inside a list of points or a place ends none; what stands behind `#` is a remark.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        waiting = ""
        for part in re.split(r"[,;]|\.(?!\d)", line.split("#")[0]):
            piece = part.strip()
            if not piece:
                continue
            goes_on = bool(re.fullmatch(rf"{_P}|(?:and )?{_P}|{_PLACE}", piece)) and bool(waiting)
            lists_points = bool(re.fullmatch(rf"{_P}(?:, {_P})*", waiting))
            if goes_on or lists_points:
                waiting = f"{waiting}, {piece}"
                continue
            if waiting:
                yield number, waiting
            waiting = piece
        if waiting:
            yield number, waiting


def _read(draft: _Draft, sentence: str) -> None:
    """Take a sentence into the draft by the first pattern that fits. Raises `_NotReadError`."""
    # A point is one capital letter, so a longer word with a capital begins a sentence.
    plain = re.sub(r"\b[A-Z][a-z]{2,}", lambda word: word[0].lower(), sentence)
    plain = re.sub(rf"^\s*in (?=(?:{_SHAPES}|circle)\b)", "", plain, flags=re.IGNORECASE)
    for pattern, spelled in _SPELLINGS:
        plain = re.sub(pattern, spelled, plain)
    plain = plain.strip()
    for pattern, build in _GRAMMAR:
        match = re.fullmatch(pattern, plain)
        if match:
            build(draft, *match.groups())
            return
    if "=" in plain:
        _equation(draft, plain)
        return
    raise _NotReadError(_what_is_wrong(sentence, plain))


def _what_is_wrong(sentence: str, plain: str) -> str:
    """Say which word of a sentence is not known, or that the sentence as a whole is none."""
    for word in re.findall(r"[a-z]{2,}", plain):
        if word not in _WORDS:
            return f"{word!r} is no word that is known{did_you_mean(word, _WORDS)}"
    return (
        "this is no fact that is known; facts are such as AB = 5, angle ABC = 40, D on AC, AB "
        "parallel CD"
    )


def _kind_of(names: str) -> str:
    """What a shape with these corners is called that has no other name."""
    kinds = ("triangle", "quadrilateral", "pentagon", "hexagon", "heptagon", "octagon")
    count = len(_split(names))
    return kinds[count - 3] if 3 <= count <= 8 else "polygon"


def _split(names: str) -> list[str]:
    """The points of a name such as `ABC`."""
    return re.findall(_P, names)


# Facts


def _shape(draft: _Draft, kind: str, names: str) -> None:
    """A shape with all its corners named, such as `rectangle ABCD`."""
    corners = _split(names)
    head = kind.capitalize()
    if len(corners) != CORNERS[head] or len(set(corners)) != len(corners):
        raise _NotReadError(
            f"a {kind} has {CORNERS[head]} corners, and {names} names {len(set(corners))}"
        )
    draft.facts.append(draft.polygon(head, corners))


def _special(draft: _Draft, adjective: str, kind: str, names: str) -> None:
    """A shape of a special kind, such as `regular hexagon ABCDEF`."""
    corners = _split(names)
    head = "Polygon" if kind == "polygon" else kind.capitalize()
    corner_count = CORNERS.get(head, len(corners))
    if len(corners) != corner_count or len(set(corners)) != len(corners):
        raise _NotReadError(
            f"a {kind} has {corner_count} corners, and {names} names {len(set(corners))}"
        )
    if (
        head == "Triangle"
        and adjective in ("isosceles", "right")
        and not set(corners) <= draft.places.keys()
    ):
        example = (
            f"{names[0]}{names[1]} = {names[0]}{names[2]}"
            if adjective == "isosceles"
            else f"angle {names} = 90"
        )
        draft.polygon(head, corners)
        raise _NotReadError(
            f"it does not say which parts of {names} are meant; write such as {example}"
        )
    draft.facts.append(term(adjective.capitalize(), draft.polygon(head, corners)))


def _shape_behind(draft: _Draft, names: str, kind: str) -> None:
    """A shape named before its kind: `ABCD is a rectangle`."""
    _shape(draft, kind, names)


def _special_behind(draft: _Draft, names: str, adjective: str, kind: str | None) -> None:
    """A shape named before its special kind: `ABC is an equilateral triangle`."""
    _special(draft, adjective=adjective, kind=kind or _kind_of(names), names=names)


def _two_lines(draft: _Draft, a: str, b: str, relation: str, c: str, d: str) -> None:
    """Two lines are parallel or perpendicular."""
    draft.facts.append(term(relation.capitalize(), draft.line(a, b), draft.line(c, d)))


def _on_line(draft: _Draft, point: str, start: str, end: str) -> None:
    """A point lies on a segment, which is drawn."""
    draft.facts.append(term("PointLiesOnLine", point, draft.line(start, end)))
    draft.line(start, point)
    draft.line(point, end)


def _on_circle(draft: _Draft, points: str, centre: str | None) -> None:
    """Points lie on a circle."""
    for point in re.findall(_P, points):
        draft.facts.append(draft.on_circle(point, centre))


def _circle(draft: _Draft, centre: str, points: str | None) -> None:
    """A circle with its centre and points."""
    draft.circle(centre)
    _on_circle(draft, points or "", centre)


def _midpoint(draft: _Draft, point: str, start: str, end: str) -> None:
    """A point is the midpoint of a segment."""
    _on_line(draft, point, start, end)
    draft.facts.append(term("IsMidpointOf", term("Point", point), term("Line", start, end)))


def _bisects_angle(draft: _Draft, start: str, end: str, names: str) -> None:
    """A line halves an angle."""
    corners = _split(names)
    line = draft.line(start, end)
    if len(corners) == 3:
        draft.line(corners[0], corners[1])
        draft.line(corners[1], corners[2])
    elif len(corners) != 1:
        raise _NotReadError(f"{names} is no angle; write its three points")
    draft.facts.append(term("BisectsAngle", line, term("Angle", *corners)))


def _meet(draft: _Draft, a: str, b: str, c: str, d: str, point: str) -> None:
    """Two lines meet in a point."""
    _on_line(draft, point, a, b)
    _on_line(draft, point, c, d)


def _tangent(draft: _Draft, start: str, end: str, centre: str | None, at: str | None) -> None:
    """A line touches a circle."""
    circle = draft.circle(centre)
    name = circle.names[0]
    touching = at or next((point for point in (start, end) if point in draft.circles[name]), None)
    if touching is None:
        raise _NotReadError(
            "it does not say where the line touches the circle; add 'at' and the point"
        )
    if touching not in draft.circles[name]:
        draft.facts.append(draft.on_circle(touching, name))
    if touching not in (start, end):
        _on_line(draft, touching, start, end)
    draft.line(name, touching)
    draft.facts.append(term("Tangent", draft.line(start, end), circle))


def _tangent_at(draft: _Draft, start: str, end: str, at: str, centre: str | None) -> None:
    """A line touches a circle, with the point named first."""
    _tangent(draft, start=start, end=end, centre=centre, at=at)


def _diameter(draft: _Draft, start: str, end: str, centre: str | None) -> None:
    """A segment is a diameter of a circle."""
    circle = draft.circle(centre)
    name = circle.names[0]
    for point in (start, end):
        if point not in draft.circles[name]:
            draft.facts.append(draft.on_circle(point, name))
    _on_line(draft, name, start, end)
    draft.facts.append(term("IsDiameterOf", term("Line", start, end), circle))


def _chord(draft: _Draft, start: str, end: str, centre: str | None) -> None:
    """A segment is a chord of a circle."""
    draft.line(start, end)
    _on_circle(draft, f"{start}{end}", centre)


def _alike(draft: _Draft, kind: str | None, first: str, relation: str, second: str) -> None:
    """Two shapes are similar or congruent."""
    names = _split(first)
    partners = _split(second)
    if len(names) != len(partners):
        raise _NotReadError(f"{first} and {second} have not as many corners")
    head = _kind_of(first).capitalize()
    draft.facts.append(
        term(relation.capitalize(), draft.polygon(head, names), draft.polygon(head, partners))
    )


def _right_angle(draft: _Draft, names: str) -> None:
    """An angle is right."""
    corners = _split(names)
    if len(corners) != 3:
        raise _NotReadError(f"{names} is no angle; write its three points")
    draft.facts.append(
        term(
            "Perpendicular", draft.line(corners[1], corners[0]), draft.line(corners[1], corners[2])
        )
    )


def _inscribed(
    draft: _Draft, adjective: str | None, kind: str | None, names: str, centre: str | None
) -> None:
    """A polygon has its corners on a circle."""
    if adjective is not None:
        _special_behind(draft, names, adjective, kind)
    elif (kind or _kind_of(names)) == "polygon":
        draft.facts.append(draft.polygon("Polygon", _split(names)))
    else:
        _shape(draft, kind or _kind_of(names), names)
    _on_circle(draft, names, centre)


def _circle_in(draft: _Draft, centre: str, names: str) -> None:
    """A circle touches all sides of a polygon."""
    corners = _split(names)
    polygon = draft.polygon(_kind_of(names).capitalize(), corners)
    draft.facts.append(term("CircumscribedTo", polygon, draft.circle(centre)))


def _line_of_triangle(draft: _Draft, start: str, end: str, role: str, names: str) -> None:
    """A median or an altitude of a triangle, with its foot on the opposite side."""
    corners = _split(names)
    if len(corners) != 3 or len({start, end} & set(corners)) != 1:
        raise _NotReadError(
            f"{start}{end} does not go from a corner of {names} to a point of the opposite side"
        )
    foot = end if start in corners else start
    base = [name for name in corners if name not in (start, end)]
    _on_line(draft, foot, base[0], base[1])
    head = "IsMedianOf" if role == "median" else "IsAltitudeOf"
    draft.facts.append(term(head, draft.line(start, end), draft.polygon("Triangle", corners)))


def _place(draft: _Draft, point: str, x: str, y: str) -> None:
    """A point has a place in the picture."""
    draft.places[point] = (float(x), float(y))


def _draw(draft: _Draft, start: str, end: str) -> None:
    """A segment is drawn."""
    draft.line(start, end)


def _find(draft: _Draft, measure: str) -> None:
    """The question: what is to be computed."""
    draft.question.append(term("Find", _side(draft, measure)))


# Equations


def _equation(draft: _Draft, text: str) -> None:
    """An equation of two or more sides: each side equals the one before it."""
    sides = [_side(draft, side) for side in text.split("=")]
    for first, second in pairwise(sides):
        # A measure stands on the left, as everywhere in logic forms.
        if second.arguments and not first.arguments:
            draft.facts.append(term("Equals", second, first))
        else:
            draft.facts.append(term("Equals", first, second))


_ATOM = re.compile(
    rf"""\s*(?:
    (?P<angle>angle\s*(?:{_P}{_P}{_P}|{_P}|\d+))
    |(?P<arc>arc\s*(?:{_P}){{2,3}})
    |(?P<trig>(?:sin|cos|tan)\s*(?:angle\s*)?(?:{_P}{_P}{_P}|{_P}|\d+|[a-z]))
    |(?P<circle>(?:radius|diameter|circumference)(?:\s*circle)?(?:\s*{_P}(?!{_P}))?|area\s*circle(?:\s*{_P}(?!{_P}))?)
    |(?P<extent>(?:area|perimeter)\s*(?:{_SHAPES})?\s*(?:{_P}){{3,}})
    |(?P<sector>area\s*sector\s*(?:{_P}){{3}})
    |(?P<segment>{_P}{_P}(?!{_P}))
    |(?P<number>\d+(?:\.\d+)?|\.\d+|\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|(?:\\?sqrt|√)\s*(?:\{{[^{{}}]*\}}|\([^()]*\)|\d+)|\\?pi|π|[a-z](?![a-z]))
    |(?P<sign>[-+*/^()])
    )""",
    re.VERBOSE,
)


def _side(draft: _Draft, text: str) -> Term:
    """One side of an equation: a measure, a value, or sums and products of them."""
    plain = text.strip()
    if not re.search(_P, plain) and not re.search(
        r"angle|arc|radius|diameter|circumference|sin|cos|tan", plain
    ):
        for word in re.findall(r"(?<!\\)[a-z]{3,}", plain):
            if word not in _WORDS:
                raise _NotReadError(
                    f"{word!r} is no word that is known{did_you_mean(word, _WORDS)}"
                )
        try:
            parsed(plain)
        except ExpressionError as error:
            raise _NotReadError(str(error)) from None
        return Term(head=plain.replace("√", "\\sqrt"))
    pieces: list[tuple[str, str]] = []
    position = 0
    while position < len(plain):
        match = _ATOM.match(plain, position)
        if match is None or match.lastgroup is None:
            rest = plain[position:].strip()
            word = re.match(r"[A-Za-z']+", rest)
            if word and word[0].islower() and word[0] not in _WORDS:
                raise _NotReadError(
                    f"{word[0]!r} is no word that is known{did_you_mean(word[0], _WORDS)}"
                )
            raise _NotReadError(f"{rest!r:.40} is no length, angle, area or number")
        pieces.append((match.lastgroup, match[match.lastgroup].strip()))
        position = match.end()
        while position < len(plain) and plain[position].isspace():
            position += 1
    if len(pieces) > MAX_PARTS:
        raise _NotReadError(f"one side has {len(pieces)} parts, over {MAX_PARTS}")
    return _Sides(draft, pieces).whole()


class _Sides:
    """Sums, differences, products and quotients of atoms."""

    def __init__(self, draft: _Draft, pieces: Sequence[tuple[str, str]]) -> None:
        self.draft = draft
        self.pieces = list(pieces)
        self.next = 0
        self.depth = 0

    def peek(self) -> str:
        """The next sign, or the kind of the next piece; empty at the end."""
        if self.next >= len(self.pieces):
            return ""
        kind, text = self.pieces[self.next]
        return text if kind == "sign" else kind

    def whole(self) -> Term:
        """The term of all pieces. Raises `_NotReadError` where some remain."""
        side = self.sum()
        if self.next < len(self.pieces):
            raise _NotReadError(f"{self.pieces[self.next][1]!r} stands where nothing can stand")
        return side

    def sum(self) -> Term:
        """Products with plus and minus between them; brackets are at most 10 deep."""
        self.depth += 1
        if self.depth > 10:
            raise _NotReadError("it has brackets over 10 deep")
        side = self.product()
        while self.peek() in ("+", "-"):
            head = "Add" if self.pieces[self.next][1] == "+" else "Sub"
            self.next += 1
            side = term(head, side, self.product())
        self.depth -= 1
        return side

    def product(self) -> Term:
        """Atoms with times, divided by, squared or nothing between them."""
        side = self.atom()
        while True:
            sign = self.peek()
            if sign in ("*", "/"):
                self.next += 1
                side = term("Mul" if sign == "*" else "Div", side, self.atom())
            elif sign == "^":
                self.next += 1
                if self.next >= len(self.pieces) or self.pieces[self.next][1] != "2":
                    raise _NotReadError("only squares are known behind ^ here")
                self.next += 1
                side = term("SquareOf", side)
            elif sign and sign not in ("+", "-", ")"):
                side = term("Mul", side, self.atom())
            else:
                return side

    def atom(self) -> Term:
        """A bracket, a measure or a value."""
        if self.next >= len(self.pieces):
            raise _NotReadError("something is missing behind a sign")
        kind, text = self.pieces[self.next]
        self.next += 1
        if kind == "sign":
            if text == "-":
                return term("Sub", Term(head="0"), self.atom())
            if text != "(":
                raise _NotReadError(f"{text!r} stands where nothing can stand")
            side = self.sum()
            if self.peek() != ")":
                raise _NotReadError("a bracket is not closed")
            self.next += 1
            return side
        return _ATOMS[kind](self.draft, text)


def _angle_atom(draft: _Draft, text: str) -> Term:
    """An angle by its number, its corner or its three points, whose sides are then drawn."""
    name = text.removeprefix("angle").strip()
    if name.isdigit():
        return term("MeasureOf", Term(head=f"angle {name}"))
    names = _split(name)
    if len(names) == 3:
        draft.line(names[0], names[1])
        draft.line(names[1], names[2])
    return term("MeasureOf", term("Angle", *names))


def _arc_atom(draft: _Draft, text: str) -> Term:
    """An arc by its two ends, or by its ends and a point between them."""
    return term("MeasureOf", term("Arc", *_split(text.removeprefix("arc"))))


def _trig_atom(draft: _Draft, text: str) -> Term:
    """The sine, cosine or tangent of an angle or of a letter."""
    head = f"{text[:3].capitalize()}Of"
    rest = text[3:].strip()
    if re.fullmatch("[a-z]", rest):
        return term(head, rest)
    return term(head, _angle_atom(draft, rest))


def _circle_atom(draft: _Draft, text: str) -> Term:
    """Radius, diameter, circumference or area of a circle, of the only one without a centre."""
    head = re.match("[a-z]+", text)
    assert head is not None, "the pattern begins with a word"
    centre = re.search(rf"{_P}$", text)
    return term(f"{head[0].capitalize()}Of", draft.circle(centre[0] if centre else None))


def _extent_atom(draft: _Draft, text: str) -> Term:
    """The area or the perimeter of a polygon by its corners."""
    names = _split(text)
    head = "AreaOf" if text.startswith("area") else "PerimeterOf"
    kind = _kind_of("".join(names))
    if kind == "polygon":
        raise _NotReadError(f"{''.join(names)} has more corners than are known")
    return term(head, draft.polygon(kind.capitalize(), names))


def _sector_atom(draft: _Draft, text: str) -> Term:
    """The area of the sector that three points name, with the centre between the ends."""
    return term("AreaOf", term("Sector", *_split(text)))


def _segment_atom(draft: _Draft, text: str) -> Term:
    """The length of a segment, which is drawn."""
    start, end = _split(text)
    if start == end:
        raise _NotReadError(f"{text} is no segment; it begins where it ends")
    return term("LengthOf", draft.line(start, end))


def _number_atom(draft: _Draft, text: str) -> Term:
    """A number or a letter as it is written."""
    return Term(head=text.replace("√", "\\sqrt"))


_ATOMS: dict[str, Callable[[_Draft, str], Term]] = {
    "angle": _angle_atom,
    "arc": _arc_atom,
    "trig": _trig_atom,
    "circle": _circle_atom,
    "extent": _extent_atom,
    "sector": _sector_atom,
    "segment": _segment_atom,
    "number": _number_atom,
}

_ADJECTIVES = "regular|isosceles|right|equilateral"
_IN_CIRCLE = rf"(?: ?circle(?: ({_P}))?)"
_Build = Callable[..., None]
_GRAMMAR: tuple[tuple[str, _Build], ...] = (
    (r"find (.+)", _find),
    (rf"({_P}) at \(?{_PLACE}, ?{_PLACE}\)?", _place),
    (rf"draw {_SEGMENT}", _draw),
    (rf"({_SHAPES}) {_NAMES}", _shape),
    (rf"{_NAMES} ({_SHAPES})", _shape_behind),
    (rf"({_ADJECTIVES}) ({_SHAPES}|polygon) {_NAMES}", _special),
    (rf"(?:triangle )?{_NAMES} ({_ADJECTIVES})(?: ({_SHAPES}|polygon))?", _special_behind),
    (rf"{_SEGMENT} (parallel|perpendicular) {_SEGMENT}", _two_lines),
    (rf"({_P}(?:,? (?:and )?{_P})*) on ?circle(?: ({_P}))?", _on_circle),
    (rf"({_P}) on {_SEGMENT}", _on_line),
    (rf"({_P}) between ({_P}) and ({_P})", _on_line),
    (rf"({_P}) midpoint {_SEGMENT}", _midpoint),
    (rf"{_SEGMENT} bisects angle ((?:{_P})+)", _bisects_angle),
    (rf"{_SEGMENT} (?:and )?{_SEGMENT} (?:meet|cross|intersect) at ({_P})", _meet),
    (rf"{_SEGMENT} tangent{_IN_CIRCLE}?(?: ?at ({_P}))?", _tangent),
    (rf"{_SEGMENT} tangent at ({_P}){_IN_CIRCLE}", _tangent_at),
    (rf"{_SEGMENT} diameter{_IN_CIRCLE}?", _diameter),
    (rf"{_SEGMENT} chord{_IN_CIRCLE}?", _chord),
    (rf"circle ({_P})(?: ?(?::|with|through) ?((?:{_P})(?:,? ?(?:and )?{_P})*))?", _circle),
    (rf"({_SHAPES})? ?{_NAMES} (similar|congruent) (?:{_SHAPES})? ?{_NAMES}", _alike),
    (rf"right angle {_NAMES}", _right_angle),
    (
        rf"(?:({_ADJECTIVES}) )?(?:({_SHAPES}|polygon) )?{_NAMES} inscribed in{_IN_CIRCLE}",
        _inscribed,
    ),
    (rf"circle ({_P}) inscribed in (?:{_SHAPES})? ?{_NAMES}", _circle_in),
    (rf"{_SEGMENT} (altitude|height|median) (?:triangle )?{_NAMES}", _line_of_triangle),
)
_WORDS = (
    *(name.lower() for name in CORNERS),
    *("find", "at", "draw", "on", "between", "and", "in", "with", "through"),
    *("regular", "isosceles", "right", "equilateral", "polygon"),
    *("parallel", "perpendicular", "midpoint", "bisects", "meet", "cross", "intersect"),
    *(
        "circle",
        "tangent",
        "diameter",
        "chord",
        "inscribed",
        "sector",
        "arc",
        "radius",
        "circumference",
    ),
    *("similar", "congruent", "altitude", "height", "median", "angle", "area", "perimeter"),
    *("sin", "cos", "tan", "sqrt", "pi", "frac"),
)
