"""The places of a row's images in its text, by any mark of a source: `<image>`, `<image1>`,
`[image]`, `<img>`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adora_vl.data.prompts import PLACEHOLDER

_MARK = re.compile(
    # a chat template's own, in rows made for another trainer
    r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>"
    r"|<(?:image|img)[ _]?(\d{0,3})>|<\|image_?(\d{0,3})\|>|\[(?:image|img)[ _]?(\d{0,3})\]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Placed:
    """A text with `<image>` where each image stands, or without any where all stand before it."""

    text: str
    order: tuple[int, ...]  # the numbers of the images, from 0, in the order of their places
    # it numbers more images than the row has; the others stand in it as the words "image 2"
    parts: bool = False


def place_images(text: str, images: int) -> Placed | str:
    """The text with the images in their places, or the sentence that says why there are none: `A;
    what to do`.

    Marks without numbers are as many as images. An image whose number the text does not have stands
    at its end.
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return Placed(text.strip(), tuple(range(images)))
    has = "no image" if not images else "1 image" if images == 1 else f"{images} images"
    if not images:
        return f"has {marks[0].group()} and the row {has}; put the picture in, or take the mark out"
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
    """An option with "image 2" for the mark of an image, which the problem shows.

    None for a mark without a number.
    """
    numbers = [
        next((number for number in mark.groups() if number), "") for mark in _MARK.finditer(text)
    ]
    if not all(numbers):
        return None
    left = iter(numbers)
    return _MARK.sub(lambda _: f"image {int(next(left))}", text)


def _numbered(text: str, numbers: Sequence[int], images: int) -> Placed:
    """A text whose marks have numbers.

    Only the first with a number is a place, the others are words.
    """
    first = min(numbers) if min(numbers) == 0 else 1
    distinct = list(dict.fromkeys(numbers))
    parts = max(numbers) - first >= images
    shown = (
        dict(zip(distinct, range(images), strict=False))
        if parts
        else {n: n - first for n in distinct}
    )
    remaining = dict(shown)
    order = []
    left = iter(numbers)

    def place(_: re.Match[str]) -> str:
        number = next(left)
        if number not in remaining:
            return f"image {number}"
        order.append(remaining.pop(number))
        return PLACEHOLDER

    made = _MARK.sub(place, text).strip()
    unnamed = [number for number in range(images) if number not in order]
    made += "".join(f"\n{PLACEHOLDER}" for _ in unnamed)
    return Placed(_before_the_text(made), (*order, *unnamed), parts)


def _before_the_text(problem: str) -> str:
    """Without the marks where all of them stand before a text, as images do by themselves."""
    text = problem.strip()
    while text.startswith(PLACEHOLDER):
        text = text.removeprefix(PLACEHOLDER).lstrip()
    # the question may stand in the picture alone
    return text if text and PLACEHOLDER not in text else problem.strip()
