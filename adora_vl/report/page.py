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

from adora_vl.record.shown_metrics import page_metrics
from adora_vl.report.run_view import ROLLOUT_FIELDS, RunView
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file, unwritable_error

# What is taken for a formula in a text. The page searches with the same expression, so that both
# find the same formulas: it means the same in Python and JavaScript. Every repetition has a bound,
# so no text can make it slow.
_TEXT_IN_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,400}\}"
FORMULA = (
    r"\$\$[^$]{1,400}\$\$"
    # but not `$5 and $6`, nor `$6. $`
    r"|\$(?:\s[^$\n]{1,400}\s|[^\s$](?:[^$\n]{0,400}[^\s$])?)\$(?!\d)"
    r"|\\\([^\n]{1,400}?\\\)"
    r"|\\\[[\s\S]{1,400}?\\\]"
    rf"|\\boxed\s?{_TEXT_IN_BRACES}"
    # a command alone in prose
    rf"|\\[A-Za-z]{{3,20}}(?:\s?{_TEXT_IN_BRACES}|\s(?:[A-Z]|\d{{1,9}})(?![A-Za-z\d])){{0,9}}"
)
# Different formulas in a page; each takes a fifth of a millisecond and 50 bytes
MAX_FORMULAS = 10_000
_MAX_CHARACTERS = 400
_MAX_NODES = 1000
# A formula between delimiters, of which one pair matches
_DELIMITED_PATTERN = re.compile(
    r"\$\$([\s\S]*)\$\$|\$([\s\S]*)\$|\\\(([\s\S]*)\\\)|\\\[([\s\S]*)\\\]"
)
# Commands that are refused: definitions could call one another, so that a short text grows without
# end; a comment would hide the rest of its line.
_REFUSED_COMMANDS_PATTERN = re.compile(
    r"\\(?:\w*def|let|futurelet|\w*command|Declare\w*|\w*environment|verb)(?![a-z])|(?<!\\)%"
)
# Elements of MathML that a page may have
_ALLOWED_ELEMENTS = {
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
# Attributes that a page may have, and the expression that their values match
_PATTERN_BY_ATTRIBUTE = {
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
# An element of MathML as JSON: its name, its attributes, then its text and its child elements, such
# as ["mrow", {}, ["mi", {}, "x"]]
MathTree = list[Any]


def convert_formulas(
    texts: Iterable[str | None], answers: Iterable[str | None] = ()
) -> dict[str, MathTree]:
    """Convert the formulas in texts from LaTeX to MathML, which a browser can show.

    Returns the MathML of each formula by its LaTeX source. Only the first `MAX_FORMULAS` different
    formulas are converted. One that is not understood is left out, and the page shows it as it was
    written.

    Args:
        texts: prose that may have formulas in it; None is skipped.
        answers: answers to problems. One with LaTeX in it is a formula as a whole. They go first,
            as they are short and a reader looks at them first.
    """
    tree_by_source: dict[str, MathTree | None] = {}
    for answer in answers:
        has_latex = answer is not None and re.search(r"[\\^_]", answer) is not None
        if not answer or not has_latex:
            continue
        if len(tree_by_source) < MAX_FORMULAS and answer not in tree_by_source:
            tree_by_source[answer] = latex_to_mathml(answer)
    pattern = re.compile(FORMULA)
    for text in texts:
        for match in pattern.finditer(text or ""):
            if len(tree_by_source) >= MAX_FORMULAS:
                break
            if match[0] not in tree_by_source:
                tree_by_source[match[0]] = latex_to_mathml(match[0])
    return {source: tree for source, tree in tree_by_source.items() if tree is not None}


def latex_to_mathml(source: str) -> MathTree | None:
    """Convert a formula from LaTeX to a tree of MathML; None if any part is not understood.

    For example, `$x$` gives `["math", {}, ["mrow", {}, ["mi", {}, "x"]]]`.

    `source`: the formula with its delimiters, such as `$x$`, or without any.
    """
    from latex2mathml.converter import convert_to_element

    latex = source
    delimited = _DELIMITED_PATTERN.fullmatch(source)
    if delimited is not None:
        # The pattern has a group for each pair of delimiters, and all groups but one are None.
        latex = next(content for content in delimited.groups() if content is not None)
    if not latex.strip() or len(latex) > _MAX_CHARACTERS or _REFUSED_COMMANDS_PATTERN.search(latex):
        return None
    # `$$` and `\[` set a formula on lines of its own
    is_block = source.startswith(("$$", "\\["))
    try:
        element = convert_to_element(latex, display="block" if is_block else "inline")
        children = [_MathTreeBuilder(_MAX_NODES).build(child) for child in element]
    # The converter raises many kinds of exceptions for what it cannot read. A formula that is not
    # understood is shown as it was written.
    except Exception:
        return None
    return ["math", {"display": "block"} if is_block else {}, *children]


class _MathTreeBuilder:
    """Converts elements of MathML to trees, with a bound on the number of nodes.

    Only elements and attributes that are allowed in a page are converted.
    """

    def __init__(self, max_nodes: int) -> None:
        self._remaining_nodes = max_nodes

    def build(self, element: Element) -> MathTree:
        """Return an element of MathML and all that is in it as a tree: [name, attributes, ...].

        The text comes from a model's answer. So only elements and attributes that are known to be
        harmless go into the page.

        Raises:
            ValueError: an element is not allowed, or there are more than `max_nodes`.
        """
        text = unescape(element.text or "")
        self._remaining_nodes -= 1
        # The converter writes a command that it does not know as an identifier.
        is_unknown_command = element.tag == "mi" and (text.startswith("\\") or text == "&")
        # Chrome draws no `menclose`; the style of the page makes up only for a box.
        is_undrawn = element.tag == "menclose" and element.get("notation") != "box"
        is_allowed = element.tag in _ALLOWED_ELEMENTS and not is_unknown_command and not is_undrawn
        if not is_allowed or self._remaining_nodes < 0:
            raise ValueError(element.tag)
        attributes = {
            name: value
            for name, value in element.attrib.items()
            if name in _PATTERN_BY_ATTRIBUTE and re.fullmatch(_PATTERN_BY_ATTRIBUTE[name], value)
        }
        children = [self.build(child) for child in element]
        if text:
            return [element.tag, attributes, text, *children]
        return [element.tag, attributes, *children]


GENERATOR = "adora_vl report"  # marks a page that this module wrote
_VIEWER_FOLDER = Path(__file__).with_name("viewer")
_SCRIPT_FILES = (
    "dom.js",
    "formulas.js",
    "steps.js",
    "charts.js",
    "curves.js",
    "groups.js",
    "detail.js",
    "main.js",
)


def _content_hash(text: str) -> str:
    """Return an inline style's or script's hash as the page's content security policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _compress_json(data: object) -> str:
    """Return the data as JSON, compressed, in base64, for a script of the page to unpack.

    Equal data give equal text, since the archive has no time in it.
    """
    json_bytes = json.dumps(data, allow_nan=False).encode()
    archive = gzip.compress(json_bytes, compresslevel=3, mtime=0)
    return base64.b64encode(archive).decode()


def build_page(views: list[RunView], images: dict[str, str]) -> str:
    """Build the page of one or more runs as one text of HTML with all its styles, scripts and data.

    Completions, diagrams and formulas are in a block of data of their own, `TEXTS`, which the
    browser unpacks after the curves and groups in `DATA`, so that these are shown at once.

    Args:
        views: what is shown of each run.
        images: the diagrams as data URIs, by name.
    """
    style = (_VIEWER_FOLDER / "viewer.css").read_text(encoding="utf-8")
    script = "".join((_VIEWER_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPT_FILES)
    # Only the style and the scripts of this package run: a text of a model cannot bring its own.
    policy = (
        f"default-src 'none'; img-src data:; style-src {_content_hash(style)}; "
        f"script-src {_content_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    data = {
        "runs": [_run_to_json(view) for view in views],
        # the names of a rollout's values, without the completion, which is last and in `TEXTS`
        "rollout": ROLLOUT_FIELDS[:-1],
        "formula": FORMULA,
        "figures": page_metrics(),
    }
    texts = {
        "completions": [_completions(view) for view in views],
        "images": images,
        "math": _convert_formulas_of_runs(views),
    }
    value_by_placeholder = {
        "GENERATOR": GENERATOR,
        "POLICY": policy,
        "TITLE": escape(", ".join(view.name for view in views)),
        "HEADING": escape(views[0].name) if len(views) == 1 else f"{len(views)} runs",
        "STYLE": style,
        "DATA": _compress_json(data),
        "TEXTS": _compress_json(texts),
        "SCRIPT": script,
    }
    template = (_VIEWER_FOLDER / "page.html").read_text(encoding="utf-8")
    html, *parts = template.split("{{")
    # All placeholders `{{NAME}}` are replaced in one pass. If a value contains such a text itself,
    # that text has to stay.
    for part in parts:
        placeholder, _, text_after = part.partition("}}")
        html += value_by_placeholder[placeholder] + text_after
    return html


def _completions(view: RunView) -> list[str]:
    """Return the completions of a run's rollouts, each of them the last of its rollout's values."""
    return [rollout[-1] for group in view.groups for rollout in group["rollouts"]]


def _run_to_json(view: RunView) -> dict[str, Any]:
    """Return a run for the page's JSON, without the completions of its rollouts.

    These are the last value of each rollout, and go into a separate block of the page.
    """
    groups = [
        {**group, "rollouts": [rollout[:-1] for rollout in group["rollouts"]]}
        for group in view.groups
    ]
    return {
        "name": view.name,
        "result": view.result,
        "story": view.summary,
        "facts": view.facts,
        "notes": view.notes,
        "metrics": view.metrics,
        "groups": groups,
        "problems": view.problems,
    }


def _convert_formulas_of_runs(views: list[RunView]) -> dict[str, MathTree]:
    """Return the formulas in all texts of the page as MathML, by their LaTeX source.

    Problems, choices and completions are searched for formulas. Answers, and the parts of answers
    that the grader has compared, are formulas as a whole.
    """
    extracted_index = ROLLOUT_FIELDS.index("extracted")
    compared_index = ROLLOUT_FIELDS.index("compared")
    texts: list[str | None] = []
    answers: list[str | None] = []
    for view in views:
        for problem in view.problems.values():
            texts += [problem["problem"], *problem["choices"]]
            answers.append(problem["answer"])
    rollouts = [rollout for view in views for group in view.groups for rollout in group["rollouts"]]
    answers += [rollout[extracted_index] for rollout in rollouts]
    for rollout in rollouts:
        for answer_part, reference_part, _ in rollout[compared_index] or ():
            answers += [answer_part, reference_part]
    for view in views:
        texts += _completions(view)
    return convert_formulas(texts, answers)


def write_page(page: str, path: Path) -> None:
    """Write the page to a file, which has either all of it or its old content.

    Raises:
        UserError: `path` is a file that this command did not write, or it cannot be written.
    """
    try:
        # A page has the name of its generator in its head: no other file is overwritten.
        is_foreign = (
            path.exists()
            and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]
        )
        if is_foreign:
            raise UserError(
                f"--output: {str(path)!r} is not a page that this command wrote; choose another "
                "name"
            )
        replace_file(path, page)
    except OSError as error:
        raise unwritable_error("--output", path, error) from error
