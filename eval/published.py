"""Figures that others have published, in percent, to stand beside ours. Quoted, not measured here."""

from __future__ import annotations

from typing import NamedTuple


class Quoted(NamedTuple):
    """A published row: who, the figures by column in percent (None: not given), and where it stands."""

    name: str
    figures: dict[str, float | None]
    source: str


ADORA_TABLE = "ADORA, arXiv 2602.10019, pass@1; MathVista by VLMEvalKit's rules"
EASY_R1 = "EasyR1's reports, Geometry3K test"

_ADORA_ROWS: tuple[tuple[str, float | None, float | None, float | None, float | None], ...] = (
    ("Qwen2.5-VL-7B-Instruct", 67.3, 69.6, 65.5, 63.9),
    ("MM-EUREKA-8B", 68.1, 73.4, 63.8, 64.3),
    ("MMR1-math-v0", 70.2, 72.3, 68.5, 64.9),
    ("Vision-R1-7B (its report)", 73.5, 81.9, 66.8, None),
    ("GRPO", 70.2, 71.6, 69.1, 61.9),
    ("ADORA", 73.5, 76.1, 71.4, 63.8),
)

PUBLISHED: dict[str, tuple[Quoted, ...]] = {
    "mathvista": tuple(
        Quoted(name, {"all": all_, "ID": id_, "OOD": ood}, ADORA_TABLE) for name, all_, id_, ood, _ in _ADORA_ROWS
    ),
    "mmstar": tuple(
        Quoted(name, {"all": mmstar}, ADORA_TABLE) for name, _, _, _, mmstar in _ADORA_ROWS if mmstar is not None
    ),
    "geometry3k": tuple(
        Quoted(name, {"all": value}, EASY_R1)
        for name, value in (
            ("7B before GRPO", 37.0),
            ("7B GRPO", 48.0),
            ("7B DAPO", 50.0),
            ("7B SAPO", 54.0),
            ("3B before GRPO", 24.0),
            ("3B GRPO", 38.0),
        )
    ),
}
