"""Puts a row's images into their places in its text.

Sources mark the places by `<image>`, `<image1>`, `[image]`, `<img>` and the like; a prepared row has
`<image>` alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adora_vl.data.prompts import PLACEHOLDER

_MARK = re.compile(
    # The first is the mark of a chat template, in rows that were made for another trainer.
    r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>"
    r"|<(?:image|img)[ _]?(\d{0,3})>|<\|image_?(\d{0,3})\|>|\[(?:image|img)[ _]?(\d{0,3})\]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Placed:
    """A text with `<image>` where each image stands, or without any where all stand before it."""

    text: str
    order: tuple[int, ...]  # the numbers of the images, from 0, in the order of their places
    # The text numbers more images than the row has, as parts of one picture. The marks without an
    # image of their own stand in it as the words "image 2".
    parts: bool = False


def place_images(text: str, images: int) -> Placed | str:
    """Put `images` images into their places in a text.

    Marks without numbers have to be as many as the images. An image whose number the text does not
    have is put at its end.

    Returns a sentence in place of the text where that is not possible: `WHAT IS WRONG; WHAT TO DO`.
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return Placed(text.strip(), tuple(range(images)))
    if not images:
        return (
            f"has {marks[0].group()} and the row no image; put the picture in, or take the mark out"
        )
    has = "1 image" if images == 1 else f"{images} images"
    numbers = [next((int(number) for number in mark.groups() if number), None) for mark in marks]
    if all(number is None for number in numbers):
        if len(marks) != images:
            return (
                f"has {len(marks)} {marks[0].group()} and the row {has}; give as many as images, "
                "or none"
            )
        return Placed(_before_the_text(_MARK.sub(PLACEHOLDER, text)), tuple(range(images)))
    if any(number is None for number in numbers):
        return "has marks of images with and without numbers; number all of them, or none"
    return _numbered(text, [number or 0 for number in numbers], images)


def in_words(text: str) -> str | None:
    """Replace the marks in an option by the words "image 2", since the problem shows the images.

    None is returned where a mark has no number.
    """
    numbers = [
        next((number for number in mark.groups() if number), "") for mark in _MARK.finditer(text)
    ]
    if not all(numbers):
        return None
    upcoming = iter(numbers)
    return _MARK.sub(lambda _: f"image {int(next(upcoming))}", text)


def _numbered(text: str, numbers: Sequence[int], images: int) -> Placed:
    """Put images into a text whose marks have numbers.

    Only the first mark with a number is the place of that image; later ones become words.
    """
    first = min(numbers) if min(numbers) == 0 else 1
    distinct = list(dict.fromkeys(numbers))
    parts = max(numbers) - first >= images
    if parts:
        # The numbers are no numbers of images: the first ones get the images in their order.
        remaining = dict(zip(distinct, range(images), strict=False))
    else:
        remaining = {number: number - first for number in distinct}
    order = []
    upcoming = iter(numbers)

    def place_image(_: re.Match[str]) -> str:
        number = next(upcoming)
        if number not in remaining:
            return f"image {number}"
        order.append(remaining.pop(number))
        return PLACEHOLDER

    placed_text = _MARK.sub(place_image, text).strip()
    unnamed = [number for number in range(images) if number not in order]
    placed_text += f"\n{PLACEHOLDER}" * len(unnamed)
    return Placed(_before_the_text(placed_text), (*order, *unnamed), parts)


def _before_the_text(problem: str) -> str:
    """Take the marks off where all of them stand before the text, as images do without marks."""
    text = problem.strip()
    while text.startswith(PLACEHOLDER):
        text = text.removeprefix(PLACEHOLDER).lstrip()
    # Where only marks are left, the question stands in the picture, and the marks stay.
    return text if text and PLACEHOLDER not in text else problem.strip()
