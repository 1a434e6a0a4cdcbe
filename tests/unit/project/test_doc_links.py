"""Every link in a page, every file of ours that a page names, and every `python -m` that it shows
exists.
"""

import re
from functools import cache
from pathlib import Path

from tests.support.paths import REPOSITORY

PAGES = sorted(
    page
    for folder in (".", "docs", "benchmarks", "adora_vl/models/shapes")
    for page in (REPOSITORY / folder).glob("*.md")
)
EARLIER_COMMIT_PATTERN = re.compile(r"(git checkout|at commit) [0-9a-f]{8}\b")
OUR_FOLDERS_PATTERN = "adora_vl|benchmarks|configs|data_prep|docs|eval|notebooks|setup|tests"


@cache
def anchors_of_headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links in a page's text whose file or heading does not exist."""
    broken_targets = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of_headings(target)
        ):
            broken_targets.append(link)
    return broken_targets


def missing_names(text: str) -> list[str]:
    """Return the paths below our top folders and the modules behind `python -m` that are nowhere.

    `NAME.yaml` is any name. A paragraph that names a commit speaks of the files of that commit.
    """
    text = "\n\n".join(
        part for part in text.split("\n\n") if not EARLIER_COMMIT_PATTERN.search(part)
    )
    paths = re.findall(
        rf"(?<![\w./-])((?:{OUR_FOLDERS_PATTERN})/[\w./-]*\.(?:py|yaml|md|ipynb|sh|json))\b", text
    )
    modules = re.findall(rf"-m ((?:{OUR_FOLDERS_PATTERN})(?:\.\w+)*)", text)
    path_by_module = {module: REPOSITORY / module.replace(".", "/") for module in modules}
    return [
        path for path in paths if not (REPOSITORY / path).exists() and not Path(path).stem.isupper()
    ] + [
        module
        for module, module_path in path_by_module.items()
        if not (module_path.with_suffix(".py").exists() or (module_path / "__main__.py").exists())
    ]


def test_what_a_page_links_to_and_names_exists():
    """Code blocks have no links, but may name files and modules."""
    missing = {}
    for page in PAGES:
        text = page.read_text()
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        missing[str(page.relative_to(REPOSITORY))] = broken_links(page, prose) + missing_names(text)
    assert len(PAGES) > 10
    assert {page: names for page, names in missing.items() if names} == {}
