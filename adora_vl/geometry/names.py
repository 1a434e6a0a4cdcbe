"""The names of a figure's parts in a response: segments, angles, arcs, polygons, circles, letters.

A name that the figure does not have is refused; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Constant,
    Quantity,
    Unknown,
    atoms_of,
    sides_of_equation,
    times,
)
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.tokens import ResponseToken

_END_TOKEN = ResponseToken(kind="end", text="", start=0, end=0, is_apart=True)
# Words before a name that say no more than the name.
_SEGMENT_NOUNS_TEXT = (
    "segment side line chord radius diameter hypotenuse leg base height altitude median "
    "diagonal tangent secant ray"
)
SEGMENT_NOUNS = frozenset(_SEGMENT_NOUNS_TEXT.split())
# Words before the corners of a polygon.
_POLYGON_NOUNS_TEXT = (
    "triangle quadrilateral rectangle parallelogram rhombus square trapezoid polygon pentagon "
    "hexagon kite"
)
_POLYGON_NOUNS = frozenset(_POLYGON_NOUNS_TEXT.split())


class NoSideError(Exception):
    """What stands at a position of a response is no side of an equation that can be read."""


class NameReader:
    """Reads names such as `AB`, `angle 1` or `arc AB` from the tokens of a response.

    Tokens are words and signs. A method that reads gets the position of the first token, and
    returns the quantity with the position behind its last one. It raises `NoSideError` where no
    such name stands there, or the figure does not have it.

    `unknowns` are the letters, radii and numbered angles of the form. `hidden` are letters that the
    response uses for something else.
    """

    def __init__(self, tokens: Sequence[ResponseToken], reading: Reading) -> None:
        self.tokens = tokens
        self.reading = reading
        self.points = set(reading.drawing.points) | reading.drawing.centre_by_alias.keys()
        self.unknowns = unknown_names(reading)
        self.hidden: set[str] = set()

    def token_at(self, position: int) -> ResponseToken:
        """Return the token at a position; outside of the response an empty one of kind `end`."""
        return self.tokens[position] if 0 <= position < len(self.tokens) else _END_TOKEN

    def word_at(self, position: int) -> str:
        """Return the word at a position in small letters; empty where there is none."""
        token = self.token_at(position)
        return token.text.lower() if token.kind == "word" else ""

    def skip_words(self, position: int, words: Set[str]) -> int:
        """Return the position behind all words of a set that stand one after the other."""
        while self.word_at(position) in words:
            position += 1
        return position

    def names_at(self, start: int) -> tuple[list[str], int]:
        """Read the points that stand at a position: `QLM`, or `Q L M` with single spaces.

        Returns their names with the position behind them. Raises `NoSideError` where one of them is
        not in the figure.
        """
        names: list[str] = []
        cursor = start
        while self.token_at(cursor).kind == "points":
            token = self.token_at(cursor)
            letters = re.findall("[A-Z]'?", token.text)
            if names:
                # Only single letters with a space between them are one name: `Q L M`.
                is_single_letter = len(letters) == 1 and len(names) == cursor - start
                is_near = token.start - self.token_at(cursor - 1).end <= 2
                if not is_single_letter or not is_near:
                    break
            names += letters
            cursor += 1
        if not names or not set(names) <= self.points:
            raise NoSideError(f"{''.join(names)} is not in the figure")
        return names, cursor

    def length(self, start: int) -> tuple[Quantity, int]:
        """Read the length of the segment between the two points that stand at a position."""
        names, cursor = self.names_at(start)
        if len(names) != 2 or names[0] == names[1]:
            raise NoSideError(f"{''.join(names)} is no segment")
        return self.reading.term_reader.distance(names[0], names[1]), cursor

    def enclosed(self, start: int) -> tuple[Quantity, int] | None:
        """Read a length `|AB|` or an area `[ABC]`; None for anything else in bars or brackets."""
        term_reader = self.reading.term_reader
        is_area = self.token_at(start).text == "["
        if self.token_at(start + 1).kind != "points":
            return None
        names, cursor = self.names_at(start + 1)
        closing = "]" if is_area else "|"
        if self.token_at(cursor).text != closing:
            return None
        are_different = len(set(names)) == len(names)
        if not is_area and len(names) == 2 and are_different:
            return term_reader.distance(*names), cursor + 1
        if is_area and len(names) > 2 and are_different:
            return term_reader.polygon_measure("AreaOf", names), cursor + 1
        return None

    def is_product_of_letters(self, position: int) -> bool:
        """Tell whether a word is letters of the problem side by side: `2ab`, `$xy$`."""
        token = self.token_at(position)
        is_short = re.fullmatch("[a-z]{2,3}", token.text) is not None
        is_near = token.is_math or not token.is_apart
        return is_short and is_near and set(token.text) <= self.unknowns - self.hidden

    def letter(self, position: int) -> tuple[Quantity, int]:
        """Read a letter of the problem, or `r` for the radius of its only circle.

        The letter a before a word is an article, unless it stands in a formula.
        """
        letter = self.token_at(position).text
        is_article = letter == "a" and self.token_at(position + 1).kind == "word"
        if is_article and not self.token_at(position).is_math:
            raise NoSideError("an article")
        if letter in self.hidden:
            raise NoSideError(f"the response uses {letter} for something else")
        if letter in self.unknowns:
            return Unknown(letter), position + 1
        circles = self.reading.drawing.circles
        if letter == "r" and len(circles) == 1 and circles[0].radius in self.unknowns:
            return Unknown(circles[0].radius), position + 1
        raise NoSideError(f"the problem has no {letter}")

    def angle(self, start: int) -> tuple[Quantity, int]:
        """Read an angle by three points, by its corner alone, or by its number or letter."""
        while self.word_at(start) == "angle":  # `angle` and its sign
            start += 1
        token = self.token_at(start)
        if token.kind in ("number", "word"):
            numbered = f"angle {token.text}"
            if numbered in self.unknowns:
                return Unknown(numbered), start + 1
            if re.fullmatch("[a-z]", token.text) and token.text in self.unknowns - self.hidden:
                return Unknown(token.text), start + 1
            raise NoSideError(f"there is no {numbered}")
        names, cursor = self.names_at(start)
        if len(names) not in (1, 3):
            raise NoSideError(f"{''.join(names)} is no angle")
        term = Term(head="Angle", arguments=tuple(Term(name) for name in names))
        corners = self.reading.drawing.points_of_angle(term)
        if len(names) == 1 and self.reading.drawing.are_on_one_line(corners):
            raise NoSideError(f"{names[0]} is no corner")
        return self.reading.term_reader.angle_between(*corners), cursor

    def arc(self, start: int) -> tuple[Quantity, int]:
        """Read the angle of an arc at the centre, by two or three points of one circle."""
        names, cursor = self.names_at(start)
        if not any(set(names) <= set(circle.points) for circle in self.reading.drawing.circles):
            raise NoSideError(f"{''.join(names)} is no arc")
        term = Term(head="Arc", arguments=tuple(Term(name) for name in names))
        return self.reading.term_reader.arc_angle(term), cursor

    def area_or_perimeter(self, start: int) -> tuple[Quantity, int]:
        """Read the area or the perimeter of a polygon: "area of triangle ABC"."""
        cursor = self.skip_words(start + 1, {"of", "the"})
        if self.word_at(cursor) in _POLYGON_NOUNS:
            cursor += 1
        head = "AreaOf" if self.word_at(start) == "area" else "PerimeterOf"
        names, cursor = self.names_at(cursor)
        if len(names) < 3 or len(set(names)) < len(names):
            raise NoSideError(f"{''.join(names)} is no polygon")
        return self.reading.term_reader.polygon_measure(head, names), cursor

    def radius_or_diameter(self, start: int) -> tuple[Quantity, int]:
        """Read the radius or diameter of a circle: "radius of circle O".

        Without a circle's name, it is the only one.
        """
        cursor = self.skip_words(start + 1, {"of", "the", "this", "that"})
        circles = self.reading.drawing.circles
        if self.word_at(cursor) == "circle":
            cursor += 1
            if self.token_at(cursor).kind == "points":
                names, cursor = self.names_at(cursor)
                circles = [circle for circle in circles if [circle.centre] == names]
        else:
            cursor = start + 1
        if len(circles) != 1 or circles[0].radius not in self.unknowns:
            raise NoSideError("the text does not say of which circle")
        radius = Unknown(circles[0].radius)
        is_radius = self.word_at(start) == "radius"
        return (radius if is_radius else times(Constant(2.0), radius)), cursor


def unknown_names(reading: Reading) -> set[str]:
    """Return the names of the letters, radii and numbered angles that a form knows."""
    quantities = [
        quantity for relation in reading.relations for quantity in sides_of_equation(relation)
    ]
    if reading.goal is not None:
        quantities.append(reading.goal)
    atoms = (atom for quantity in quantities for atom in atoms_of(quantity))
    return {atom.name for atom in atoms if isinstance(atom, Unknown)}
