r"""The formulas in the texts of a page, as MathML, which browsers show by themselves: nothing is loaded, nothing runs.

The texts come from data sets and models, so they are hostile. A formula becomes a tree of the elements and attributes
that are named here, and the page makes these one by one; links, styles and colours have no way into it. LaTeX that is
not understood stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import unescape
from importlib.util import find_spec
from typing import Any
from xml.etree.ElementTree import Element

# What the page looks for too, so that both find the same formulas: this expression means the same in Python and
# JavaScript. Every repetition has a bound, so no text can make it slow.
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,400}\}"
FORMULA = (
    r"\$\$[^$]{1,400}\$\$"
    r"|\$(?:\s[^$\n]{1,400}\s|[^\s$](?:[^$\n]{0,400}[^\s$])?)\$(?!\d)"  # but not `$5 and $6`, nor `$6. $`
    r"|\\\([^\n]{1,400}?\\\)"
    r"|\\\[[\s\S]{1,400}?\\\]"
    rf"|\\boxed\s?{_GROUP}"
    rf"|\\[A-Za-z]{{3,20}}(?:\s?{_GROUP}|\s(?:[A-Z]|\d{{1,9}})(?![A-Za-z\d])){{0,9}}"  # a command alone in prose
)
MAX_FORMULAS = 10_000  # different ones in a page; each takes a fifth of a millisecond and 50 bytes
_MAX_CHARACTERS, _MAX_NODES = 400, 1000
_DELIMITED = re.compile(r"\$\$([\s\S]*)\$\$|\$([\s\S]*)\$|\\\(([\s\S]*)\\\)|\\\[([\s\S]*)\\\]")
# Definitions could call one another, and a short text grow without end; a comment would hide the rest of its line.
_REFUSED = re.compile(r"\\(?:\w*def|let|futurelet|\w*command|Declare\w*|\w*environment|verb)(?![a-z])|(?<!\\)%")

_ELEMENTS = {
    "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup", "munder",
    "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "mphantom", "menclose", "mmultiscripts",
    "mprescripts", "none",
}  # fmt: skip
_ATTRIBUTES = {
    "accent": "true|false", "accentunder": "true|false", "displaystyle": "true|false", "fence": "true|false",
    "stretchy": "true|false", "separator": "true|false", "movablelimits": "true|false", "form": "prefix|infix|postfix",
    "mathvariant": "normal", "notation": "box", "scriptlevel": r"\+?\d", "columnalign": "(left|center|right| ){1,60}",
    "linethickness": "0|0em|0px|thin", "width": r"-?\d?\.?\d{1,4}em",
}  # fmt: skip

Tree = list[Any]  # [element, attributes, child or text, ...]


def formulas(texts: Iterable[str | None], whole: Iterable[str | None] = ()) -> dict[str, Tree]:
    """The trees of the formulas in `texts`, and of each of `whole` that is LaTeX altogether, by their source.

    The first `MAX_FORMULAS` different ones are looked at. Without the package latex2mathml there are none.
    """
    if find_spec("latex2mathml") is None:  # an environment from before it was needed still gets its page
        return {}
    found: dict[str, Tree | None] = {}
    pattern = re.compile(FORMULA)
    for text in whole:
        if text and len(found) < MAX_FORMULAS and text not in found and re.search(r"[\\^_]", text):
            found[text] = mathml(text)
    for text in texts:
        for match in pattern.finditer(text or ""):
            if len(found) >= MAX_FORMULAS:
                break
            if match[0] not in found:
                found[match[0]] = mathml(match[0])
    return {source: tree for source, tree in found.items() if tree is not None}


def mathml(source: str) -> Tree | None:
    """The formula as a tree; None if it is not understood as a whole."""
    from latex2mathml.converter import convert_to_element

    delimited = _DELIMITED.fullmatch(source)
    latex = next(part for part in delimited.groups() if part is not None) if delimited else source
    if not latex.strip() or len(latex) > _MAX_CHARACTERS or _REFUSED.search(latex):
        return None
    block = source.startswith(("$$", "\\["))
    try:
        element = convert_to_element(latex, display="block" if block else "inline")
        tree = [_plain(child, [_MAX_NODES]) for child in element]
    except Exception:  # it raises many kinds for what it cannot read, and one that is not understood is shown as it is
        return None
    return ["math", {"display": "block"} if block else {}, *tree]


def _plain(element: Element, left: list[int]) -> Tree:
    """The element with what is allowed of it. `left`: how many more a formula may have. Raises `ValueError`."""
    text = unescape(element.text or "")
    left[0] -= 1
    unknown = element.tag == "mi" and (text.startswith("\\") or text == "&")
    struck = element.tag == "menclose" and element.get("notation") != "box"
    if element.tag not in _ELEMENTS or left[0] < 0 or unknown or struck:
        raise ValueError(element.tag)
    attributes = {
        name: value
        for name, value in element.attrib.items()
        if name in _ATTRIBUTES and re.fullmatch(_ATTRIBUTES[name], value)
    }
    return [element.tag, attributes, *([text] if text else []), *(_plain(child, left) for child in element)]
