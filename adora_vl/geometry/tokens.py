r"""The words and signs of a response as tokens, each with its place in the text.

LaTeX, markdown and unicode come to one spelling: `\overline{AB}`, `**AB**` and `AB` are the points
A and B. No text is rewritten, so that a claim can be shown where it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TokenKind = Literal["number", "points", "word", "sign", "line", "end"]
MAX_TOKENS = 20_000  # later words and signs of a response are not read


@dataclass(frozen=True)
class ResponseToken:
    """A word, a number, points or a sign of a response.

    Attributes:
        kind: `number`; `points`, capital letters that stand together; `word`, small letters;
            `sign`; `line`, a new line; `end`, behind the last one.
        text: The token in the one spelling.
        start: Its place in the text.
        end: The place behind it.
        is_apart: Whether space, or the edge of a formula, stands before it.
        is_math: Whether it stands in a formula of LaTeX.
    """

    kind: TokenKind
    text: str
    start: int
    end: int
    is_apart: bool = False
    is_math: bool = False


_ARC = r"\\(?:widehat|overarc|wideparen|arc)|\\(?:overset|stackrel)\s*\{?\\(?:frown|smile)\}?"
_BEFORE_MEASURE = rf"\(?\s*(?:\\(?:measured)?angle|∠|{_ARC}|(?:arc|angle|minor|major)\b)"
# The commonest words of Chinese responses, as the English ones that the grammar reads. A measure
# stands behind its name there ("the AB's length is 5"), so that only words that change nothing are
# passed over: an area or a perimeter stays unread.
_CHINESE_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("chinese", "whether", "是否"),
    ("chinese", "if", "如果|假设|假如|若"),
    ("chinese", "let", "设|令"),
    ("chinese", "not", "不等于|不是|并非|不"),
    ("chinese", "maybe", "可能|也许|大概|应该|猜"),
    ("sign", ";", "求得|解得|可得|得到|得出|得|即|所以|因此|因为|由于"),
    ("chinese", "find", "求"),
    ("sign", "=", "的?(?:度数|长度|长|大小|值)?(?:约?等于|约?为|约?是)"),
    ("sign", "∥", "平行于"),
    ("sign", "⊥", "垂直于"),
    ("chinese", "triangle", "三角形"),
    ("chinese", "angle", "(?<![直三平])角(?=[A-Z0-9])"),
    ("chinese", "arc", "弧(?=[A-Z])"),
    ("sign", "°", "度"),
    ("sign", ".", "。"),
    ("sign", ",", "[，、]"),
    ("sign", ";", "；"),
    ("sign", ":", "："),
    ("sign", "?", "？"),
)
# Patterns in the order in which they are tried, with what they stand for. An empty text is passed
# over. `group` opens a bracket of LaTeX that shows nothing, such as that of `\text{...}`.
_TOKEN_PATTERNS: tuple[tuple[str, str, str], ...] = (
    # The letter of a choice in a box, `\textbf{(B) }`, is no part of a value.
    ("skip", "", r"\\text(?:bf|rm|it)?\s*\{\s*\(?[A-E][).:]?\s*\\?\s*\}(?=\\?\s*\S)"),
    # A drawing is no working.
    ("line", "\n", r"\[asy\].*?(?:\[/asy\]|\Z)"),
    ("edge", "", r"\\[()\[\]]|\$\$?"),
    ("line", "\n", r"\\\\|\\newline|\\begin\s*\{[a-z*]+\}|\\end\s*\{[a-z*]+\}|```[a-z]*"),
    ("skip", "", r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-z])|\\[,;:! ]|\\q?quad"),
    ("skip", "", r"&|~(?=\\)|\*\*|__|`|\{\}(?=\s*\^)"),
    ("sign", "°", r"\^\s*\{\s*\\(?:circ|degrees?)\s*\}|\^\s*\\(?:circ|degrees?)(?![a-z])"),
    ("sign", "°", r"\\degrees?(?![a-z])|\\circ(?![a-z])|[°º˚]"),
    ("word", "arc", _ARC + r"|⌒"),
    # The m of `m\angle ABC` is no letter, nor that of `\text{m}\angle ABC`.
    ("skip", "", rf"(?<![A-Za-z\\])m\s*(?={_BEFORE_MEASURE})"),
    ("skip", "", rf"\\(?:text|mathrm|rm)\s*\{{\s*m\s*\}}\s*(?={_BEFORE_MEASURE})"),
    ("word", "angle", r"\\m?(?:measured)?angle(?![a-z])|∠"),
    ("word", "triangle", r"\\(?:big)?triangle(?![a-z])|[△∆]|\\Delta(?=\s*[A-Z])|Δ(?=\s*[A-Z])"),
    ("word", "circle", r"\\(?:big)?odot(?![a-z])|⊙"),
    ("sign", "∥", r"\\parallel(?![a-z])|\\\||∥|\|\||(?<=[A-Z] )//(?= ?[A-Z])"),
    ("sign", "⊥", r"\\perp(?![a-z])|⊥"),
    ("sign", "≈", r"\\approx(?![a-z])|\\simeq|\\doteq|≈|≒|≃"),
    ("sign", "≅", r"\\cong(?![a-z])|≅"),
    ("sign", "=", r"\\equiv(?![a-z])|≡"),
    ("sign", "~", r"\\sim(?![a-z])|∼|~"),
    ("sign", "≠", r"\\neq?(?![a-z])|≠|!="),
    ("sign", "<", r"\\(?:l|g)(?:e|eq|t)(?:slant)?(?![a-z])|[<>≤≥]=?"),
    ("sign", ";", r"\\(?:therefore|because|implies|iff|to|(?:long)?(?:left)?rightarrow)(?![a-z])"),
    ("sign", ";", r"\\(?:Long)?(?:left)?[Rr]ightarrow|[∴∵⇒→⟹⇔]|[=-]>"),
    ("sign", "*", r"\\times(?![a-z])|\\cdot(?![a-z])|\\ast(?![a-z])|[×·⋅∗]"),
    ("sign", "/", r"\\div(?![a-z])|÷"),
    ("sign", "-", r"[−–]"),
    ("sign", "±", r"\\pm(?![a-z])|±|\+/-"),
    ("word", "pi", r"\\pi(?![a-z])|π"),
    ("square", "2", r"²"),
    ("square", "3", r"³"),
    ("inverse", "-1", r"⁻¹"),
    ("word", "sqrt", r"\\sqrt(?![a-z])|√"),
    ("digits", "", r"\\[dt]?frac\s*\d\d(?!\d)"),
    ("word", "frac", r"\\[dtc]?frac(?![a-z])"),
    ("function", "", r"\\(?:arc)?(?:sin|cos|tan)(?![a-z])"),
    ("group", "", r"\\(?:overline|overleftrightarrow|overrightarrow|bar|vec|underline)\s*\{"),
    ("group", "", r"\\(?:text|mathrm|mathbf|operatorname|textbf|textit|mbox|boxed|fbox|rm)\s*\{"),
    ("skip", "", r"\\(?:overline|overleftrightarrow|overrightarrow|bar|rm|mathrm)(?![a-z])"),
    ("sign", "?", r"\\[A-Za-z]+|\\."),
    *_CHINESE_PATTERNS,
    ("number", "", r"\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"),
    ("points", "", r"(?:[A-Z](?![a-z])['′]?)+"),
    ("word", "", r"[A-Za-z]+(?:['’][a-z]+)?"),
    ("line", "\n", r"\n"),
    ("space", "", r"\s+"),
    ("sign", "", r"."),
)
_TOKEN_PATTERN = re.compile(
    "|".join(f"(?P<r{number}>{row[2]})" for number, row in enumerate(_TOKEN_PATTERNS)), re.S
)
_NUMBERED_LINE = re.compile(r"(?:^|(?<=\n))[ \t]*(?:\d{1,2}[.)]|[-*•+]|#+)[ \t]+(?=\S)")
_BRACES = {"{": 1, "}": -1}


def split_into_tokens(text: str) -> list[ResponseToken]:
    """Split a text into words and signs, at most `MAX_TOKENS`; what stands behind is left out."""
    reader = _Splitter(text)
    reader.run()
    return reader.tokens


class _Splitter:
    r"""Goes through a text once, from left to right, and collects its tokens.

    `is_apart` and `is_math` are those of the next token. `open_braces` has for each open brace
    whether it belongs to a command such as `\text`, so that nothing shows it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[ResponseToken] = []
        self.is_apart = True
        self.is_math = False
        self.open_braces: list[bool] = []

    def run(self) -> None:
        """Fill `tokens`: at each place the first pattern of the table that fits is taken.

        The number or bullet before an item of a list is passed over; it is no value.
        """
        position = 0
        numbered = {match.start(): match.end() for match in _NUMBERED_LINE.finditer(self.text)}
        while position < len(self.text) and len(self.tokens) < MAX_TOKENS:
            behind_number = numbered.get(position)
            if behind_number is not None:
                self.is_apart = True
                position = behind_number
                continue
            match = _TOKEN_PATTERN.match(self.text, position)
            assert match is not None, "the last row takes any sign"
            assert match.lastgroup is not None, "the last row takes any sign"
            kind, spelling, _ = _TOKEN_PATTERNS[int(match.lastgroup[1:])]
            self._take(kind, spelling or match[0], match)
            position = match.end()

    def _take(self, kind: str, spelling: str, match: re.Match[str]) -> None:
        """Add what one pattern stands for: no token, one, or several.

        `kind` and `spelling` stand in the pattern's row of the table. Where the row has no
        spelling, `spelling` is the text itself.
        """
        start = match.start()
        end = match.end()
        if kind in ("skip", "space", "edge"):
            if kind == "edge":
                self._pass_edge_of_formula(match[0])
            self.is_apart = self.is_apart or kind != "skip"
            return
        if kind == "group":
            self.open_braces.append(True)
            return
        if spelling in _BRACES and self._is_invisible(spelling):
            return
        # `\frac12` is one half: the two digits behind the command are its two parts.
        if kind == "digits":
            digits = re.findall(r"\d", match[0])
            self._add("word", "frac", start, end - 2)
            self._add("number", digits[0], end - 2, end - 1)
            self._add("number", digits[1], end - 1, end)
        elif kind in ("square", "inverse"):
            self._add("sign", "^", start, end)
            self._add("number", spelling, start, end)
        elif kind == "function":
            self._add("word", match[0][1:], start, end)
        elif kind == "line":
            self._add("line", "\n", start, end)
            self.is_apart = True
        elif kind == "points":
            self._add("points", spelling.replace("′", "'"), start, end)
        elif kind == "number":
            self._add("number", spelling, start, end)
        elif kind in ("word", "chinese"):
            self._add_word(spelling, start, end, is_chinese=kind == "chinese")
        else:
            self._add("sign", spelling, start, end)

    def _pass_edge_of_formula(self, sign: str) -> None:
        """Set `is_math` behind a sign that opens or closes a formula of LaTeX."""
        if "$" in sign:
            # A dollar sign opens a formula, or closes the one that is open.
            self.is_math = not self.is_math
        else:
            self.is_math = sign in ("\\(", "\\[")

    def _add_word(self, spelling: str, start: int, end: int, *, is_chinese: bool) -> None:
        """Add a word. Chinese ones stand apart from their neighbours without a space."""
        self.is_apart = self.is_apart or is_chinese
        self._add("word", spelling.replace("’", "'"), start, end)
        self.is_apart = is_chinese

    def _is_invisible(self, brace: str) -> bool:
        """Tell whether a brace belongs to a command of LaTeX that shows nothing itself."""
        if brace == "{":
            # The brace of `\widehat{AB}`, whose command has been read as a word.
            is_invisible = bool(self.tokens) and self.tokens[-1].text == "arc"
            self.open_braces.append(is_invisible)
            return is_invisible
        return self.open_braces.pop() if self.open_braces else False

    def _add(self, kind: TokenKind, text: str, start: int, end: int) -> None:
        """Add a token; the next one stands close to it unless a space comes between them."""
        self.tokens.append(
            ResponseToken(
                kind=kind,
                text=text,
                start=start,
                end=end,
                is_apart=self.is_apart,
                is_math=self.is_math,
            )
        )
        self.is_apart = False
