"""The viewer as one HTML file: nothing is loaded from elsewhere, and no text of a model can become markup or script.

The data are two compressed blocks that the page's own script unpacks and shows as text nodes: first what the curves and
the list need, then the completions and diagrams. The content security policy names the hashes of this script and style,
so nothing else can run, even if a text were mistaken for markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from adora_vl.files import replace_file
from adora_vl.report.formulas import FORMULA, formulas
from adora_vl.report.run import ROLLOUT, RunView

GENERATOR = "adora_vl report"  # marks a page that this module wrote
_VIEWER = Path(__file__).with_name("viewer")
_SCRIPTS = ("dom.js", "formulas.js", "charts.js", "curves.js", "groups.js", "detail.js", "main.js")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(data: Any) -> str:
    text = json.dumps(data, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(text, compresslevel=3, mtime=0)).decode()


def build_page(views: list[RunView], images: dict[str, str]) -> str:
    """The whole document."""
    runs = [
        {
            "name": view.name, "facts": view.facts, "notes": view.notes, "metrics": view.metrics,
            "groups": [{**group, "rollouts": [one[:-1] for one in group["rollouts"]]} for group in view.groups],
            "problems": view.problems,
        }
        for view in views
    ]  # fmt: skip
    problems = [problem for view in views for problem in view.problems.values()]
    extracted = ROLLOUT.index("extracted")
    rollouts = [one for view in views for group in view.groups for one in group["rollouts"]]
    math = formulas(
        [*(problem["problem"] for problem in problems), *(one[-1] for one in rollouts)],
        [*(problem["answer"] for problem in problems), *(one[extracted] for one in rollouts)],
    )
    completions = [[one[-1] for group in view.groups for one in group["rollouts"]] for view in views]
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
    """Write the page at once. Raises `UserError` if `path` is a file of another kind, or cannot be written."""
    try:
        if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"--output: {str(path)!r} is not a page that this command wrote; choose another name")
        replace_file(path, page)
    except OSError as error:
        raise UserError(f"--output: {str(path)!r} cannot be written ({error.strerror}); choose another name") from error
