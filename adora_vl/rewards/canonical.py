r"""Brings an answer to its canonical form, without the decorations that do not matter.

Every substitution puts a space where it takes something out, and a space between two digits stays,
so that no decoration can glue `1` and `2` into `12`. Source: the grading policy, points 2, 6 and 7.
"""

import re
import unicodedata
from decimal import Decimal

from adora_vl.rewards.full_width import in_ascii
from adora_vl.rewards.grammar import NotReadError
from adora_vl.rewards.markup import without_layout
from adora_vl.rewards.numerals import NUMBER_WORDS, in_degrees, replace_recurring_decimals
from adora_vl.rewards.units import DEGREE, MEASURED, TEMPERATURE, mark_upright_units

_DIGITS = "0123456789."
_DOLLAR = re.compile(r"(?<!\\)\$")
# An honest answer has under 60 characters. Every regular expression below runs on at most this
# many.
MAX_CHARS = 500

_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "√": r"\surd ",
        "π": r"\pi ",
        **dict.fromkeys("°º˚∘", r"^\circ "),
        "\u00d7": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "\u2044": "/",
        "\u2215": "/",
        "∠": r"\angle ",
        "△": r"\triangle ",
        "∥": r"\parallel ",
        "⊥": r"\perp ",
        "≌": r"\cong ",
        "≅": r"\cong ",
        "∽": r"\sim ",
        "≦": r"\le ",
        "≧": r"\ge ",
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "∶": ":",
        **dict.fromkeys("\u200a\u2002\u2003\u3000", " "),
    }
)
# What may stand between groups of three digits: `1,234`, `1{,}234`, `1\,234`, and thin spaces of
# Unicode.
_THIN = r"(?:,\\! ?|,|\{,\}|\\,|\\!|[\u2009\u202f])"
_THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_THIN}\d{{3}})+(?!\d|{_THIN})", re.ASCII)
# What a careless escape makes of `\left(`: two backslashes. Of `\frac` it makes a form feed and
# `rac`.
_ESCAPED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|left|right|text|pi|infty|cdot)(?![A-Za-z]))"
)
_FORM_FEED = re.compile(r"\\?\x0crac(?=\s*\{)")
# Raised digits and signs, fractions in one character, and numbers in circles.
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SMALL = re.compile("[¼½¾⅐-⅞①-⑳]")
_DOUBLE_RAISED = re.compile(r"\^\s*(?:\{\s*(\^\\circ) \s*\}|(?=\^\\circ))")
# An empty group that holds a sign, `{}^\circ`, a wrapper without braces, `\mathrm \pi`, and what
# siunitx measures.
_FACTORIAL_BEFORE = re.compile(r"([0-9]+!) =")
_EMPTY_GROUP = re.compile(r"\{\s*\}(?=\s*\^)")
_UNBRACED = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|sf|it)|rm|bf)(?![A-Za-z])(?!\s*\{)")
_MEASURED = re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{\\?([^{}\\]*)\}")
_EMPHASIS = re.compile(r"(\*{1,3}|`)([^*`]+)\1")
_DECIMAL_COMMA_OF_TEX = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_MONEY = re.compile(r"(-?)(\\\$|€)\s*(?=[0-9.])(.*)", re.DOTALL)
# No other command begins with `\quad`, so in `\quadx` a space was lost.
_SPACING = re.compile(
    r"~|(?<!\\)\\(?:[,;:! ]|q?quad|(?:thinspace|left|right|displaystyle)(?![A-Za-z]))"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|sf|tt)|mbox|num|number|ang|emph|underline|boldsymbol|bm|bf)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}|\{\s*\\bf\s+([^{}]*)\}"
)
# `12^\circ^2` is left unread: taking the sign out would make a square of it.
_DEGREE = re.compile(
    r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|(?<=\d)\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z]))(?!\s*\^)"
)
_DEGREE_WORD = re.compile(r"(?<=[\d})$\s])degrees?$")
_SMALL_O = re.compile(r"(?<=[0-9)}])\s*\^\s*(?:\{\s*o\s*\}|o)(?![A-Za-z])")
_IN_DEGREES = re.compile(rf"(?:{_DEGREE.pattern}|{_DEGREE_WORD.pattern})[\s$.]*$")
_BRACKETED_UNIT = re.compile(r"\s*\(\s*([^()\d\s][^()]{0,20}?)\s*\)$")
# what no unit can end is not searched for one
_MAY_BE_MEASURED = re.compile(r"[^\W\d_]\.?$|\^[^^]*$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")
# The name of a value: `x`, `AB`, `m \angle A`, `\angle 3`, `r_{1}`, `S_{\triangle ABC}`, `f(2)`,
# `area of the circle`.
NAME = (
    r"(?:(?i:area|circumference|diameter|height|length|measure|perimeter|radius|volume)\s+of\s*(?:the\s+)?)?"
    r"(?:m\s*)?(?:\\(?:angle|overline|overrightarrow|vec|widehat|overarc|triangle)\s*)?"
    r"(?:[A-Z](?:\s+[A-Z])+|[A-Za-z]{1,16}|\{\s*[A-Za-z](?:\s*[A-Za-z]){0,3}\s*\}|\\(?:theta|alpha|beta|gamma|phi)"
    r"|(?<=angle)\s*\d{1,2}|(?<=angle )\d{1,2})"
    r"(?:_?\d|\s*\\triangle\s*[A-Z](?:\s*[A-Z]){2}|_(?:[A-Za-z]|\{(?:\s*\\triangle)?\s*[A-Za-z0-9]{1,16}\s*\}))?'?(?:\([A-Za-z0-9]{1,3}\))?"
)
_NAME_BEFORE = re.compile(rf"{NAME}\s*=(?!=)")
# The name of a value in a sentence: `The area is 12`.
_SENTENCE_NAME = re.compile(
    r"(?i:(?:the\s+)?(?:(?:total|surface|shaded)\s+)?(?:area|circumference|diameter|height|length|measure"
    r"|perimeter|radius|volume|angle|value|distance|width|side|slope)"
    rf"(?:\s+of\s+(?:the\s+)?{NAME})?\s+is)\s+(?:equal\s+to\s+)?(?=[-+]?[\d\\.(])"
)
# `about 12`, and `20\sqrt{3} (about 34.64)`.
_ABOUT = r"(?:(?i:approximately|about|approx\.?|roughly|around)\s+|(?:\\approx(?![A-Za-z])|≈)\s*)"
_APPROXIMATELY = re.compile(rf"^{_ABOUT}(?=[-+]?[\d\\.])")
_NEAR = re.compile(rf"(.*\S)\s*\(\s*{_ABOUT}([-+]?\d+(?:\.\d+)?[^()]{{0,20}})\)", re.DOTALL)
# What `AB = CD` and `\angle 1 = \angle 2` say of two figures is an equation, and neither is the
# name of a value.
FIGURE = re.compile(
    r"(?:m\s*)?\\(?:angle|overline|widehat|overarc|triangle)\s*\{?\s*(?:[A-Z](?:\s*[A-Z]){0,3}|[0-9]{1,2})\s*\}?"
    r"|[A-Z](?:\s*[A-Z]){1,3}"
)
_NO_UNKNOWN = rf"(?![a-z](?![A-Za-z])){NAME}"  # `x/y` is an expression
NAME_OF_VALUE = re.compile(
    rf"{NAME}(?::{NAME})*|\|{NAME}\||\\(?:sin|cos|tan)[\s(]?(?:\\angle\s?)?[A-Z]{{1,3}}\)?"
    rf"|{_NO_UNKNOWN}/{_NO_UNKNOWN}|\\frac\{{{_NO_UNKNOWN}\}}\{{{_NO_UNKNOWN}\}}"
)
# A value with its name; `|x|` is none, since two numbers have it.
NAMED_VALUE = re.compile(
    rf"(?!\|[a-z]\|)({NAME_OF_VALUE.pattern})(=|\\approx(?![A-Za-z])|≈)(?!\1$)([^=<>]+)"
)
_BARE_COMMAND = re.compile(r"(?<![A-Za-z\\])(sqrt|pi)(?![A-Za-z])")
# Fractions, roots and pi in one spelling: `\frac{1}{2}` for `\dfrac12`, `\sqrt{3}` for `sqrt3` and
# `√3`. An argument of a fraction without braces has to be one digit, one letter or `\pi`. All
# digits behind a root belong to it: TeX sets `\sqrt12` as a root of 1 beside a 2, which nobody
# means.
_ONE = r"(\d|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z]))"
_LAST = rf"{_ONE}(?!\d|\.\d)"
# Each with a word that stands in every text that it changes.
_COMMANDS = [
    (word, re.compile(pattern), replacement)
    for word, pattern, replacement in (
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("binom", r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        ("choose", r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        # The argument after `\log_2 8` and `\sin^2 30` would else stand beside a digit, like one of
        # two numbers.
        ("log", r"(\\log\s*_)\s*(\d)(?!\d|\.\d)", r"\1{\2}"),
        ("^", r"(\\(?:sin|cos|tan|sec|csc|cot)\s*\^)\s*(\d)(?!\d|\.\d)", r"\1{\2}"),
        ("surd", r"\\surd", r"\\sqrt"),
        ("sqrt", r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?)", r"\\sqrt\1{\2}"),
        ("sqrt", rf"\\sqrt\s*(\[[^\[\]]*\])?\s*{_LAST}", r"\\sqrt\1{\2}"),
        ("frac", rf"\\frac\s*{_ONE}\s*{_LAST}", r"\\frac{\1}{\2}"),
        ("frac", rf"\\frac\s*{_ONE}\s*\{{", r"\\frac{\1}{"),
        (
            "frac",
            rf"\\frac\s*(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*{_LAST}",
            r"\\frac\1{\2}",
        ),
        ("sqrt", r"\\sqrt\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})", r"\\sqrt{\1}"),
    )
]
# `$12` may be a stray dollar sign, so a sign counts only where there are cents.
CURRENCY = re.compile(
    r"(?P<sign>-?)\\?[$€£¥](?P<cents>[0-9]+\.[0-9]{2})|(?P<before>-?[0-9]+\.[0-9]{2})\\?[$€£¥]"
    r"|(?P<named>-?[0-9]+(?:\.[0-9]+)?) ?(?:dollars?|euros?)"
)
_SPACES = re.compile(r"\s+")
_SPACE = re.compile(" ")
_INLINE = re.compile(r"(?<!\\)\\[()]")
_DISPLAYED = re.compile(r"(?<!\\)\\[\[\]]")
_BOXED = re.compile(r"\\f?boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
# Words that say no more than that an answer follows, or stood before. None of them denies, offers a
# choice or counts.
_STOCK = (
    r"(?i:\b(?:therefore|thus|hence|so|then|finally|consequently|we|you|it|this|that|which|is|are|equals?|to|find|gets?"
    r"|have|has|obtain|conclude|see|know|gives?|yields?|must|be|the|our|my|your|final|correct|required|desired|answers?"
    r"|solutions?|values?|results?)\b[\s,:*]*)"
)
# A sentence of them around one formula between dollar signs, which may have its unit behind it, and
# runs over lines between double ones only. Every word can be read in one way only, so a long text
# costs no more than its length.
_SENTENCE = re.compile(
    rf"\**{_STOCK}*(?P<formula>\$\$[^$]+\$\$|\$[^$\n]+\$)"
    rf"(?P<unit>(?:(?!{_STOCK})[^\s$]++)?(?:\s++(?!{_STOCK})[^\s$]++)*+)\s*{_STOCK}*\.?"
)

# `1e3` and `1e-05` as programs print them, so never `9e0`. `2e-5` stays an expression with the
# unknown e.
_SCIENTIFIC = re.compile(
    r"(?!.*[eE][+-]?0+$)[+-]?(?:(?:[0-9]+(?:\.[0-9]+)?)(?:[eE][0-9]{1,2}|E[+-][0-9]{1,2}|e[+-]0[0-9])"
    r"|1(?:\.0+)?e[+-][0-9]{1,2}|[0-9]\.[0-9]+e[+-][0-9]{1,2})"
)
_TIMES_A_POWER = re.compile(
    r"([+-]?[1-9](?:\.[0-9]+)?)(?:\\cdot|\\times|\*)10\^(?:\{([+-]?[0-9]{1,2})\}|([0-9]))"
)
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
# Neither two answers nor thousands: `1000,99` and `0,125`. `3,5` may be two answers.
_DECIMAL_COMMA = re.compile(r"[+-]?(?:[1-9][0-9]{3,},[0-9]{1,2}|0,[0-9]{3,})")
_MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]{1,2})/([0-9]{1,2})")


def canonical(text: str) -> tuple[str, str]:
    r"""Return the canonical form of an answer of one value, and its unit, empty without one.

    `$2 \sqrt { 221 }\text{ cm}^2$.` gives `2\sqrt{221}` and `cm^2`. A name before the value is
    taken off.

    Raises `NotReadError` for text over `MAX_CHARS` and for control, bidirectional and zero-width
    characters, which can make an answer look like another one.
    """
    text = _without_sentence(_in_one_spelling(_single_formula(text)))
    name = _NAME_BEFORE.match(text)
    if name:
        value = text[name.end() :]
        # `AB = CD` says that two segments are equal: neither is a name for the other.
        are_figures = all(FIGURE.fullmatch(side.strip()) for side in (name[0][:-1], value))
        if not are_figures:
            text = _without_decoration(value)
    unit = ""
    if "circ" in text:
        temperature = TEMPERATURE.fullmatch(text)
        if temperature:
            return _spell_number(
                _without_idle_spaces(_without_decoration(temperature[1]))
            ), f"°{temperature[2]}"
    if "circ" in text or "deg" in text:
        # The degrees inside of `\sin 30^\circ` are no unit of the value.
        unit = DEGREE if _IN_DEGREES.search(text) and not _FUNCTION.search(text) else ""
        text = _DEGREE_WORD.sub(" ", _DEGREE.sub(" ", text)).strip()
    bracketed = _BRACKETED_UNIT.search(text) if text.endswith(")") else None  # 5 (cm)
    if bracketed:
        without_brackets = f"{text[: bracketed.start()]} {bracketed[1]}"
        if MEASURED.fullmatch(without_brackets):
            text = without_brackets
    money = _MONEY.fullmatch(text)
    if money:
        text = money[1] + money[3]
        unit = "euros" if money[2] == "€" else "dollars"
    # The first pattern is a quick test, since the second one is slow.
    measured = MEASURED.fullmatch(text) if _MAY_BE_MEASURED.search(text) else None
    if measured:
        text = measured[1]
        unit = measured[2]
    return _spell_number(_without_idle_spaces(_without_decoration(text))), unit


def whole(text: str) -> str:
    r"""Return the canonical form of an answer that may have several parts: `A(3,-4)`, `AB=4, CD=5`.

    All names, units and brackets stay. Raises `NotReadError` as `canonical` does.
    """
    text = _DOLLAR.sub(" ", _BOXED.sub(r" \1 ", _single_formula(text)))
    return _without_idle_spaces(
        _without_decoration(_DEGREE.sub(" ", _without_sentence(_in_one_spelling(text))))
    )


def _without_sentence(text: str) -> str:
    r"""Return `text` with `\approx` for words such as `about`, without `The area is` before it."""
    if "ppro" in text or "≈" in text or text[:1] in "aArR":
        text = _APPROXIMATELY.sub(r"\\approx ", text)
        near = _NEAR.fullmatch(text) if text.endswith(")") else None
        text = rf"{near[1]} \approx {near[2]}" if near else text
    return _SENTENCE_NAME.sub("", text) if " is " in text else text


def _single_formula(text: str) -> str:
    r"""Return `text` without the words or the box around a single formula.

    It is `9` for `The answer is $9$.`, for `\(9\)` and for `\boxed{9}`. Raises `NotReadError` for a
    text over `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise NotReadError("too_long")
    if not text.isascii():
        text = in_ascii(text)
    if "\x0c" in text:
        text = _FORM_FEED.sub(r"\\frac", text)
    text = _DISPLAYED.sub("$$", _INLINE.sub("$", _ESCAPED.sub(r"\\", text))).strip(" \t\n\r")
    sentence = _SENTENCE.fullmatch(text) if "$" in text else None
    if sentence and sentence["unit"]:
        text = sentence["formula"] + sentence["unit"]
    elif sentence:
        text = sentence["formula"].strip("$ \t\n\r")
    box = _BOXED.fullmatch(text) if "boxed" in text else None
    return box[1] if box else text


def _in_one_spelling(text: str) -> str:
    """Return `text` in one spelling, still with its name, degree signs and units.

    Each substitution runs only where a cheap test says that it may apply, since most answers are a
    plain number.
    """
    if not (text.isascii() and text.isprintable()):
        _refuse_hidden(text)
    if not text.isascii():
        text = _RAISED.sub(_spell_raised_digits, _SMALL.sub(_spell_raised_digits, text))
        text = _DOUBLE_RAISED.sub(r"\1", text.translate(_SYMBOLS))
    text = _THOUSANDS.sub(_join_thousands, text)
    if "." in text:
        text = replace_recurring_decimals(text)
    if "! =" in text:  # else `!=`
        text = _FACTORIAL_BEFORE.sub(r"(\1)=", text)
    if "{,}" in text:
        text = _DECIMAL_COMMA_OF_TEX.sub(".", text)
    if "\\" in text or "~" in text:
        text = _without_fonts(without_layout(text))
    if "^" in text and "o" in text:
        text = _SMALL_O.sub(r"^\\circ ", text)
    text = in_degrees(text)
    text = _BARE_COMMAND.sub(r"\\\1", text)
    if "\\" in text:
        for word, pattern, replacement in _COMMANDS:
            if word in text:
                text = pattern.sub(replacement, text)
    text = _without_decoration(text)
    if "$" in text and len(_DOLLAR.findall(text)) == 2 and "\n" not in text:
        text = _without_decoration(_DOLLAR.sub(" ", text))
    return text


def _refuse_hidden(text: str) -> None:
    """Raise `NotReadError` for characters that do not show, by their Unicode categories."""
    categories = (unicodedata.category(char) for char in text if char not in "\t\n\r")
    if not {"Cc", "Cf", "Cn", "Co", "Cs"}.isdisjoint(categories):
        raise NotReadError("hidden_characters")


def _without_fonts(text: str) -> str:
    r"""Return `text` without the spaces of LaTeX and the commands for fonts.

    `\textbf{5\text{ cm}}` becomes `5 cm`.
    """
    text = _SPACING.sub(" ", mark_upright_units(text))
    if "\\SI" in text or "\\qty" in text:
        text = _MEASURED.sub(r" \1 \2 ", text)
    text = _EMPTY_GROUP.sub("", text)
    wrapped = 1
    while wrapped:  # the innermost ones first
        text, wrapped = _TEXT.subn(r" \1\2 ", text)
    return _UNBRACED.sub(" ", text)


def _spell_raised_digits(match: re.Match[str]) -> str:
    r"""Return `^{-5}` for raised digits, `\frac{1}{2}` for `½`, and 3 for `③`."""
    text = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    above, slash, below = text.partition("\u2044")
    if slash:
        return rf"\frac{{{above}}}{{{below}}}"
    return f"^{{{text}}}" if match.re is _RAISED else f" {text} "


def _join_thousands(number: re.Match[str]) -> str:
    r"""Return a number without its thousands separators: `1,234` becomes `1234`.

    Right after a bracket, as in `(1,234)` or `\{1,234\}`, the comma stands between two entries, and
    the number stays as it is.
    """
    if number.string[: number.start()].rstrip().endswith(("(", "[", r"\{")):
        return number.group()
    return re.sub(r"\D", "", number.group())


def _without_decoration(text: str) -> str:
    """Return `text` without outer spaces, emphasis, dollar signs around it and a full stop.

    Two full stops stay, because `1..` is not the number 1.
    """
    text = text.strip()
    if text[:1] in {"*", "`"} and (emphasis := _EMPHASIS.fullmatch(text)):
        text = emphasis[2].strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def _spell_number(text: str) -> str:
    r"""Return a number in one spelling; any other text is returned as it is.

    `1e-05` and `1\cdot10^{-5}` become `0.00001`, the mixed number `1 1/2` becomes `1\frac{1}{2}`,
    `12 000` becomes `12000`, `1000,99` becomes `1000.99`, and `two` becomes `2`.
    """
    if _SPACED.fullmatch(text):
        return text.replace(" ", "")
    if _DECIMAL_COMMA.fullmatch(text):
        return text.replace(",", ".")
    if power := _TIMES_A_POWER.fullmatch(text):
        return f"{Decimal(f'{power[1]}e{power[2] or power[3]}'):f}"
    if _SCIENTIFIC.fullmatch(text):
        return f"{Decimal(text):f}"
    if text[:1].isalpha() and (digits := NUMBER_WORDS.get(text.lower())):
        return digits
    mixed = _MIXED.fullmatch(text)
    if mixed and 0 < int(mixed[2]) < int(mixed[3]):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return text


def _without_idle_spaces(text: str) -> str:
    r"""Return `text` without the spaces that separate nothing: `2 \sqrt { 3 }` becomes `2\sqrt{3}`.

    A space stays between two letters (`right triangle`), between two digits (`1 2`), and between a
    comma and a digit: `12, 130` must not become `12,130`, which would be a number with a thousands
    separator.
    """
    text = _SPACES.sub(" ", text.strip())

    def spacing(space: re.Match[str]) -> str:
        """Return a space where leaving it out would join two words or two numbers."""
        before = text[space.start() - 1]
        behind = text[space.end()]
        letters = before.isalpha() and behind.isalpha()
        digits = before in _DIGITS + "," and behind in _DIGITS
        return " " if letters or digits else ""

    return _SPACE.sub(spacing, text) if " " in text else text
