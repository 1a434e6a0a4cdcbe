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

from adora_vl.record import figures
from adora_vl.report.run_view import ROLLOUT, RunView
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file

# The page searches with the same expression, so that both find the same formulas: it means the same
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
# Different formulas in a page; each takes a fifth of a millisecond and 50 bytes
MAX_FORMULAS = 10_000
_MAX_CHARACTERS = 400
_MAX_NODES = 1000
_DELIMITED = re.compile(r"\$\$([\s\S]*)\$\$|\$([\s\S]*)\$|\\\(([\s\S]*)\\\)|\\\[([\s\S]*)\\\]")
# Commands that are refused: definitions could call one another, so that a short text grows without
# end; a comment would hide the rest of its line.
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


def formulas(texts: Iterable[str | None], answers: Iterable[str | None] = ()) -> dict[str, Tree]:
    """The trees of the first `MAX_FORMULAS` different formulas, by their source.

    Args:
        texts: prose that may have formulas in it; None is skipped.
        answers: texts each of which is one formula, where it has LaTeX in it.
    """
    trees: dict[str, Tree | None] = {}
    pattern = re.compile(FORMULA)
    for text in answers:
        if text and len(trees) < MAX_FORMULAS and text not in trees and re.search(r"[\\^_]", text):
            trees[text] = mathml(text)
    for text in texts:
        for match in pattern.finditer(text or ""):
            if len(trees) >= MAX_FORMULAS:
                break
            if match[0] not in trees:
                trees[match[0]] = mathml(match[0])
    return {source: tree for source, tree in trees.items() if tree is not None}


def mathml(source: str) -> Tree | None:
    """The formula as a tree of MathML; None if it is not understood as a whole."""
    from latex2mathml.converter import convert_to_element

    delimited = _DELIMITED.fullmatch(source)
    latex = source
    if delimited:
        latex = next(part for part in delimited.groups() if part is not None)
    if not latex.strip() or len(latex) > _MAX_CHARACTERS or _REFUSED.search(latex):
        return None
    is_block = source.startswith(("$$", "\\["))
    try:
        element = convert_to_element(latex, display="block" if is_block else "inline")
        tree = [_TreeBuilder(_MAX_NODES).build(child) for child in element]
    # The converter raises many kinds of exceptions for what it cannot read. A formula that is not
    # understood is shown as it was written.
    except Exception:
        return None
    return ["math", {"display": "block"} if is_block else {}, *tree]


class _TreeBuilder:
    """Builds the tree of an element, with what is allowed in a page and a bound on its nodes."""

    def __init__(self, max_nodes: int) -> None:
        self._remaining_nodes = max_nodes

    def build(self, element: Element) -> Tree:
        """The tree of the element, with those of its attributes that are allowed.

        `ValueError` is raised for an element that is not allowed, and beyond the bound on nodes.
        """
        text = unescape(element.text or "")
        self._remaining_nodes -= 1
        is_unknown = element.tag == "mi" and (text.startswith("\\") or text == "&")
        is_struck = element.tag == "menclose" and element.get("notation") != "box"
        if element.tag not in _ELEMENTS or self._remaining_nodes < 0 or is_unknown or is_struck:
            raise ValueError(element.tag)
        attributes = {
            name: value
            for name, value in element.attrib.items()
            # an attribute that is not known matches nothing
            if re.fullmatch(_ATTRIBUTES.get(name, "(?!)"), value)
        }
        content = [text] if text else []
        children = [self.build(child) for child in element]
        return [element.tag, attributes, *content, *children]


GENERATOR = "adora_vl report"  # marks a page that this module wrote
_VIEWER = Path(__file__).with_name("viewer")
_SCRIPTS = (
    "dom.js",
    "formulas.js",
    "steps.js",
    "charts.js",
    "curves.js",
    "groups.js",
    "detail.js",
    "main.js",
)


def _hash(text: str) -> str:
    """The hash of an inline style or script, for the page's content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(data: object) -> str:
    """The data as JSON, compressed, in base64; equal data give equal text."""
    text = json.dumps(data, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(text, compresslevel=3, mtime=0)).decode()


def build_page(views: list[RunView], images: dict[str, str]) -> str:
    """The HTML of the page.

    Completions, diagrams and formulas are in a block of their own, which the browser unpacks later
    than the curves and groups.

    Args:
        views: what is shown of each run.
        images: the diagrams as data URIs, by name.
    """
    style = (_VIEWER / "viewer.css").read_text(encoding="utf-8")
    script = "".join((_VIEWER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    completions = [
        [rollout[-1] for group in view.groups for rollout in group["rollouts"]] for view in views
    ]
    parts = {
        "GENERATOR": GENERATOR,
        "POLICY": policy,
        "TITLE": escape(", ".join(view.name for view in views)),
        "HEADING": escape(views[0].name) if len(views) == 1 else f"{len(views)} runs",
        "STYLE": style,
        "DATA": _packed(
            {
                "runs": [_run_data(view) for view in views],
                "rollout": ROLLOUT[:-1],
                "formula": FORMULA,
                "figures": figures.for_page(),
            }
        ),
        "TEXTS": _packed(
            {"completions": completions, "images": images, "math": _formulas_of(views)}
        ),
        "SCRIPT": script,
    }
    page = (_VIEWER / "page.html").read_text(encoding="utf-8")
    html, *pieces = page.split("{{")
    # The parts are put in in one pass, so that none is looked for in another.
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        html += parts[name] + rest
    return html


def _run_data(view: RunView) -> dict[str, Any]:
    """A run as the page's JSON has it; completions, the last of a rollout's values, are left out."""
    groups = [
        {**group, "rollouts": [rollout[:-1] for rollout in group["rollouts"]]}
        for group in view.groups
    ]
    return {
        "name": view.name,
        "result": view.result,
        "story": view.story,
        "facts": view.facts,
        "notes": view.notes,
        "metrics": view.metrics,
        "groups": groups,
        "problems": view.problems,
    }


def _formulas_of(views: list[RunView]) -> dict[str, Tree]:
    """The formulas in all texts of the page: problems, completions, and parts of answers."""
    extracted = ROLLOUT.index("extracted")
    compared = ROLLOUT.index("compared")
    texts: list[str | None] = []
    answers: list[str | None] = []
    for view in views:
        for problem in view.problems.values():
            texts += [problem["problem"], *problem["choices"]]
            answers.append(problem["answer"])
    rollouts = [rollout for view in views for group in view.groups for rollout in group["rollouts"]]
    answers += [rollout[extracted] for rollout in rollouts]
    for rollout in rollouts:
        for answer, reference, _ in rollout[compared] or ():
            answers += [answer, reference]
    texts += [rollout[-1] for rollout in rollouts]
    return formulas(texts, answers)


def write_page(page: str, path: Path) -> None:
    """Write the page as a whole.

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
