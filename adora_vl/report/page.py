"""The page of a run: one HTML file with curves, rollouts, and their formulas as MathML."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape, unescape
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from adora_vl.report.run_view import ROLLOUT, RunView
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file

# What the page looks for too, so that both find the same formulas: this expression means the same
# in Python and JavaScript. Every repetition has a bound, so no text can make it slow.
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,400}\}"
FORMULA = (
    r"\$\$[^$]{1,400}\$\$"
    # but not `$5 and $6`, nor `$6. $`
    r"|\$(?:\s[^$\n]{1,400}\s|[^\s$](?:[^$\n]{0,400}[^\s$])?)\$(?!\d)"
    r"|\\\([^\n]{1,400}?\\\)"
    r"|\\\[[\s\S]{1,400}?\\\]"
    rf"|\\boxed\s?{_GROUP}"
    # a command alone in prose
    rf"|\\[A-Za-z]{{3,20}}(?:\s?{_GROUP}|\s(?:[A-Z]|\d{{1,9}})(?![A-Za-z\d])){{0,9}}"
)
MAX_FORMULAS = 10_000  # different ones in a page; each takes a fifth of a millisecond and 50 bytes
_MAX_CHARACTERS = 400
_MAX_NODES = 1000
_DELIMITED = re.compile(r"\$\$([\s\S]*)\$\$|\$([\s\S]*)\$|\\\(([\s\S]*)\\\)|\\\[([\s\S]*)\\\]")
# Definitions could call one another, and a short text grow without end; a comment would hide the
# rest of its line.
_REFUSED = re.compile(
    r"\\(?:\w*def|let|futurelet|\w*command|Declare\w*|\w*environment|verb)(?![a-z])|(?<!\\)%"
)
_ELEMENTS = {
    "mrow",
    "mi",
    "mn",
    "mo",
    "mtext",
    "mspace",
    "mfrac",
    "msqrt",
    "mroot",
    "msub",
    "msup",
    "msubsup",
    "munder",
    "mover",
    "munderover",
    "mtable",
    "mtr",
    "mtd",
    "mstyle",
    "mpadded",
    "mphantom",
    "menclose",
    "mmultiscripts",
    "mprescripts",
    "none",
}
_ATTRIBUTES = {
    "accent": "true|false",
    "accentunder": "true|false",
    "displaystyle": "true|false",
    "fence": "true|false",
    "stretchy": "true|false",
    "separator": "true|false",
    "movablelimits": "true|false",
    "form": "prefix|infix|postfix",
    "mathvariant": "normal",
    "notation": "box",
    "scriptlevel": r"\+?\d",
    "columnalign": "(left|center|right| ){1,60}",
    "linethickness": "0|0em|0px|thin",
    "width": r"-?\d?\.?\d{1,4}em",
}
Tree = list[Any]  # [element, attributes, child or text, ...]


def formulas(texts: Iterable[str | None], whole: Iterable[str | None] = ()) -> dict[str, Tree]:
    """The trees of the first `MAX_FORMULAS` formulas in `texts`, and of `whole` that are LaTeX, by
    their source.
    """
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
    # it raises many kinds for what it cannot read, and one that is not understood is shown as it is
    except Exception:
        return None
    return ["math", {"display": "block"} if block else {}, *tree]


def _plain(element: Element, left: list[int]) -> Tree:
    """The element with what is allowed of it.

    `left`: how many more a formula may have. Raises `ValueError`.
    """
    text = unescape(element.text or "")
    left[0] -= 1
    unknown = element.tag == "mi" and (text.startswith("\\") or text == "&")
    struck = element.tag == "menclose" and element.get("notation") != "box"
    if element.tag not in _ELEMENTS or left[0] < 0 or unknown or struck:
        raise ValueError(element.tag)
    given = element.attrib.items()
    attributes = {
        name: value for name, value in given if re.fullmatch(_ATTRIBUTES.get(name, "(?!)"), value)
    }
    return [
        element.tag,
        attributes,
        *([text] if text else []),
        *(_plain(child, left) for child in element),
    ]


GENERATOR = "adora_vl report"  # marks a page that this module wrote
_VIEWER = Path(__file__).with_name("viewer")
_SCRIPTS = ("dom.js", "formulas.js", "charts.js", "curves.js", "groups.js", "detail.js", "main.js")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(data: Any) -> str:
    text = json.dumps(data, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(text, compresslevel=3, mtime=0)).decode()


def build_page(views: list[RunView], images: dict[str, str]) -> str:
    runs = [
        {
            "name": view.name,
            "result": view.result,
            "facts": view.facts,
            "notes": view.notes,
            "metrics": view.metrics,
            "groups": [
                {**group, "rollouts": [one[:-1] for one in group["rollouts"]]}
                for group in view.groups
            ],
            "problems": view.problems,
        }
        for view in views
    ]
    problems = [problem for view in views for problem in view.problems.values()]
    extracted = ROLLOUT.index("extracted")
    compared = ROLLOUT.index("compared")
    rollouts = [one for view in views for group in view.groups for one in group["rollouts"]]
    texts = [text for problem in problems for text in (problem["problem"], *problem["choices"])]
    answers = [*(problem["answer"] for problem in problems), *(one[extracted] for one in rollouts)]
    answers += [text for one in rollouts for pair in one[compared] or () for text in pair[:2]]
    math = formulas([*texts, *(one[-1] for one in rollouts)], answers)
    completions = [
        [one[-1] for group in view.groups for one in group["rollouts"]] for view in views
    ]
    style = (_VIEWER / "viewer.css").read_text(encoding="utf-8")
    script = "".join((_VIEWER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    parts = {
        "GENERATOR": GENERATOR,
        "POLICY": policy,
        "TITLE": escape(", ".join(view.name for view in views)),
        "STYLE": style,
        "DATA": _packed({"runs": runs, "rollout": ROLLOUT[:-1], "formula": FORMULA}),
        "TEXTS": _packed({"completions": completions, "images": images, "math": math}),
        "SCRIPT": script,
    }
    page = (_VIEWER / "page.html").read_text(encoding="utf-8")
    before, *pieces = page.split("{{")
    for piece in pieces:  # in one pass, so that no part is looked for in another
        name, _, rest = piece.partition("}}")
        before += parts[name] + rest
    return before


def write_page(page: str, path: Path) -> None:
    """Write the page at once.

    Raises `UserError` if `path` is a file of another kind, or cannot be written.
    """
    try:
        if (
            path.exists()
            and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]
        ):
            raise UserError(
                f"--output: {str(path)!r} is not a page that this command wrote; choose another "
                "name"
            )
        replace_file(path, page)
    except OSError as error:
        raise UserError(
            f"--output: {str(path)!r} cannot be written ({error.strerror}); choose another name"
        ) from error
