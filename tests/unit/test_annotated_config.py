"""The annotated config tells the truth: its defaults are the code's, and it trains what the demo trains."""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import yaml

from adora_vl.config.command_line import DATACLASSES, parse, read_yaml

TRAIN = Path(__file__).parents[2] / "configs" / "train"
ANNOTATED, DEMO = TRAIN / "annotated.yaml", TRAIN / "smoke_cpu.yaml"


def _defaults() -> dict[str, object]:
    """Of every key; a later dataclass does not overrule an earlier one."""
    found: dict[str, object] = {}
    for dataclass in DATACLASSES:
        for field in fields(dataclass):
            made = field.default_factory() if field.default_factory is not MISSING else field.default
            found.setdefault(field.name, made)
    return found


def _stated() -> dict[str, str]:
    """Key -> what the comment above it states as its default."""
    found, stated = {}, ""
    for line in ANNOTATED.read_text().splitlines():
        if match := re.match(r"# \[default (\[.*?\]|.*?)\] \S", line):
            stated = match[1]
        elif not line.startswith("#") and line:
            found[line.split(":")[0]], stated = stated, ""
    return found


def test_every_key_has_a_comment_of_its_own_with_the_default_of_the_code():
    defaults, stated = _defaults(), _stated()
    assert stated.keys() == read_yaml(ANNOTATED).keys() and len(stated) > 50
    wrong = {}
    for key, text in stated.items():
        value = defaults[key]
        given = float(text) if isinstance(value, float) else text if isinstance(value, str) else yaml.safe_load(text)
        if given != value:
            wrong[key] = (text, value)
    assert wrong == {}


def test_it_trains_what_the_demo_trains():
    """Every key that differs from the demo's, after parsing, is where it writes."""
    annotated, demo = (
        {key: value for part in parse(["--config", str(path)]) for key, value in asdict(part).items()}
        for path in (ANNOTATED, DEMO)
    )
    differing = {key for key in annotated if annotated[key] != demo[key]}
    assert differing <= {"output_dir", "logging_dir", "run_name"}
