"""`docs/architecture.md` names files, classes and functions: whoever looks for one of them finds it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
# A span with a space is a command, a setting or a shape, not a name.
SPANS = sorted({span for span in re.findall(r"`([^`\n]+)`", PROSE) if " " not in span})


def _defined() -> set[str]:
    """Packages, modules, classes and functions of ours, what they import, and the words that they print or log."""
    names: set[str] = set()
    for top in ("adora_vl", "data_prep", "eval"):
        for path in (ROOT / top).rglob("*.py"):
            names |= {path.stem, path.parent.name}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.ImportFrom):
                    names.update(alias.name for alias in node.names)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return names


DEFINED = _defined()


def _is_there(span: str) -> bool:
    if any((home / span).exists() for home in (ROOT, ROOT / "adora_vl")):
        return True
    if span.endswith((".py", "/")):
        return False
    if span.startswith("adora/"):  # a figure of the log; `log_figure` gets it whole, the metrics without the prefix
        return span in DEFINED or span.removeprefix("adora/") in DEFINED
    return all(part in DEFINED for part in re.sub(r"\(.*\)$", "", span).split("."))


@pytest.mark.parametrize("span", SPANS)
def test_what_the_page_names_exists(span):
    assert _is_there(span), f"docs/architecture.md names `{span}`, which is nowhere"


def test_every_room_is_on_the_page():
    """A package or module of `adora_vl/` that the page leaves out is one that a newcomer does not find."""
    rooms = {f"{path.name}/" for path in (ROOT / "adora_vl").iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.name for path in (ROOT / "adora_vl").glob("*.py") if path.name != "__init__.py"}
    assert len(rooms) > 30 and rooms - set(SPANS) == set()
    listed = re.findall(r"^\| (`[^|]+) \|", TEXT.partition("| room |")[2].partition("\n\n")[0], re.MULTILINE)
    names = [name for cell in listed for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) >= len(rooms) and len(names) == len(set(names)), "a room is on the page twice"


def test_every_kind_of_thread_is_on_the_page():
    starts = re.compile(r"\b(?:Thread|ThreadPoolExecutor)\(")
    starters = {
        str(path.relative_to(ROOT / "adora_vl"))
        for path in (ROOT / "adora_vl").rglob("*.py")
        if path.name != "worker.py" and starts.search(path.read_text())  # a grader worker is another process
    }
    listed = re.findall(
        r"^\| [^|]+ \| `([\w/]+\.py)`", TEXT.partition("| thread |")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert len(starters) > 3 and starters == set(listed)


def test_what_the_figure_names_exists():
    (figure,) = re.findall(r"```mermaid(.*?)```", TEXT, flags=re.DOTALL)
    named = {*re.findall(r'\["([A-Z]\w+)(?=:)', figure), *re.findall(r"<br>(\w+)", figure)} - {"TRL"}
    assert len(named) > 8 and named <= DEFINED, named - DEFINED


def test_the_page_answers_twelve_questions():
    answers = re.findall(r"^\| [^|]+\? \| ([^|]+) \|$", PROSE, flags=re.MULTILINE)
    assert len(answers) >= 12 and all("`" in answer for answer in answers)
