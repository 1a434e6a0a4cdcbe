r"""Brings an answer to its canonical form, without the decorations that do not matter.

Every substitution puts a space where it takes something out, and a space between two digits stays,
so that no decoration can glue `1` and `2` into `12`. Source: the grading policy, points 2, 6 and 7.
"""

import re
import unicodedata
from decimal import Decimal

from adora_vl.rewards.full_width import spell_in_ascii
from adora_vl.rewards.grammar import ParseError
from adora_vl.rewards.markup import without_layout
from adora_vl.rewards.numerals import (
    DIGITS_BY_NUMBER_WORD,
    minutes_to_degrees,
    replace_recurring_decimals,
)
from adora_vl.rewards.units import (
    DEGREE_SIGN,
    MEASURED_VALUE_PATTERN,
    TEMPERATURE_PATTERN,
    mark_upright_units,
)
from adora_vl.rewards.value_names import (
    FIGURE_NAME_PATTERN,
    LEADING_NAME_PATTERN,
    TRIGONOMETRIC_COMMAND,
    without_words_around_value,
)

_DIGITS_AND_POINT = "0123456789."
_DOLLAR_SIGN_PATTERN = re.compile(r"(?<!\\)\$")
# The Unicode categories of characters that do not show: controls, formats (such as zero-width and
# bidirectional characters), unassigned, private-use and surrogate characters.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs"})

