"""What a model is shown of a problem: its picture, the facts of the picture in words, both, or
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from adora_vl.data.prompts import PLACEHOLDER
from adora_vl.evals.records import Problem
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

VIEWS = {
    "image": "the picture",
    "text": "the facts of the picture in words, and no picture",
    "both": "the picture and its facts in words",
    "blank": "a grey picture of the same size",
}


def shown_as(problems: Sequence[Problem], view: str) -> list[Problem]:
    """The problems as one of the `VIEWS` shows them, without those that lack the facts for it.

    Raises `UserError`.
    """
    if view == "blank":
        if not any(problem.n_images for problem in problems):
            raise UserError("view: blank, and the problems have no images; leave it out")
        return [
            replace(one, images=partial(_grey, one)) if one.n_images else one for one in problems
        ]
    if view == "image":
        return list(problems)
    known = [problem for problem in problems if problem.facts]
    if not known:
        raise UserError(
            f"view: {view}, and no row of the data has facts in words (a column `facts`, as "
            "`python -m data_prep geometry3k --source intergps` writes it); ask with image or "
            "blank"
        )
    told = [replace(problem, prompt=_told(problem, alone=view == "text")) for problem in known]
    return [without_images(problem) for problem in told] if view == "text" else told


def _told(problem: Problem, *, alone: bool) -> str:
    """The facts before the question; `alone`: without the places of its pictures."""
    asked = problem.prompt.replace(PLACEHOLDER, " ").strip() if alone else problem.prompt
    if PLACEHOLDER in asked:
        return f"{asked}\nWhat the picture shows: {problem.facts}"
    return f"What the picture shows: {problem.facts}\n{asked}"


def without_images(problem: Problem) -> Problem:
    return replace(problem, n_images=0, images=list, sizes=None)


def _grey(problem: Problem) -> list[Image.Image]:
    from PIL import Image

    sizes = [image.size for image in problem.images()] if problem.sizes is None else problem.sizes()
    return [Image.new("RGB", size, (128, 128, 128)) for size in sizes]
