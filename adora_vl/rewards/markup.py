r"""Removes the commands of LaTeX that say how an answer looks and not what it is.

These are sizes, colours, spaces, and an environment around a single line.
"""

import re

# Sizes, a colour or a length with its argument, and a colour of what follows in braces.
_UNSHOWN_COMMAND_PATTERN = re.compile(
    r"\\(?:[bB]igg?[lrm]?|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|(?:text|script|scriptscript)style|(?:math)?strut|hfill|enspace|enskip|nobreakspace|limits"
    r"|boldmath|bfseries|rmfamily|centering|tt|sf|it|sl|em)(?![A-Za-z])"
    r"|\\(?:[hv]space\*?|color|m?kern|m?skip)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}"
    r"|\\(?:textcolor|colorbox)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}(?=\s*\{)"
)
_MATH_CLASS_PATTERN = re.compile(r"\\math(?:bin|rel|ord|punct|op|inner|open|close)\s*\{([^{}]*)\}")
_OPERATOR_NAME_PATTERN = re.compile(r"\\(?:operatorname\*?|ensuremath)\s*\{([^{}]*)\}")
_ONE_LINE_ENVIRONMENT_PATTERN = re.compile(
    r"\s*\\begin\{(aligned|align|alignat|split|gathered|gather|equation|displaymath|math|array)(\*?)\}"
    r"(?:(?<=\{array\})\s*\{[clr]\})?"
    r"(?P<line>(?:(?!\\\\|\\begin|\\end).)*)(?:\\\\\s*)?\\end\{\1\2\}\s*",
    re.DOTALL,
)
# Lines that each say one value, as `x = 3 \\ y = -4` in `cases`.
_CASES_PATTERN = re.compile(r"\\begin\{cases\}((?:(?!\\begin|\\end).)*)\\end\{cases\}", re.DOTALL)
_NAMED_VALUE_PATTERN = re.compile(r"\s*[a-z]\s*&?=\s*&?[^=&,]+")
_ARC_COMMAND_PATTERN = re.compile(
    r"\\(?:overset|stackrel)\s*\{\s*\\frown\s*\}|\\(?:wideparen|overparen|overarc)(?=\s*\{)"
)
_UNIT_VECTOR_PATTERN = re.compile(r"\\(?:hat|vec)\s*\{\s*\\?([ijk])(?:math)?\s*\}")
_BAR_COMMAND_PATTERN = re.compile(r"\\(?:[lr]?vert|mid)(?![A-Za-z])|\\\|")
# Signs that a proof or a check has ended, behind the answer.
_END_MARK_PATTERN = re.compile(r"(?<!\s)\s*\\(?:checkmark|blacksquare|qed)(?![A-Za-z])\s*$")
# Other names of a command that is read, and words for signs of logic.
_COMMAND_BY_SYNONYM = {
    "measuredangle": r"\angle",
    "sphericalangle": r"\angle",
    "uppi": r"\pi",
    "nicefrac": r"\frac",
    "sfrac": r"\frac",
    "ell": " l",
    "lor": " or ",
    "vee": " or ",
    "land": " and ",
    "wedge": " and ",
    "coloneqq": "=",
    "deg": r"^\circ",
}
_SYNONYM_PATTERN = re.compile(rf"\\({'|'.join(_COMMAND_BY_SYNONYM)})(?![A-Za-z])")
_RAISED_TEXT_PATTERN = re.compile(r"\\textsuperscript\s*\{([^{}]*)\}")
_RAISED_DEGREE_PATTERN = re.compile(r"\^\s*\{\s*\\deg\s*\}")


def without_layout(text: str) -> str:
    r"""Return `text` with a space in the place of each command of layout.

    - `\textcolor{red}{\large 5}` becomes ` {  5}`
    - `\begin{aligned} x &= 3 \end{aligned}` becomes ` x  = 3 `
    - `\begin{cases} x = 3 \\ y = -4 \end{cases}` becomes `x = 3, y = -4`
    - `\measuredangle A` becomes `\angle A`, and `x = 3 \lor x = 7` becomes `x = 3 or x = 7`
    """
    environment = _ONE_LINE_ENVIRONMENT_PATTERN.fullmatch(text)
    if environment:
        text = environment["line"].replace("&", " ")
    text = _CASES_PATTERN.sub(_write_cases_as_list, text)
    text = _UNSHOWN_COMMAND_PATTERN.sub(" ", _END_MARK_PATTERN.sub("", text))
    text = _RAISED_DEGREE_PATTERN.sub(r"^\\circ ", text)
    text = _SYNONYM_PATTERN.sub(lambda synonym: f"{_COMMAND_BY_SYNONYM[synonym[1]]} ", text)
    text = _RAISED_TEXT_PATTERN.sub(r"^{\1}", text)
    text = _MATH_CLASS_PATTERN.sub(r"\1", text)
    text = _OPERATOR_NAME_PATTERN.sub(r" \1 ", text)
    text = _UNIT_VECTOR_PATTERN.sub(r" \1", text)
    text = text.replace(r"\colon", ":").replace(r"\textdegree", r"^\circ ")
    text = _ARC_COMMAND_PATTERN.sub(r"\\widehat", text)
    return _BAR_COMMAND_PATTERN.sub("|", text)


def _write_cases_as_list(cases: re.Match[str]) -> str:
    r"""Return the lines of `cases` as a list with commas, if each line is a name and its value.

    `x = 3 \\ y = -4` becomes `x = 3, y = -4`. Other `cases`, such as the branches of a function,
    stay as they are.
    """
    lines = cases[1].rstrip().removesuffix(r"\\").split(r"\\")
    if not all(_NAMED_VALUE_PATTERN.fullmatch(line) for line in lines):
        return cases[0]
    return ", ".join(line.replace("&", " ").strip() for line in lines)
