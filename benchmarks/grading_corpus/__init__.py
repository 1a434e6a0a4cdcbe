r"""The labelled corpus: answers by kind, each with its reference and the grading policy's verdict.

One JSON line per reference answer: `gold` is that answer, and `correct`, `wrong`, `unparseable` and
`rejected` (any verdict but correct) are lists of answers. Where needed it has `choices` and
`rounding`. An answer is what stands in the box; in a line with `whole` it is the whole response, as
pairs of a text and how often it is repeated. `reason` says why the wrong ones of a line are wrong
(`guesses`: what somebody writes who wants to be right without knowing the answer).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABELS = ("correct", "wrong", "unparseable", "rejected")


@dataclass(frozen=True)
class Case:
    """One labelled response. `name`: a short one for people, unique in the corpus."""

    kind: str
    name: str
    response: str
    gold: str
    label: str
    choices: tuple[str, ...] | None
    rounding: bool


def cases() -> list[Case]:
    """Return the corpus, sorted by kind."""
    all_cases = []
    for path in sorted(Path(__file__).parent.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            for label in LABELS:
                for index, answer in enumerate(row.get(label, ())):
                    all_cases.append(
                        _case(
                            path.stem,
                            location=f"{path.stem}:{number}:{label}:{index}",
                            row=row,
                            label=label,
                            answer=answer,
                        )
                    )
    return all_cases


def _case(kind: str, location: str, row: dict[str, Any], label: str, answer: object) -> Case:
    r"""Return a case of the corpus from its row.

    For example, the answer `5` becomes the response `So \boxed{5}.`, and in a row with `whole` the
    answer `[["No. ", 2], ["5", 1]]` becomes `No. No. 5`.
    """
    if row.get("whole"):
        assert isinstance(answer, list)
        response = "".join(text * count for text, count in answer)
    else:
        response = rf"So \boxed{{{answer}}}."
    choices = tuple(row["choices"]) if "choices" in row else None
    name = f"{location} {response[:40]!r} for {row['gold']!r}"
    return Case(
        kind=kind,
        name=name,
        response=response,
        gold=row["gold"],
        label=label,
        choices=choices,
        rounding=bool(row.get("rounding")),
    )
