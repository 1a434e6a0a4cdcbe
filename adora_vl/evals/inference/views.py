"""The views of a problem, which decide what the model sees of it.

It sees the picture, the facts of the picture in words, both, or a grey picture. A comparison of the
views says whether a model sees, reasons, or guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.evals.records import Problem
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

DESCRIPTION_BY_VIEW = {
    "image": "the picture",
    "text": "the facts of the picture in words, and no picture",
    "both": "the picture and its facts in words",
    "blank": "a grey picture of the same size",
}


def apply_view(problems: Sequence[Problem], view: str) -> list[Problem]:
    """Change what problems show the model, by the name of a view.

    The views are `image` (the picture), `text` (the facts of the picture in words, and no picture),
    `both`, and `blank` (a grey picture of the same size). `text` and `both` leave out problems
    without facts in words. Raises `UserError` if no problem has the facts or the images that the
    view needs.
    """
    if view == "image":
        return list(problems)
    if view == "blank":
        if not any(problem.n_images for problem in problems):
            raise UserError("view: blank, and the problems have no images; leave it out")
        return [replace(problem, images=partial(_grey_images, problem)) for problem in problems]
    with_facts = [problem for problem in problems if problem.facts]
    if not with_facts:
        raise UserError(
            f"view: {view}, and no row of the data has facts in words (a column `facts`, as "
            "`python -m data_prep geometry3k --source intergps` writes it); ask with image or "
            "blank"
        )
    without_picture = view == "text"
    problems_in_words = [
        replace(problem, prompt=_prompt_with_facts(problem, without_picture=without_picture))
        for problem in with_facts
    ]
    if without_picture:
        return [without_images(problem) for problem in problems_in_words]
    return problems_in_words


def _prompt_with_facts(problem: Problem, *, without_picture: bool) -> str:
    """Return the prompt of a problem with the facts of its picture in words.

    The facts come before the question: `What the picture shows: ...`. If the prompt has the
    placeholder of a picture, they come last, so that they follow the picture. `without_picture`
    removes the placeholder.
    """
    question = problem.prompt
    if without_picture:
        question = question.replace(IMAGE_PLACEHOLDER, " ").strip()
    if IMAGE_PLACEHOLDER in question:
        return f"{question}\nWhat the picture shows: {problem.facts}"
    return f"What the picture shows: {problem.facts}\n{question}"


def without_images(problem: Problem) -> Problem:
    """Return the problem without its images; the text stays as it is."""
    return replace(problem, n_images=0, images=list, sizes=None)


def _grey_images(problem: Problem) -> list[Image.Image]:
    """Return a grey image for each image of a problem, of the same size."""
    # `sizes` reads the headers alone; without it the images have to be decoded.
    if problem.sizes is not None:
        return [_grey_image(size) for size in problem.sizes()]
    return [_grey_image(image.size) for image in problem.images()]


def _grey_image(size: tuple[int, int]) -> Image.Image:
    """Return a grey image of this width and height."""
    from PIL import Image

    return Image.new("RGB", size, (128, 128, 128))
