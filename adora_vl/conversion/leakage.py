"""Finds the same diagram with the same question in two splits.

A model that was trained on such a row is not tested by it. Two hashes are compared, together with
the question (case, spaces and punctuation aside, but for the signs of arithmetic):

- SHA-256 of the pixels finds the same picture, whatever the answer is.
- A difference hash of 16 x 16 comparisons of neighbouring patches, inside the drawing's bounding
  box, finds the same picture when it was scaled, recompressed or given another margin. It cannot
  see a digit, and textbooks print one figure with many numbers. So the answers have to agree
  too.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from adora_vl.data.images import pixel_hash

# Two spellings of one question may differ in spaces and punctuation. The signs of arithmetic are
# not among these, since 2+3 is not 2-3.
_SPACES_AND_PUNCTUATION_PATTERN = re.compile(r"[^\w\\+\-*/^=<>]+")
_PATCHES_PER_SIDE = 16  # patches in a row and in a column of a picture
_DARKEST_PAPER = 245  # a grey level below it is drawing, one above it is paper
_LEAST_CONTRAST = 8  # of two patches in grey levels; recompression causes smaller differences
# Two hashes of 256 bits are similar if they differ in no more bits than this. The six real diagrams
# that were at hand, scaled by 0.5 to 2, as JPEG 50 and in 16 colours, moved by about 30 at most;
# two different ones of them are at least 63 apart.
_MAX_DIFFERING_BITS = 32


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of a row, which are all that is remembered of it."""

    # In these two the question is in lower case and without punctuation.
    question_and_pixels: bytes  # of the question and the pixels of all pictures
    question_and_answer: bytes  # of the question and the reference answer
    # For each picture a hash of 256 bits, of which a scaled copy has nearly all.
    perceptual_hashes: tuple[int, ...]
    # Of all that a model is given: the text as it is written, its options, and its pictures.
    prompt: bytes
    pictures: tuple[bytes, ...] = ()  # for each picture a hash of its pixels


def fingerprint(
    problem: str,
    answer: str,
    images: list[Image.Image],
    choices: Sequence[str] | None = None,
    *,
    with_perceptual_hashes: bool = True,
) -> Fingerprint:
    """Return the hashes of a cleaned row, with which later rows are compared.

    Args:
        problem: the text of the problem.
        answer: the reference answer in the grader's canonical form.
        images: the pictures.
        choices: the options of a multiple-choice problem.
        with_perceptual_hashes: whether to compute the hashes that find scaled pictures. They take
            time, and data of a single split does not need them.
    """
    question = without_punctuation(problem)
    pixel_hashes = [pixel_hash(image) for image in images]
    pixels = "".join(pixel_hashes)
    prompt_text = " ".join(problem.split())  # only white space is made equal
    perceptual_hashes: tuple[int, ...] = ()
    if with_perceptual_hashes:
        perceptual_hashes = tuple(difference_hash(image) for image in images)
    return Fingerprint(
        question_and_pixels=_joint_hash(question, pixels),
        question_and_answer=_joint_hash(question, answer),
        perceptual_hashes=perceptual_hashes,
        prompt=_joint_hash(prompt_text, pixels, *(choices or ())),
        pictures=tuple(bytes.fromhex(digest)[:16] for digest in pixel_hashes),
    )


def _joint_hash(*texts: str) -> bytes:
    """Return a hash of 16 bytes of several texts, with a zero byte between them."""
    return hashlib.sha256("\0".join(texts).encode()).digest()[:16]


def without_punctuation(problem: str) -> str:
    """Return a question in lower case and without punctuation: `find ab` for `Find AB?`."""
    return _SPACES_AND_PUNCTUATION_PATTERN.sub(" ", problem.casefold()).strip()


def difference_hash(image: Image.Image) -> int:
    """Return a hash of a diagram, 256 bits.

    The hash of a scaled or recompressed copy has nearly all bits in common with it.

    The drawing without its margin becomes 17 x 16 patches of grey. A bit says whether a patch is
    clearly lighter than its right neighbour.
    """
    grey = image.convert("L")
    drawing_box = grey.point(lambda level: 255 if level < _DARKEST_PAPER else 0).getbbox()
    patches = grey.crop(drawing_box).resize(
        (_PATCHES_PER_SIDE + 1, _PATCHES_PER_SIDE), Image.Resampling.BOX
    )
    levels = np.asarray(patches, dtype=np.int16)  # signed, for differences below 0
    is_lighter = levels[:, :-1] - levels[:, 1:] > _LEAST_CONTRAST
    return int.from_bytes(np.packbits(is_lighter).tobytes(), "big")


class _HeldOutRow(NamedTuple):
    """A row of a held-out split, as the index of leaks remembers it."""

    split: str
    row_id: str
    perceptual_hashes: tuple[int, ...]  # as in its `Fingerprint`


class LeakMatch(NamedTuple):
    """A held-out row that another split has too."""

    row_id: str
    comparison: str  # `exact` for equal pixels, `near` for similar ones and an equal answer


class LeakIndex:
    """The hashes of the held-out rows so far, which take about 400 bytes of memory a row."""

    def __init__(self) -> None:
        # The first row with each `Fingerprint.question_and_pixels`.
        self._row_by_question_and_pixels: dict[bytes, _HeldOutRow] = {}
        # All rows with each `Fingerprint.question_and_answer`.
        self._rows_by_question_and_answer: dict[bytes, list[_HeldOutRow]] = defaultdict(list)

    def add(self, split: str, row_id: str, hashes: Fingerprint) -> None:
        """Remember a row of a held-out split."""
        row = _HeldOutRow(split=split, row_id=row_id, perceptual_hashes=hashes.perceptual_hashes)
        self._row_by_question_and_pixels.setdefault(hashes.question_and_pixels, row)
        self._rows_by_question_and_answer[hashes.question_and_answer].append(row)

    def find(self, split: str, hashes: Fingerprint) -> LeakMatch | None:
        """Return the held-out row with the diagram and question of a row; None if there is none.

        `split` is the split of the row, and `hashes` are its hashes. Only held-out rows of other
        splits are compared.
        """
        same_row = self._row_by_question_and_pixels.get(hashes.question_and_pixels)
        if same_row is not None and same_row.split != split:
            return LeakMatch(row_id=same_row.row_id, comparison="exact")
        for row in self._rows_by_question_and_answer.get(hashes.question_and_answer, ()):
            if row.split != split and _are_similar(row.perceptual_hashes, hashes.perceptual_hashes):
                return LeakMatch(row_id=row.row_id, comparison="near")
        return None


def _are_similar(hashes: Sequence[int], other_hashes: Sequence[int]) -> bool:
    """Return whether two rows have nearly the same pictures in the same order.

    The arguments are the `perceptual_hashes` of the two rows, one for each picture.
    """
    if len(hashes) != len(other_hashes):
        return False
    for picture_hash, other_hash in zip(hashes, other_hashes, strict=True):
        differing_bits = (picture_hash ^ other_hash).bit_count()
        if differing_bits > _MAX_DIFFERING_BITS:
            return False
    return True
