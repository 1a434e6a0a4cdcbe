r"""Names of values, and the words that announce a value.

`AB` is the name in `AB = 5`. `The length of side AB is 5` and `Answer: 5` announce the same value
in words. Both are decorations of the value.
"""

import re

TRIGONOMETRIC_COMMAND = r"\\(?:sin|cos|tan|sec|csc|cot)"
# The name of a value: `x`, `AB`, `m \angle A`, `\angle 3`, `r_{1}`, `S_{\triangle ABC}`, `f(2)`,
# `area of the circle`.
SIMPLE_NAME = (
    r"(?:(?i:area|circumference|diameter|height|length|measure|perimeter|radius|volume)\s+of\s*(?:the\s+)?)?"
    r"(?:m\s*)?(?:\\(?:angle|overline|overrightarrow|vec|hat|widehat|overarc|triangle)\s*)?"
    r"(?:[A-Z](?:\s+[A-Z])+|[A-Za-z]{1,16}|\{\s*[A-Za-z](?:\s*[A-Za-z]){0,3}\s*\}|\\(?:theta|alpha|beta|gamma|phi)"
    r"|(?<=angle)\s*\d{1,2}|(?<=angle )\d{1,2})"
    r"(?:_?\d|\s*\\triangle\s*[A-Z](?:\s*[A-Z]){2}|_(?:[A-Za-z]|\{(?:\s*\\triangle)?\s*[A-Za-z0-9]{1,16}\s*\}))?'?(?:\([A-Za-z0-9]{1,3}\))?"
)
LEADING_NAME_PATTERN = re.compile(rf"{SIMPLE_NAME}\s*=(?!=)")
# What `AB = CD` and `\angle 1 = \angle 2` say of two figures is an equation, and neither is the
# name of a value.
FIGURE_NAME_PATTERN = re.compile(
    r"(?:m\s*)?\\(?:angle|overline|widehat|overarc|triangle)\s*\{?\s*(?:[A-Z](?:\s*[A-Z]){0,3}|[0-9]{1,2})\s*\}?"
    r"|[A-Z](?:\s*[A-Z]){1,3}"
)
_NAME_BUT_NO_UNKNOWN = rf"(?![a-z](?![A-Za-z])){SIMPLE_NAME}"  # `x/y` is an expression
# `\tan A`, `\sin \theta`, `\cos{(\angle ABC)}` and `sin A`: the function of one angle. `\tan x` may
# be that of the unknown that is asked for.
_ANGLE = r"(?:\\angle\s?)?(?:[A-Z]{1,3}|\\(?:theta|alpha|beta|gamma|phi))"
_NAMED_FUNCTION = rf"\\?(?:sin|cos|tan|sec|csc|cot)[\s({{]{{0,2}}{_ANGLE}[)}}]{{0,2}}"
# `[ABC]` is the area of a polygon, and `d(A,B)` the distance of two points.
_AREA_OR_DISTANCE = r"\[[A-Z]{3,6}\]|d\([A-Z],\s?[A-Z]\)"
# The names of values: `x`, `AB`, `\angle ABC`, ratios such as `AB:CD` and `AB/CD`, `|x|`, `sin A`.
VALUE_NAME_PATTERN = re.compile(
    rf"{SIMPLE_NAME}(?::{SIMPLE_NAME})*|\|{SIMPLE_NAME}\||{_NAMED_FUNCTION}|{_AREA_OR_DISTANCE}"
    rf"|{_NAME_BUT_NO_UNKNOWN}/{_NAME_BUT_NO_UNKNOWN}|\\frac\{{{_NAME_BUT_NO_UNKNOWN}\}}\{{{_NAME_BUT_NO_UNKNOWN}\}}"
)
# A value with its name; `|x|` is none, since two numbers have it.
NAMED_VALUE_PATTERN = re.compile(
    rf"(?!\|[a-z]\|)({VALUE_NAME_PATTERN.pattern})(=|\\approx(?![A-Za-z])|≈)(?!\1$)([^=<>]+)"
)
# `about 12`, and `20\sqrt{3} (about 34.64)`.
_ABOUT_WORDS = (
    r"(?:(?i:approximately|about|approx\.?|roughly|around)\s+|(?:\\approx(?![A-Za-z])|≈)\s*)"
)
_LEADING_ABOUT_PATTERN = re.compile(rf"^{_ABOUT_WORDS}(?=[-+]?[\d\\.])")
_BRACKETED_ABOUT_PATTERN = re.compile(
    rf"(.*\S)\s*\(\s*{_ABOUT_WORDS}([-+]?\d+(?:\.\d+)?[^()]{{0,20}})\)", re.DOTALL
)
# The name of a value in a sentence: `The area is 12`.
_NAME_IN_SENTENCE_PATTERN = re.compile(
    r"(?i:(?:the\s+)?(?:(?:total|surface|shaded)\s+)?(?:area|circumference|diameter|height|length|measure"
    r"|perimeter|radius|volume|angle|value|distance|width|side|slope)"
    rf"(?:\s+of\s+(?:the\s+)?{SIMPLE_NAME})?\s+is)\s+(?:equal\s+to\s+)?(?=[-+]?[\d\\.(])"
)
_ANSWER_LABEL_PATTERN = re.compile(
    r"(?i:(?:the\s+)?(?:(?:final|correct)\s+)?answer\s*[:=])\s*(?=\S)"
)
# `The length of side AB is`, `Scale factor:`, `Angle ABC =`, `Area of sector AOB =`. The words are
# listed, since another one may change the value: `half the area is 6`.
_QUANTITY_WORD = (
    r"(?i:(?:area|circumference|diameter|height|altitude|length|measure|perimeter|radius|volume|angle|value|distance"
    r"|width|side|slope|ratio|factor|arc|segment|sum|number|probability|base|hypotenuse|leg|chord|apothem|diagonal"
    r"|median|midsegment|degree measure)(?![a-z]))"
)
_QUANTITY_ADJECTIVE = (
    r"(?i:(?:total|surface|lateral|shaded|side|scale|arc|base|slant|central|inscribed|interior|exterior"
    r"|acute|obtuse|missing|unknown|required|shortest|longest|minor|major)\s+)"
)
# Words between `of` and a name. They too are listed: `the value of negative x is 7` says -7 of `x`.
_WORD_OF_FIGURE = (
    r"(?i:(?:the|an?|its|this|each|line|segment|side|edge|base|leg|arc|chord|angle|sector|circle|semicircle|ellipse"
    r"|triangle|quadrilateral|square|rectangle|parallelogram|rhombus|trapezoid|kite|polygon|pentagon|hexagon|octagon"
    r"|prism|pyramid|cylinder|cone|sphere|cube|figure|shape|point|vertex|radius|diameter|hypotenuse|diagonal|tangent"
    r"|altitude|median|ladder|shaded|given|entire|whole|regular|right|isosceles|equilateral|scalene|inscribed"
    r"|circumscribed|central|exterior|interior|acute|obtuse|minor|major|shorter|longer|smaller|larger|unknown|missing"
    r"|similar|inner|outer|composite|top|bottom|left|variable)\s+)"
)
# The last word before the verb may be any name but these: `the area of half is 6`.
_NO_MODIFIER = (
    r"(?!(?i:not|n?or|and|half|twice|double|triple|thrice|minus|plus|times|squared|negative)\b)"
)
_ANNOUNCED_VALUE_PATTERN = re.compile(
    rf"(?i:the\s+)?{_QUANTITY_ADJECTIVE}{{0,2}}{_QUANTITY_WORD}"
    rf"(?:\s+(?:of|for|from|between)\s+(?:{_WORD_OF_FIGURE}){{0,3}}{_NO_MODIFIER}{SIMPLE_NAME}"
    rf"(?:\s+(?:to|and)\s+{SIMPLE_NAME})?|\s+(?:{FIGURE_NAME_PATTERN.pattern})"
    r"|\s+[a-z](?![A-Za-z]))?"
    r"\s*(?:[:=]|(?:is|equals)(?![a-z])(?:\s+equal\s+to)?)\s*(?=[-+]?\s?[\d\\.(])"
)
# `\angle ABC is 65`, `x is 7`, `AB equals 7`. A capital alone may be the letter of a choice:
# `B is 7` may give it the value of another choice.
_NAME_IS_PATTERN = re.compile(
    rf"(?![a-z]{{2}})(?:{FIGURE_NAME_PATTERN.pattern}|[a-z](?:_\d)?|[A-Z]_\d|\\(?:theta|alpha|beta|gamma|phi))"
    r"\s+(?:is|equals)\s+(?:equal\s+to\s+)?(?=[-+]?\s?[\d\\.(])"
)
_POINT_WORD_PATTERN = re.compile(
    r"(?i:(?:the\s+)?(?:point|cent(?:er|re)|vertex|midpoint|coordinates(?:\s+of)?)\b)"
    r"(?:\s*(?:is|are|at)\b|\s*[:=])?\s*(?=(?:[A-Z]'?\s*=?\s*)?\([^()]*,)"
)
_SEVERAL_VALUES_PATTERN = re.compile(r"[,;]|\band\b|\bor\b")


