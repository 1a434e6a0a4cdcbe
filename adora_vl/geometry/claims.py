"""What a response claims of a figure: its equations, and relations such as "AB is parallel to CD".

`read_claims` reads a text by a small grammar. A claim is a chain of sides with `=`, `is` or the
like between them, or a relation in signs or words. What the author only supposes, denies or asks
is no claim (`adora_vl.geometry.stance`). What the grammar cannot read is counted as unread; it is
not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from adora_vl.geometry.claimed_relations import RelationReader
from adora_vl.geometry.names import NoSideError
from adora_vl.geometry.quantities import (
    Angle,
    Constant,
    Distance,
    Equal,
    Quantity,
    Relation,
    Sweep,
    Unknown,
    plus,
    times,
)
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.sides import EQUALS_SIGNS, EquationSide, SideReader, equation
from adora_vl.geometry.signature import signature
from adora_vl.geometry.stance import mark_asserted_tokens
from adora_vl.geometry.tokens import ResponseToken, split_into_tokens

ClaimKind = Literal["length", "angle", "variable", "relation", "unread"]
MAX_CLAIMS = 300  # of one response; later ones are not read

# A name or number behind one of these is the rest of a formula that was not read: `k + 5`.
_SIGNS_THAT_CONTINUE = {"+", "-", "*", "/", "^", "±", "?", "_", "|", "<", "≠", "~", "\\"}
_WORDS_IN_FORMULAS = {
    "sin",
    "cos",
    "tan",
    "sqrt",
    "frac",
    "arc",
    "angle",
    "angles",
    "pi",
    "times",
    "half",
}
_IS_PATTERN = re.compile(
    r"(?:which |that |it |also |must |will |then |thus |therefore |now |just |simply |and )*"
    r"(?:is (?:already |also )?(?:known|given|found|said) (?:to be|as)"
    r"|is|are|be|equals?|measures?|becomes|measuring|(?:has|have|had|with|having) (?:an? )?"
    r"(?:equal |total )?(?:length|measure|value|area|perimeter|radius|diameter)(?: of)?"
    r"|comes (?:out )?to|works out to|turns out to be|evaluates to|simplifies to)"
    r"(?: (?:a |an )?(?:length|measure|value)(?: of)?)?"
    r"(?: (?:equal|approximately|about|also|exactly|then|thus|therefore|congruent|roughly|simply"
    r"|to|the same as|the same length as|the same measure as|in length|in measure|just|equivalent"
    r"|now|the length of|the measure of|both))*"
)
_EQUAL_TO_PATTERN = re.compile(r"(?:equal|congruent) to(?: the (?:length|measure) of)?")
# A number with one of these words behind it is no value: "5 more than CD", "5 or 6".
_COMPARING_WORDS = {
    "more",
    "less",
    "longer",
    "shorter",
    "greater",
    "larger",
    "smaller",
    "bigger",
    "percent",
    "or",
    "times",
    "higher",
    "lower",
    "parts",
    "equal",
    "sides",
    "angles",
    "right",
    "congruent",
    "similar",
    "different",
    "points",
    "triangles",
    "pairs",
    "choices",
}
# A number with one of these words and "than" behind it is a difference: "5 more than CD".
_FACTOR_BY_COMPARATIVE = {
    **{"more": 1.0, "longer": 1.0, "greater": 1.0, "larger": 1.0, "bigger": 1.0, "higher": 1.0},
    **{"less": -1.0, "shorter": -1.0, "smaller": -1.0, "lower": -1.0},
}
# A number with one of these words behind it is no value: the 3 of "the ratio is 3 to 4".
_WORDS_BETWEEN_NUMBERS = {"to", "out", "of", "by"}
# Behind one of these a name only says where a part lies: the A of "opposite angle A".
_POSITION_WORDS = {
    "opposite",
    "adjacent",
    "intercepts",
    "intercepted",
    "subtends",
    "subtended",
    "between",
}
_DEPTH_CHANGE_BY_BRACKET = {"(": 1, "{": 1, ")": -1, "}": -1}


@dataclass(frozen=True)
class Claim:
    """What a response says of its figure, such as "AB = 5".

    Attributes:
        start: Where it begins, as an index of a character of the text.
        end: The index behind its last character.
        words: The text from `start` to `end`.
        kind: What it is about; `unread` where it was not understood.
        alternatives: What it says, as lists of relations. It is true where all relations of one
            list hold. "ABC is isosceles" has three lists, one for each pair of equal sides. Empty
            where it is `unread`.
        decimals: The largest count of digits behind the point in its numbers, such as 2 for
            `AB = 3.5 + 1.25`. None where no number has a point.
        why: The reason why it is `unread`.
    """

    start: int
    end: int
    words: str
    kind: ClaimKind
    alternatives: tuple[tuple[Relation, ...], ...] = ()
    decimals: int | None = None
    why: str = ""


def read_claims(text: str, reading: Reading) -> list[Claim]:
    """Return the claims of a text on the figure of a form that was read, in their order."""
    return _ClaimReader(text, reading).claims()


@dataclass(frozen=True)
class _ChainLink:
    """A side of a chain of equations, which has the tokens from `start` up to `end - 1`."""

    side: EquationSide
    start: int
    end: int


class _ClaimReader:
    """Finds the claims of a response, going once through its tokens (words and signs).

    A position is the index of a token. `is_asserted` tells for each token whether the author stands
    by it.
    """

    def __init__(self, text: str, reading: Reading) -> None:
        self.text = text
        self.reading = reading
        self.tokens = split_into_tokens(text)
        self.is_asserted = mark_asserted_tokens(self.tokens)
        self.sides = SideReader(self.tokens, reading)
        self.relations = RelationReader(self.sides, reading)

    def claims(self) -> list[Claim]:
        """Return all claims of the text in their order, also those that could not be read.

        Two kinds of statements are left out: what the author does not stand by ("let AB = 5"), and
        alternatives ("AB = 5 or AB = 6").
        """
        claims: list[Claim] = []
        hypothetical: list[Claim] = []  # the statements that are left out
        position = 0
        while position < len(self.tokens) and len(claims) < MAX_CLAIMS:
            self._note_definition(position)
            claims_here, end = self._claims_from(position)
            if end == position:
                position += 1
                continue
            if self.is_asserted[position] and not self._is_alternative(position, end, claims_here):
                claims += claims_here
            else:
                hypothetical += claims_here
            position = end
        # The statements that are left out were read, so they are no unread claims either.
        claims += self._find_unread([*claims, *hypothetical])
        return sorted(claims, key=lambda claim: (claim.start, claim.end))[:MAX_CLAIMS]

    def _claims_from(self, position: int) -> tuple[list[Claim], int]:
        """Return the claims that begin at a position, and the position behind them.

        Where no claim begins, the result is `[]` with the same position.
        """
        row = self._read_table_row(position)
        if row is not None:
            return row
        if self._continues_unread(position):
            return [], position
        relation = self.relations.read(position)
        if relation is not None:
            alternatives, end = relation
            return [self._claim(position, end, "relation", alternatives=alternatives)], end
        return self._read_chain(position)

    def _claim(
        self,
        start_token: int,
        end_token: int,
        kind: ClaimKind,
        *,
        alternatives: tuple[tuple[Relation, ...], ...] = (),
        decimals: int | None = None,
        why: str = "",
    ) -> Claim:
        """Make a claim of the tokens from `start_token` up to the one before `end_token`."""
        start = self.tokens[start_token].start
        end = self.tokens[end_token - 1].end
        return Claim(
            start=start,
            end=end,
            words=self.text[start:end],
            kind=kind,
            alternatives=alternatives,
            decimals=decimals,
            why=why,
        )

    def _continues_unread(self, position: int) -> bool:
        """Tell whether the token here is the rest of something that was not read.

        In `k + 5 = BC` the problem may have no k. Without this check `5 = BC` would be a
        claim.
        """
        previous_token = self.sides.token_at(position - 1)
        if position == 0 or previous_token.kind == "line":
            return False
        previous_text = previous_token.text
        if previous_text in _SIGNS_THAT_CONTINUE or previous_text.lower() in _WORDS_IN_FORMULAS:
            return True
        token = self.tokens[position]
        # The CD of the ratio `AB:CD`. Any other colon ends a clause.
        if previous_token.text == ":":
            return self.sides.is_ratio(position - 1)
        # The 5 of `2,5`.
        is_close_to_comma = previous_token.text == "," and previous_token.end == token.start
        if is_close_to_comma and token.kind == "number":
            return self.sides.token_at(position - 2).kind == "number"
        if self._is_position(position) or self._is_spelt_out(position):
            return True
        # Without a space between, a token belongs to the one before it: the x of `5x`.
        is_near = not token.is_apart
        if is_near and previous_token.kind in ("number", "points"):
            return True
        if is_near and previous_token.text in (")", "]", "}", "°", "'"):
            return token.text not in ("(", "[")
        if is_near and previous_token.kind == "word":
            return token.kind in ("number", "points", "word")
        return False

    def _is_spelt_out(self, position: int) -> bool:
        """Tell whether a letter is not the first of a name with spaces: the L and M of `Q L M`."""
        previous_token = self.tokens[position - 1]
        token = self.tokens[position]
        return (
            previous_token.kind == token.kind == "points"
            and len(previous_token.text) == len(token.text) == 1
        )

    def _is_position(self, position: int) -> bool:
        """Tell whether the name here only says where a part lies: the A of "opposite angle A"."""
        # The seven words before it, the nearest first.
        previous_words = [self.sides.word_at(position - step) for step in range(1, 8)]
        if previous_words[0] == "to" and "distance" in previous_words:
            return True  # "the distance from O to AB"
        for word in previous_words[:3]:
            if word in _POSITION_WORDS:
                return True
            if word not in ("the", "to", "angle", "side", "of", "arc"):
                return False
        return False

    def _is_alternative(self, position: int, end: int, claims: Sequence[Claim]) -> bool:
        """Tell whether "or" offers these claims as alternatives, so that none of them is stated.

        `position` is where the claims begin, and `end` the position behind them. For example:

        - `AB = 5 or AB = 6`, also with a comma before "or", offers two values. Neither is stated.
        - `AB/BC = DE/EF, or 5/x = 3/4` says one thing in two ways. Both are stated. This needs the
          comma, and claims that give no value.
        """
        # A claim such as "AB = 5" gives a value. Any other equation is of the kind "relation".
        gives_value = any(claim.kind != "relation" for claim in claims)
        for or_position in (position - 1, end):
            if self.sides.word_at(or_position) == "or":
                has_comma = self.sides.token_at(or_position - 1).text == ","
                return gives_value or not has_comma
        is_followed_by_or = (
            self.sides.token_at(end).text == "," and self.sides.word_at(end + 1) == "or"
        )
        return is_followed_by_or and gives_value

    def _read_table_row(self, position: int) -> tuple[list[Claim], int] | None:
        """Return the claim of a table's row such as `| AB | 13 |`, and the position behind it.

        The first cell has a name, and the second one its value. Further cells may have words, but
        no numbers or points. Returns None where no such row begins here.
        """
        previous_token = self.sides.token_at(position - 1)
        is_inside_line = position > 0 and previous_token.kind != "line"
        if self.sides.token_at(position).text != "|" or is_inside_line:
            return None
        try:
            name, bar = self.sides.side(position + 1, closing="|")
            value, end = self.sides.side(bar + 1, closing="|")
        except NoSideError:
            return None
        if self.sides.token_at(bar).text != "|" or self.sides.token_at(end).text != "|":
            return None
        if name.is_number or not value.is_number:
            return None
        cursor = end
        while self.sides.token_at(cursor).kind not in ("line", "end"):
            if self.sides.token_at(cursor).kind in ("number", "points"):
                return None
            cursor += 1
        first = _ChainLink(side=name, start=position + 1, end=bar)
        second = _ChainLink(side=value, start=bar + 1, end=end)
        return [self._claim_of_equation(first, second)], cursor

    # Chains

    def _read_chain(self, position: int) -> tuple[list[Claim], int]:
        """Return the claims of a chain of sides, and the position behind them.

        Each side is compared with the one before it. In two cases it is compared with the first
        side that has a name instead: where a number follows a number, and where the side before it
        was not read. For example, in a problem without a k:

            AB = 5x - 2 = 13   says   AB = 5x - 2   and   5x - 2 = 13
            AB = 3 + 4 = 7     says   AB = 3 + 4    and   AB = 7
            AB = k + 1 = 7     says   AB = 7
        """
        claims: list[Claim] = []
        # The first side with a name, which the chain is about.
        first_named: _ChainLink | None = None
        # The side that the next one is compared with.
        previous: _ChainLink | None = None
        end = position
        for link in self._read_links(position):
            if link is None:
                previous = first_named
                continue
            partner = previous
            # In "AB = 3 + 4 = 7" the 7 says what AB is; that 3 + 4 is 7 is mere arithmetic.
            if link.side.is_number and previous is not None and previous.side.is_number:
                partner = first_named
            if partner is not None:
                claims.append(self._claim_of_equation(partner, link))
                end = link.end
            if first_named is None and not link.side.is_number:
                first_named = link
            previous = link
        return claims, end

    def _read_links(self, position: int) -> Iterator[_ChainLink | None]:
        """Yield the sides of the chain that begins at a position.

        None stands for a side that was not read: `AB = k + 1 = 7` gives AB, None and 7 in a problem
        without a k. Nothing is yielded where no side begins.
        """
        try:
            side, end = self.sides.side(position)
        except NoSideError:
            return
        yield _ChainLink(side=side, start=position, end=end)
        while True:
            start = self._skip_equality(end)
            if start is None:
                return
            try:
                side, next_end = self._read_side_behind(start, end)
            except NoSideError:
                # A side that was not read is skipped behind `=` alone. Behind a word such as "is"
                # the sentence may say anything.
                following = self._find_next_equal(start)
                is_equals_sign = self.sides.token_at(start - 1).text in EQUALS_SIGNS
                if following is None or not is_equals_sign:
                    return
                end = following
                yield None
                continue
            end = next_end
            yield _ChainLink(side=side, start=start, end=end)

    def _read_side_behind(self, position: int, relation_position: int) -> tuple[EquationSide, int]:
        """Return the side behind `=` or "is", with the position behind it.

        `position` is where the side begins, and `relation_position` where the sign or the words
        before it begin. Raises `NoSideError` where the side is only a part of something, as "5" is
        of "5 sides".
        """
        side, end = self.sides.side(position)
        word = self.sides.word_at(end)
        # "AB is 5 more than CD".
        is_compared = word in _FACTOR_BY_COMPARATIVE and self.sides.word_at(end + 1) == "than"
        if is_compared and side.is_number:
            return self._read_difference(side, end + 2, factor=_FACTOR_BY_COMPARATIVE[word])
        # "ABC has 3 sides".
        if word in _COMPARING_WORDS and side.is_number:
            raise NoSideError(f"{word} stands behind it")
        is_worded = self.tokens[relation_position].text not in EQUALS_SIGNS
        # "AB and CD are 5".
        if self.sides.word_at(relation_position) == "are" and side.is_number:
            raise NoSideError("it says something of several things")
        # "The ratio is 3 to 4".
        if is_worded and side.is_number and word in _WORDS_BETWEEN_NUMBERS:
            raise NoSideError(f"{word} stands behind it")
        if self.sides.token_at(end).text in ("±", "∥", "⊥", "<"):
            raise NoSideError("it goes on")
        return side, end

    def _read_difference(
        self, amount: EquationSide, position: int, *, factor: float
    ) -> tuple[EquationSide, int]:
        """Return AB + 5 for "5 more than AB", or AB - 5 for "5 less than AB".

        `amount` is the 5, `position` is where AB begins, and `factor` is 1 for more and -1 for
        less. Returns the result with the position behind AB.
        """
        start = self.sides.skip_words(position, {"the", "length", "measure", "of"})
        side, end = self.sides.side(start)
        change = times(Constant(factor), amount.quantity)
        decimals = [part.decimals for part in (amount, side) if part.decimals is not None]
        quantity = plus(side.quantity, change)
        return EquationSide(quantity=quantity, decimals=max(decimals, default=None)), end

    def _skip_equality(self, position: int) -> int | None:
        """Return the position behind `=`, "is" or "measures"; None where none of them is here."""
        # `=` may stand on the next line, a word may not.
        cursor = position
        while self.sides.token_at(cursor).kind == "line":
            cursor += 1
        if self.sides.token_at(cursor).text in EQUALS_SIGNS:
            return cursor + 1
        if cursor > position:
            return None
        # "AB = BC, which is 7": the pattern below begins with "which".
        if self.sides.token_at(cursor).text == "," and self.sides.word_at(cursor + 1) == "which":
            cursor += 1
        if self.sides.word_at(cursor) == "in" and self.sides.word_at(cursor + 1) in ("the", "this"):
            cursor += 3  # "x in the figure is 5"
        words: list[str] = []
        # Phrases of equality are short, so that nine words behind the name are enough to look at.
        while self.sides.token_at(cursor + len(words)).kind == "word" and len(words) < 9:
            words.append(self.sides.word_at(cursor + len(words)))
        phrase = " ".join(words)
        match = _IS_PATTERN.match(phrase) or _EQUAL_TO_PATTERN.match(phrase)
        # A match has to end where a word ends: "is" is no part of "isosceles".
        if match is None or (match.end() < len(phrase) and phrase[match.end()] != " "):
            return None
        cursor += len(match[0].split())
        if self.sides.token_at(cursor).text in ("=", "≈"):
            cursor += 1
        return cursor

    def _find_next_equal(self, position: int) -> int | None:
        """Return the position of the next `=` in the clause, behind a side that was not read.

        Returns None where the clause ends before an `=`, or where a formula turns into words. Words
        in brackets only explain the formula, and are skipped.
        """
        depth = 0
        # A side has fewer than 60 tokens. Without this bound a long text would be searched to its
        # end for each of its sides.
        for cursor in range(position, min(position + 60, len(self.tokens))):
            token = self.tokens[cursor]
            depth += _DEPTH_CHANGE_BY_BRACKET.get(token.text, 0)
            if token.text in ("=", "≈"):
                return cursor
            if token.kind == "line" or token.text in (".", ",", ";", "?", ":", "<", "≠"):
                return None
            is_plain_word = token.kind == "word" and len(token.text) > 1
            if is_plain_word and token.text not in _WORDS_IN_FORMULAS and depth < 1:
                return None
        return None

    def _claim_of_equation(self, partner: _ChainLink, link: _ChainLink) -> Claim:
        """Return the claim that two sides of a chain are equal."""
        sides = (partner.side, link.side)
        decimals = [side.decimals for side in sides if side.decimals is not None]
        return self._claim(
            partner.start,
            link.end,
            _kind_of_equation(partner.side, link.side),
            alternatives=((equation(partner.side.quantity, link.side.quantity),),),
            decimals=max(decimals, default=None),
        )

    # Letters that mean something else, and what was not read

    def _note_definition(self, position: int) -> None:
        """Hide a letter of the problem to which the text gives another meaning: "let x be BC".

        Claims with a hidden letter are not read. A letter stays where the text gives it a number
        ("let x = 5"), or the meaning that it has in the problem.
        """
        if self.sides.word_at(position) not in ("let", "letting", "denote", "call"):
            return
        cursor = position + 1
        token = self.sides.token_at(cursor)
        if token.kind != "word" or not re.fullmatch("[a-z]", token.text):
            return
        cursor += 1
        is_verb = self.sides.word_at(cursor) in ("be", "denote", "represent", "is", "equal")
        if self.sides.token_at(cursor).text != "=" and not is_verb:
            return
        words_before_name = {"the", "length", "measure", "of", "side", "segment"}
        cursor = self.sides.skip_words(cursor + 1, words_before_name)
        try:
            quantity, _ = self.sides.atom(cursor)
        except (NoSideError, UnreadError, ValueError):
            return
        is_of_the_problem = token.text in self.sides.unknowns
        if not is_of_the_problem or isinstance(quantity, Constant):
            return
        if not self._fact_gives_letter(quantity, token.text):
            self.sides.hidden.add(token.text)

    def _fact_gives_letter(self, quantity: Quantity, letter: str) -> bool:
        """Tell whether a fact of the problem says that this quantity is this letter: `BC = x`."""
        name = signature(quantity)
        for relation in self.reading.relations:
            if isinstance(relation, Equal):
                names = {signature(relation.left), signature(relation.right)}
                if names == {name, signature(Unknown(letter))}:
                    return True
        return False

    def _find_unread(self, claims: list[Claim]) -> Iterator[Claim]:
        """Yield an unread claim for each clause with a sign such as `=` that no claim covers."""
        spans = [(claim.start, claim.end) for claim in claims]
        clause: list[int] = []
        for position, token in enumerate(self.tokens):
            if token.kind == "line" or token.text in (".", ",", ";", "?", ":"):
                yield from self._unread_clause(clause, spans)
                clause = []
            else:
                clause.append(position)
        yield from self._unread_clause(clause, spans)

    def _unread_clause(self, clause: list[int], spans: list[tuple[int, int]]) -> Iterator[Claim]:
        """Yield a clause as an unread claim, if it has a sign such as `=` and no claim covers it.

        `clause` has the positions of its tokens. `spans` has start and end in the text of each
        claim that was read. A clause that names nothing of a figure, such as "3 = 3", is no claim.
        For example, "so we have AB = sec x" gives the unread claim `AB = sec x`.
        """
        has_relation = any(
            self.tokens[position].text in ("=", "≈", "≅", "∥", "⊥") and self.is_asserted[position]
            for position in clause
        )
        if not has_relation:
            return
        start = self.tokens[clause[0]].start
        end = self.tokens[clause[-1]].end
        # Another claim overlaps the clause, so that something of it was read.
        if any(claim_start < end and start < claim_end for claim_start, claim_end in spans):
            return
        if not any(self._is_name(self.tokens[position]) for position in clause):
            return
        # The words that lead up to a formula, such as "so we have", are no part of the claim.
        first = next(position for position in clause if self._is_of_formula(self.tokens[position]))
        yield self._claim(first, clause[-1] + 1, "unread", why="it was not understood")

    def _is_name(self, token: ResponseToken) -> bool:
        """Tell whether a token names a part of a figure: points, a letter, an angle or an arc."""
        if token.kind == "points" or token.text in ("angle", "arc"):
            return True
        return re.fullmatch("[a-z]", token.text) is not None

    def _is_of_formula(self, token: ResponseToken) -> bool:
        """Tell whether a token can begin a formula.

        A word can if it is a letter or a mathematical word such as "sqrt". Any other token can.
        """
        return token.kind != "word" or len(token.text) == 1 or token.text in _WORDS_IN_FORMULAS


def _kind_of_equation(left_side: EquationSide, right_side: EquationSide) -> ClaimKind:
    """Return the kind of an equation: what its name measures, or `relation`.

    `AB = 5` is a `length`, `angle B = 40` an `angle` and `x = 3` a `variable`. Any equation that is
    not one name and a number, such as `AB = CD` or `2x = 6`, is a `relation`.
    """
    for side, partner in ((left_side, right_side), (right_side, left_side)):
        if not partner.is_number:
            continue
        quantity = side.quantity
        if isinstance(quantity, Distance):
            return "length"
        if isinstance(quantity, Angle | Sweep):
            return "angle"
        if isinstance(quantity, Unknown):
            return "angle" if quantity.name.startswith("angle ") else "variable"
    return "relation"