_LATEX_BY_SYMBOL = str.maketrans(
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
_THOUSANDS_SEPARATOR = r"(?:,\\! ?|,|\{,\}|\\,|\\!|[\u2009\u202f])"
_NUMBER_WITH_THOUSANDS_PATTERN = re.compile(
    rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_THOUSANDS_SEPARATOR}\d{{3}})+(?!\d|{_THOUSANDS_SEPARATOR})",
    re.ASCII,
)
# Careless escaping turns `\left(` into `\\left(`, and `\frac` into a form feed with `rac` behind
# it.
_DOUBLE_BACKSLASH_PATTERN = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|left|right|text|pi|infty|cdot)(?![A-Za-z]))"
)
_FORM_FEED_OF_FRAC_PATTERN = re.compile(r"\\?\x0crac(?=\s*\{)")
# Raised digits and signs (`⁻²`), fractions in one character (`½`), and numbers in circles (`③`).
_RAISED_DIGITS_PATTERN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_ONE_CHARACTER_NUMBER_PATTERN = re.compile("[¼½¾⅐-⅞①-⑳]")
_TWICE_RAISED_DEGREE_PATTERN = re.compile(r"\^\s*(?:\{\s*(\^\\circ) \s*\}|(?=\^\\circ))")
# An empty group that holds a sign, `{}^\circ`, a wrapper without braces, `\mathrm \pi`, and what
# siunitx measures.
_FACTORIAL_BEFORE_EQUALS_PATTERN = re.compile(r"([0-9]+!) =")
_EMPTY_BRACES_PATTERN = re.compile(r"\{\s*\}(?=\s*\^)")
_FONT_WITHOUT_BRACES_PATTERN = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|sf|it)|rm|bf)(?![A-Za-z])(?!\s*\{)"
)
_SIUNITX_PATTERN = re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{\\?([^{}\\]*)\}")
_MARKDOWN_EMPHASIS_PATTERN = re.compile(r"(\*{1,3}|`)([^*`]+)\1")
_BRACED_COMMA_PATTERN = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_LEADING_CURRENCY_SIGN_PATTERN = re.compile(
    r"(?P<minus>-?)(?P<currency>\\\$|€)\s*(?=[0-9.])(?P<amount>.*)", re.DOTALL
)
# No other command begins with `\quad`, so in `\quadx` a space was lost.
_SPACING_COMMAND_PATTERN = re.compile(
    r"~|(?<!\\)\\(?:[,;:! ]|$|q?quad|(?:thinspace|left|right|displaystyle)(?![A-Za-z]))"
)
_FONT_WITH_BRACES_PATTERN = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|sc|md|normal)?|math(?:rm|bf|sf|tt|it|normal)|[mhf]box|framebox|num|number|ang"
    r"|emph|underline|boldsymbol|pmb|bm|bf)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}|\{\s*\\bf\s+([^{}]*)\}"
)
# `12^\circ^2` is left unread: taking the sign out would make a square of it.
_DEGREE_SIGN_PATTERN = re.compile(
    r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|(?<=\d)\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z]))(?!\s*\^)"
)
_DEGREES_AT_THE_END_PATTERN = re.compile(r"(?<=[\d})$\s])degrees?$")
_RAISED_O_PATTERN = re.compile(r"(?<=[0-9)}])\s*\^\s*(?:\{\s*o\s*\}|o)(?![A-Za-z])")
_ENDS_IN_DEGREES_PATTERN = re.compile(
    rf"(?:{_DEGREE_SIGN_PATTERN.pattern}|{_DEGREES_AT_THE_END_PATTERN.pattern})[\s$.]*$"
)
_BRACKETED_UNIT_PATTERN = re.compile(r"\s*\(\s*([^()\d\s][^()]{0,20}?)\s*\)$")
# A quick test: a text with a unit ends in a letter, in `m2` or `m3`, or has a power near its end.
_MAY_END_IN_UNIT_PATTERN = re.compile(r"[^\W\d_]\.?$|m[23]\.?$|\^[^^]*$")
_TRIGONOMETRIC_FUNCTION_PATTERN = re.compile(rf"{TRIGONOMETRIC_COMMAND}(?![A-Za-z])")
_COMMAND_WITHOUT_BACKSLASH_PATTERN = re.compile(r"(?<![A-Za-z\\])(sqrt|pi)(?![A-Za-z])")
# Fractions, roots and pi in one spelling: `\frac{1}{2}` for `\dfrac12`, `\sqrt{3}` for `sqrt3` and
# `√3`. An argument of a fraction without braces has to be one digit, one letter or `\pi`. All
# digits behind a root belong to it: TeX sets `\sqrt12` as a root of 1 beside a 2, which nobody
# means.
_SHORT_ARGUMENT = r"(\d|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z]))"
_LAST_SHORT_ARGUMENT = rf"{_SHORT_ARGUMENT}(?!\d|\.\d)"
# Each entry is a word, a pattern and its replacement. The word occurs in every text that the
# pattern changes, so that the search for the word saves most runs of the pattern.
_COMMAND_SUBSTITUTIONS = [
    (word, re.compile(pattern), replacement)
    for word, pattern, replacement in (
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("binom", r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (
            "binom",
            rf"\\binom\s*{_SHORT_ARGUMENT}\s*{_LAST_SHORT_ARGUMENT}",
            r"\\binom{\1}{\2}",
        ),
        (
            "over",
            r"\{((?:[^{}]|\{[^{}]*\})*)\\over(?![A-Za-z])((?:[^{}]|\{[^{}]*\})*)\}",
            r"\\frac{\1}{\2}",
        ),
        ("choose", r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        # The argument after `\log_2 8` and `\sin^2 30` would else stand beside a digit, like one of
        # two numbers.
        ("log", r"(\\log\s*_)\s*(\d)(?!\d|\.\d)", r"\1{\2}"),
        ("^", rf"({TRIGONOMETRIC_COMMAND}\s*\^)\s*(\d)(?!\d|\.\d)", r"\1{\2}"),
        ("surd", r"\\surd", r"\\sqrt"),
        ("sqrt", r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?)", r"\\sqrt\1{\2}"),
        ("sqrt", rf"\\sqrt\s*(\[[^\[\]]*\])?\s*{_LAST_SHORT_ARGUMENT}", r"\\sqrt\1{\2}"),
        ("frac", rf"\\frac\s*{_SHORT_ARGUMENT}\s*{_LAST_SHORT_ARGUMENT}", r"\\frac{\1}{\2}"),
        ("frac", rf"\\frac\s*{_SHORT_ARGUMENT}\s*\{{", r"\\frac{\1}{"),
        (
            "frac",
            rf"\\frac\s*(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*{_LAST_SHORT_ARGUMENT}",
            r"\\frac\1{\2}",
        ),
        ("sqrt", r"\\sqrt\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})", r"\\sqrt{\1}"),
    )
]
# Braces around one sign, letter, root or fraction beside a number: `36{\pi}`, `8{.}4`, `{-}3`. TeX
# shows the same without them. Two numbers, as in `1{2}`, may be a misprint of something else.
_NEEDLESS_BRACES_PATTERN = re.compile(
    r"(?:(?<=[0-9+\-*/=(])|(?<=[0-9+\-*/=(] )|^)\{\s*(\\pi|\\circ|[-+.]|[a-z]|\\sqrt\s*\{[^{}]*\}"
    r"|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})\s*\}"
)
# A dash before a number is a minus sign. Between two numbers it is the word "to".
_DASH_FOR_MINUS_PATTERN = re.compile(r"(?:(?<=[=(,\[{$])|^)(\s*)[–—](?=\s*[\d.\\])")
# `$12` may be a stray dollar sign, so a sign counts only where there are cents.
MONEY_PATTERN = re.compile(
    r"(?P<minus>-?)\\?[$€£¥](?P<after_sign>[0-9]+\.[0-9]{2})"
    r"|(?P<before_sign>-?[0-9]+\.[0-9]{2})\\?[$€£¥]"
    r"|(?P<before_word>-?[0-9]+(?:\.[0-9]+)?) ?(?:dollars?|euros?)"
)
_SPACES_PATTERN = re.compile(r"\s+")
_ONE_SPACE_PATTERN = re.compile(" ")
_INLINE_MATH_BRACKET_PATTERN = re.compile(r"(?<!\\)\\[()]")
_DISPLAY_MATH_BRACKET_PATTERN = re.compile(r"(?<!\\)\\[\[\]]")
_BOXED_PATTERN = re.compile(r"\\f?boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
# Words of a sentence such as `Therefore the answer is` that add nothing to the answer in it. None
# of them negates (`not`), offers alternatives (`or`) or is a number (`two`).
_STOCK_WORD = (
    r"(?i:\b(?:therefore|thus|hence|so|then|finally|consequently|we|you|it|this|that|which|is|are|equals?|to|find|gets?"
    r"|have|has|obtain|conclude|see|know|gives?|yields?|must|be|the|our|my|your|final|correct|required|desired|answers?"
    r"|solutions?|values?|results?)\b[\s,:*]*)"
)
# A sentence of stock words around one formula in dollar signs, with or without a unit behind it:
# `The area is $9$ cm.` Only a formula in `$$` may have line breaks. The pattern is unambiguous, so
# that its time is linear in the length of the text. The words of the unit are an atomic group,
# since early versions of Python 3.11, such as Debian's 3.11.2, match a group with `*+` wrongly.
_SENTENCE_AROUND_FORMULA_PATTERN = re.compile(
    rf"\**{_STOCK_WORD}*(?P<formula>\$\$[^$]+\$\$|\$[^$\n]+\$)"
    rf"(?P<unit>(?:(?!{_STOCK_WORD})[^\s$]++)?(?>(?:\s++(?!{_STOCK_WORD})[^\s$]++)*))\s*{_STOCK_WORD}*\.?"
)

# `1e3` and `1e-05` as programs print them, so never `9e0`. `2e-5` stays an expression with the
# unknown e.
_SCIENTIFIC_NOTATION_PATTERN = re.compile(
    r"(?!.*[eE][+-]?0+$)[+-]?(?:(?:[0-9]+(?:\.[0-9]+)?)(?:[eE][0-9]{1,2}|E[+-][0-9]{1,2}|e[+-]0[0-9])"
    r"|1(?:\.0+)?e[+-][0-9]{1,2}|[0-9]\.[0-9]+e[+-][0-9]{1,2})"
)
_TIMES_POWER_OF_TEN_PATTERN = re.compile(
    r"(?P<factor>[+-]?[1-9](?:\.[0-9]+)?)(?:\\cdot|\\times|\*)10"
    r"\^(?:\{(?P<braced_exponent>[+-]?[0-9]{1,2})\}|(?P<exponent>[0-9]))"
)
_THOUSANDS_BY_SPACES_PATTERN = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
# Neither two answers nor thousands: `1000,99` and `0,125`. `3,5` may be two answers.
_DECIMAL_COMMA_PATTERN = re.compile(r"[+-]?(?:[1-9][0-9]{3,},[0-9]{1,2}|0,[0-9]{3,})")
_MIXED_NUMBER_PATTERN = re.compile(r"([+-]?[0-9]+) ([0-9]{1,2})/([0-9]{1,2})")


def canonical_value_and_unit(text: str) -> tuple[str, str]:
    r"""Return the canonical form of an answer of one value, and its unit, empty without one.

    `$2 \sqrt { 221 }\text{ cm}^2$.` gives `2\sqrt{221}` and `cm^2`. A name before the value is
    taken off: `AB = 5` gives `5`.

    `text` has at most `MAX_CHARS` characters. Raises `ParseError` for control, bidirectional and
    zero-width characters, which can make one answer look like another.
    """
    text = _unwrap_formula(text)
    text = _unify_spelling(text)
    text = without_words_around_value(text)
    text = _without_leading_name(text)
    value, unit = _split_unit(text)
    value = _strip_decoration(value)
    value = _strip_needless_spaces(value)
    return _unify_number_spelling(value), unit


def _split_unit(text: str) -> tuple[str, str]:
    """Return the value in a text and its unit, which is empty without one.

    Units are looked for in this order: degrees of temperature (`30°C`), a unit in letters (`5 cm`),
    a currency sign (`€5`), and degrees of an angle (`30°`).
    """
    # A letter behind the degree sign tells degrees of temperature from those of an angle.
    temperature = TEMPERATURE_PATTERN.fullmatch(text)
    if temperature:
        return temperature[1], f"°{temperature[2]}"
    # The degrees inside of `\sin 30^\circ` are no unit of the value.
    has_function = _TRIGONOMETRIC_FUNCTION_PATTERN.search(text) is not None
    has_degrees = _ENDS_IN_DEGREES_PATTERN.search(text) is not None and not has_function
    text = _DEGREE_SIGN_PATTERN.sub(" ", text)  # `30°`
    text = _DEGREES_AT_THE_END_PATTERN.sub(" ", text).strip()  # `30 degrees`
    text = _without_brackets_of_unit(text)
    money = _LEADING_CURRENCY_SIGN_PATTERN.fullmatch(text)
    if money:
        text = money["minus"] + money["amount"]
    # The first pattern is a quick test, since the second one is slow.
    may_have_unit = _MAY_END_IN_UNIT_PATTERN.search(text)
    measured = MEASURED_VALUE_PATTERN.fullmatch(text) if may_have_unit else None
    if measured:
        return measured[1], measured[2]
    if money:
        return text, "euros" if money["currency"] == "€" else "dollars"
    return text, DEGREE_SIGN if has_degrees else ""


def _without_leading_name(text: str) -> str:
    """Return `text` without the name before its value: `5` for `AB = 5`.

    `AB = CD` stays, since it says that two segments are equal: neither is a name for the other.
    """
    # The match includes the sign, as in `AB =`.
    name = LEADING_NAME_PATTERN.match(text)
    if name is None:
        return text
    value = text[name.end() :]
    sides = (name[0].removesuffix("="), value)
    if all(FIGURE_NAME_PATTERN.fullmatch(side.strip()) for side in sides):
        return text
    return _strip_decoration(value)


def _without_brackets_of_unit(text: str) -> str:
    """Return `5 cm` for `5 (cm)`. Any other text is returned as it is."""
    unit = _BRACKETED_UNIT_PATTERN.search(text)
    if unit is None:
        return text
    without_brackets = f"{text[: unit.start()]} {unit[1]}"
    return without_brackets if MEASURED_VALUE_PATTERN.fullmatch(without_brackets) else text


def canonical_with_names(text: str) -> str:
    r"""Return the canonical form of an answer that may have several parts: `A(3,-4)`, `AB=4, CD=5`.

    All names, units and brackets stay. Raises `ParseError` as `canonical_value_and_unit` does.
    """
    text = _unwrap_formula(text)
    text = _BOXED_PATTERN.sub(r" \1 ", text)
    text = _DOLLAR_SIGN_PATTERN.sub(" ", text)
    text = _unify_spelling(text)
    text = without_words_around_value(text)
    text = _DEGREE_SIGN_PATTERN.sub(" ", text)
    text = _strip_decoration(text)
    return _strip_needless_spaces(text)


def _unwrap_formula(text: str) -> str:
    r"""Return `text` without the words or the box around a single formula.

    `The answer is $9$.`, `\(9\)` and `\boxed{9}` all give `9`. Any other text keeps its words.
    """
    if not text.isascii():
        text = spell_in_ascii(text)
    # Careless JSON turns `\frac` into a form feed and `rac`.
    text = _FORM_FEED_OF_FRAC_PATTERN.sub(r"\\frac", text)
    text = _DOUBLE_BACKSLASH_PATTERN.sub(r"\\", text)
    text = _INLINE_MATH_BRACKET_PATTERN.sub("$", text)
    text = _DISPLAY_MATH_BRACKET_PATTERN.sub("$$", text).strip(" \t\n\r")
    sentence = _SENTENCE_AROUND_FORMULA_PATTERN.fullmatch(text)
    if sentence and sentence["unit"]:
        text = sentence["formula"] + sentence["unit"]
    elif sentence:
        text = sentence["formula"].strip("$ \t\n\r")
    box = _BOXED_PATTERN.fullmatch(text)
    return box[1] if box else text


def _unify_spelling(text: str) -> str:
    r"""Return `text` in one spelling of LaTeX: `√3`, `\sqrt3` and `sqrt3` become `\sqrt{3}`.

    Names, degree signs and units stay. Raises `ParseError` for characters that do not show.
    """
    if not (text.isascii() and text.isprintable()):
        _refuse_hidden_characters(text)
    # The cheap tests below, such as `isascii`, save the patterns that could match nothing.
    if not text.isascii():
        text = _ONE_CHARACTER_NUMBER_PATTERN.sub(_spell_special_digits, text)
        text = _DASH_FOR_MINUS_PATTERN.sub(r"\1-", text)
        text = _RAISED_DIGITS_PATTERN.sub(_spell_special_digits, text)
        text = _TWICE_RAISED_DEGREE_PATTERN.sub(r"\1", text.translate(_LATEX_BY_SYMBOL))
    text = _NUMBER_WITH_THOUSANDS_PATTERN.sub(_join_thousands, text)
    text = replace_recurring_decimals(text)
    # Without brackets `5! = 120` would become `5!=120`, an inequality.
    text = _FACTORIAL_BEFORE_EQUALS_PATTERN.sub(r"(\1)=", text)
    text = _BRACED_COMMA_PATTERN.sub(".", text)
    if "\\" in text or "~" in text:
        text = _without_fonts_and_spacing(without_layout(text))
    text = _RAISED_O_PATTERN.sub(r"^\\circ ", text)  # `30^o`
    text = minutes_to_degrees(text)
    text = _COMMAND_WITHOUT_BACKSLASH_PATTERN.sub(r"\\\1", text)
    if "\\" in text:
        for word, pattern, replacement in _COMMAND_SUBSTITUTIONS:
            if word in text:
                text = pattern.sub(replacement, text)
    if "{" in text:
        text = _NEEDLESS_BRACES_PATTERN.sub(r"\1", text)
    text = _strip_decoration(text).replace(":=", "=")
    has_one_formula = len(_DOLLAR_SIGN_PATTERN.findall(text)) == 2
    if has_one_formula and "\n" not in text:
        text = _strip_decoration(_DOLLAR_SIGN_PATTERN.sub(" ", text))
    return text


def _refuse_hidden_characters(text: str) -> None:
    """Raise `ParseError` for characters that do not show, by their Unicode categories."""
    categories = {unicodedata.category(char) for char in text if char not in "\t\n\r"}
    if categories & _HIDDEN_CATEGORIES:
        raise ParseError("hidden_characters")


def _without_fonts_and_spacing(text: str) -> str:
    r"""Return `text` without the spaces of LaTeX and the commands for fonts.

    `\textbf{5\text{ cm}}` becomes `5 cm`.
    """
    text = _SPACING_COMMAND_PATTERN.sub(" ", mark_upright_units(text))
    text = _SIUNITX_PATTERN.sub(r" \1 \2 ", text)
    text = _EMPTY_BRACES_PATTERN.sub("", text)
    replaced_count = 1
    while replaced_count:  # each pass replaces the innermost commands
        text, replaced_count = _FONT_WITH_BRACES_PATTERN.subn(r" \1\2 ", text)
    return _FONT_WITHOUT_BRACES_PATTERN.sub(" ", text)


def _spell_special_digits(match: re.Match[str]) -> str:
    r"""Return `^{-5}` for raised digits, `\frac{1}{2}` for `½`, and 3 for `③`."""
    text = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    numerator, fraction_slash, denominator = text.partition("\u2044")
    if fraction_slash:
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return f"^{{{text}}}" if match.re is _RAISED_DIGITS_PATTERN else f" {text} "


def _join_thousands(number: re.Match[str]) -> str:
    r"""Return a number without its thousands separators: `1,234` becomes `1234`.

    Right after a bracket, as in `(1,234)` or `\{1,234\}`, the comma stands between two entries, and
    the number stays as it is.
    """
    if number.string[: number.start()].rstrip().endswith(("(", "[", r"\{")):
        return number.group()
    return re.sub(r"\D", "", number.group())


def _strip_decoration(text: str) -> str:
    """Return `text` without the spaces, emphasis, dollar signs and full stop around it.

    `**5**`, `5.` and `$5.$` become `5`. Two full stops stay, because `1..` is not the number 1.
    """
    text = text.strip()
    emphasis = _MARKDOWN_EMPHASIS_PATTERN.fullmatch(text)
    if emphasis:
        text = emphasis[2].strip()
    text = _strip_full_stop(text)
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    return _strip_full_stop(text)  # `$5.$` has it inside


def _strip_full_stop(text: str) -> str:
    """Return `text` without one full stop at its end. Two full stops stay."""
    if text.endswith(".") and not text.endswith(".."):
        return text[:-1].rstrip()
    return text


def _unify_number_spelling(text: str) -> str:
    r"""Return a number in one spelling; any other text is returned as it is.

    `1e-05` and `1\cdot10^{-5}` become `0.00001`, the mixed number `1 1/2` becomes `1\frac{1}{2}`,
    `12 000` becomes `12000`, `1000,99` becomes `1000.99`, and `two` becomes `2`.
    """
    if _THOUSANDS_BY_SPACES_PATTERN.fullmatch(text):
        return text.replace(" ", "")
    if _DECIMAL_COMMA_PATTERN.fullmatch(text):
        return text.replace(",", ".")
    product = _TIMES_POWER_OF_TEN_PATTERN.fullmatch(text)
    if product:
        exponent = product["braced_exponent"] or product["exponent"]
        number = Decimal(f"{product['factor']}e{exponent}")
        return f"{number:f}"
    if _SCIENTIFIC_NOTATION_PATTERN.fullmatch(text):
        return f"{Decimal(text):f}"
    mixed_number = _MIXED_NUMBER_PATTERN.fullmatch(text)
    if mixed_number:
        integer, numerator, denominator = mixed_number.groups()
        if 0 < int(numerator) < int(denominator):
            return rf"{integer}\frac{{{numerator}}}{{{denominator}}}"
    return DIGITS_BY_NUMBER_WORD.get(text.lower(), text)


def _strip_needless_spaces(text: str) -> str:
    r"""Return `text` without the spaces that separate nothing: `2 \sqrt { 3 }` becomes `2\sqrt{3}`.

    A space stays between two letters (`right triangle`), between two digits (`1 2`), and between a
    comma and a digit: `12, 130` must not become `12,130`, which would be a number with a thousands
    separator.
    """
    text = _SPACES_PATTERN.sub(" ", text.strip())

    def keep_needed_space(space: re.Match[str]) -> str:
        """Return a space where leaving it out would join two words or two numbers."""
        before = text[space.start() - 1]
        behind = text[space.end()]
        is_between_letters = before.isalpha() and behind.isalpha()
        is_between_digits = before in _DIGITS_AND_POINT + "," and behind in _DIGITS_AND_POINT
        return " " if is_between_letters or is_between_digits else ""

    return _ONE_SPACE_PATTERN.sub(keep_needed_space, text)