def without_words_around_value(text: str) -> str:
    r"""Return `text` without words that announce its value, and with `\approx` for `about`.

    - `The answer is 12`, `The length of side AC is 12` and `Angle ABC = 12` become `12`
    - `center (2, -5)` becomes `(2, -5)`
    - `20\sqrt{3} (about 34.64)` becomes `20\sqrt{3} \approx 34.64`
    """
    if "nswer" in text or ":" in text:  # a quick test
        text = _ANSWER_LABEL_PATTERN.sub("", text, count=1)
    text = _LEADING_ABOUT_PATTERN.sub(r"\\approx ", text)
    value_and_about = _BRACKETED_ABOUT_PATTERN.fullmatch(text)
    if value_and_about:
        text = rf"{value_and_about[1]} \approx {value_and_about[2]}"
    return _NAME_IN_SENTENCE_PATTERN.sub("", _without_announcement(text))


def _without_announcement(text: str) -> str:
    """Return `text` without the words or the name at its beginning that announce one value.

    In a list of values the names stay: they may say which value is which.
    """
    if not text[:1].isalpha() and not text.startswith("\\"):
        return text
    point_word = _POINT_WORD_PATTERN.match(text)
    if point_word:
        return text[point_word.end() :]
    announcement = _ANNOUNCED_VALUE_PATTERN.match(text) or _NAME_IS_PATTERN.match(text)
    if announcement is None or _SEVERAL_VALUES_PATTERN.search(text, announcement.end()):
        return text
    return text[announcement.end() :]
