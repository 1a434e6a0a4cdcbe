"""Puts a row's images into their places in its text.

Sources mark the places by `<image>`, `<image1>`, `[image]`, `<img>` and the like; a prepared row
has `<image>` alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.utils.cli import pluralize

_IMAGE_MARK_PATTERN = re.compile(
    # The first is the mark of a chat template, in rows that were made for another trainer.
    r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>"
    r"|<(?:image|img)[ _]?(\d{0,3})>|<\|image_?(\d{0,3})\|>|\[(?:image|img)[ _]?(\d{0,3})\]",
    re.IGNORECASE,
)


class MisplacedImagesError(ValueError):
    """The marks of a text do not fit the images of its row."""

    def __init__(self, wrong: str, remedy: str) -> None:
        """Describe the error: `wrong` is what is wrong, such as `has <image> and the row no image`.

        `remedy` is what to do.
        """
        super().__init__(f"{wrong}; {remedy}")
        self.wrong = wrong
        self.remedy = remedy


@dataclass(frozen=True)
class TextWithImages:
    """A text with `<image>` where each image stands, or without any where all stand before it."""

    text: str
    order: tuple[int, ...]  # the indices of the row's images, from 0, in the order of the marks
    # Whether the text numbers more images than the row has, as parts of one picture. The marks
    # without an image became words such as "image 2".
    numbers_parts: bool = False


def place_images(text: str, image_count: int) -> TextWithImages:
    """Return a text with `<image>` in place of its marks (`<image1>`, `[image]`, ...) of images.

    `image_count` is how many images the row has. The marks have numbers, or there are as many of
    them as images. For example, with two images:

        See [image]. Find x in [image].    See <image>. Find x in <image>.    order 0, 1
        Compare <image2> with <image1>.    Compare <image> with <image>.      order 1, 0
        Find x in <image1>.                Find x in <image>.\\n<image>       order 0, 1

    Raises `MisplacedImagesError` where that is not possible.
    """
    marks = list(_IMAGE_MARK_PATTERN.finditer(text))
    images_in_order = tuple(range(image_count))
    if not marks:
        return TextWithImages(text=text.strip(), order=images_in_order)
    if not image_count:
        raise MisplacedImagesError(
            f"has {marks[0].group()} and the row no image",
            remedy="put the picture in, or take the mark out",
        )
    numbers = [_mark_number(mark) for mark in marks]  # as texts, empty for a mark without one
    if not any(numbers):
        if len(marks) != image_count:
            raise MisplacedImagesError(
                f"has {len(marks)} {marks[0].group()} and the row "
                f"{pluralize(image_count, 'image')}",
                remedy="give as many as images, or none",
            )
        placed_text = _IMAGE_MARK_PATTERN.sub(IMAGE_PLACEHOLDER, text)
        return TextWithImages(text=_drop_leading_marks(placed_text), order=images_in_order)
    if not all(numbers):
        raise MisplacedImagesError(
            "has marks of images with and without numbers", remedy="number all of them, or none"
        )
    return _place_by_number(text, [int(number) for number in numbers], image_count)


def _mark_number(mark: re.Match[str]) -> str:
    """Return the digits of a mark: `2` for `<image2>`, and an empty text for `<image>`."""
    # Each spelling of a mark has a group of its own for its digits.
    for digits in mark.groups():
        if digits:
            return str(digits)
    return ""


def image_marks_as_words(text: str) -> str | None:
    """Return an option with words in place of the marks of images: `image 2` for `<image2>`.

    The problem shows the pictures themselves. Returns None where a mark has no number.
    """
    numbers = [_mark_number(mark) for mark in _IMAGE_MARK_PATTERN.finditer(text)]
    if not all(numbers):
        return None
    return _IMAGE_MARK_PATTERN.sub(lambda mark: f"image {int(_mark_number(mark))}", text)


def _place_by_number(text: str, numbers: Sequence[int], image_count: int) -> TextWithImages:
    """Return a text with `<image>` in place of marks with numbers, `<image1>` or `<image 0>`.

    The first mark with a number becomes `<image>`, and later marks with this number become words.
    Images whose numbers are not in the text follow at its end.

    A text may have higher numbers than the row has images, because they count the parts of one
    picture. With one image `In <image1> A, in <image2> B.` becomes `In <image> A, in image 2 B.`

    Args:
        text: the text with its marks.
        numbers: the number of each mark, in order.
        image_count: how many images the row has.
    """
    # A text counts its images from 0 if a mark has the number 0, else from 1.
    base = 0 if min(numbers) == 0 else 1
    distinct_numbers = list(dict.fromkeys(numbers))
    are_parts = max(numbers) - base >= image_count
    # The indices of the images that have no place yet, by the numbers of their marks.
    if are_parts:
        # The numbers count the parts of a picture: the first ones get the images in their order.
        unplaced_images = dict(zip(distinct_numbers, range(image_count), strict=False))
    else:
        unplaced_images = {number: number - base for number in distinct_numbers}
    order: list[int] = []  # the indices of the images, in the order of their places
    next_number = iter(numbers)

    def place_image(_: re.Match[str]) -> str:
        """Return what replaces the next mark: `<image>`, or words where its image has a place."""
        number = next(next_number)
        if number not in unplaced_images:
            return f"image {number}"
        order.append(unplaced_images.pop(number))
        return IMAGE_PLACEHOLDER

    placed_text = _IMAGE_MARK_PATTERN.sub(place_image, text).strip()
    images_without_mark = [image for image in range(image_count) if image not in order]
    placed_text += f"\n{IMAGE_PLACEHOLDER}" * len(images_without_mark)
    return TextWithImages(
        text=_drop_leading_marks(placed_text),
        order=(*order, *images_without_mark),
        numbers_parts=are_parts,
    )


def _drop_leading_marks(problem: str) -> str:
    """Return a text without its marks `<image>`, if it begins with all of them; else unchanged.

    Images come before a text without marks anyway, so `<image> Find x.` becomes `Find x.`
    """
    text = problem.strip()
    while text.startswith(IMAGE_PLACEHOLDER):
        text = text.removeprefix(IMAGE_PLACEHOLDER).lstrip()
    # Where only marks are left, the question stands in the picture, and the marks stay.
    return text if text and IMAGE_PLACEHOLDER not in text else problem.strip()
