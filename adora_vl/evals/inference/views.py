"""The views of a problem: its picture, the facts of the picture in words, both, or neither."""

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


def problems_in_view(problems: Sequence[Problem], view: str) -> list[Problem]:
    """Return the problems as one of the `VIEWS` shows them.

    In `text` and `both` those without facts are left out. Raises `UserError` where no problem has
    what the view needs.
    """
    if view == "blank":
        if not any(problem.n_images for problem in problems):
            raise UserError("view: blank, and the problems have no images; leave it out")
        return [
            replace(problem, images=partial(_grey, problem)) if problem.n_images else problem
            for problem in problems
        ]
    if view == "image":
        return list(problems)
    with_facts = [problem for problem in problems if problem.facts]
    if not with_facts:
        raise UserError(
            f"view: {view}, and no row of the data has facts in words (a column `facts`, as "
            "`python -m data_prep geometry3k --source intergps` writes it); ask with image or "
            "blank"
        )
    is_text = view == "text"
    in_words = [
        replace(problem, prompt=_prompt_with_facts(problem, alone=is_text))
        for problem in with_facts
    ]
    if is_text:
        return [without_images(problem) for problem in in_words]
    return in_words


def _prompt_with_facts(problem: Problem, *, alone: bool) -> str:
    """Return the prompt of a problem with its facts.

    They stand before the question, or behind a picture's place. `alone`: without the placeholders
    of its pictures.
    """
    question = problem.prompt
    if alone:
        question = question.replace(PLACEHOLDER, " ").strip()
    if PLACEHOLDER in question:
        return f"{question}\nWhat the picture shows: {problem.facts}"
    return f"What the picture shows: {problem.facts}\n{question}"


def without_images(problem: Problem) -> Problem:
    """Return the problem with no images, its text as it is."""
    return replace(problem, n_images=0, images=list, sizes=None)


def _grey(problem: Problem) -> list[Image.Image]:
    """Return grey pictures of the sizes that the problem's own have."""
    from PIL import Image

    sizes = [image.size for image in problem.images()] if problem.sizes is None else problem.sizes()
    return [Image.new("RGB", size, (128, 128, 128)) for size in sizes]
