"""Finds the same diagram with the same question in two splits.

A model that was trained on such a row is not tested by it. Two hashes are compared, together with
the question (case, spaces and punctuation aside, but for the signs of arithmetic):

- SHA-256 of the pixels finds the same picture, whatever the gold is.
- A difference hash of 16 x 16 comparisons of neighbouring patches, inside the drawing's bounding
  box, finds the same picture when it was scaled, recompressed or given another margin. It cannot
  see a digit, and textbooks print one figure with many numbers, so that here the golds have to
  agree too.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from adora_vl.data.images import diagram_hash

# Two spellings of one question may differ in spaces and punctuation. The signs of arithmetic are
# not among these, since 2+3 is not 2-3.
_NO_SIGNS = re.compile(r"[^\w\\+\-*/^=<>]+")
_GRID = 16  # patches in a row and in a column of a picture
_INK = 245  # a grey level below it is drawing, one above it is paper
_LEAST_CONTRAST = 8  # of two patches in grey levels; recompression causes smaller differences
# Two hashes of 256 bits are near if they differ in at most so many bits. The six real diagrams that
# were at hand, scaled by 0.5 to 2, as JPEG 50 and in 16 colours, moved by about 30 at most; two
# different ones of them are at least 63 apart.
_NEAR_BITS = 32


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of a row, which are all that is remembered of it."""

    # In these two the question is in lower case and without punctuation.
    exact: bytes  # of the question and the pixels of all pictures
    question_and_gold: bytes  # of the question and the reference answer
    near: tuple[int, ...]  # for each picture a hash of 256 bits; a scaled copy has nearly the same
    question: (
        bytes  # of all that a model is given: the text to the letter, its options, its pictures
    )
    pictures: tuple[bytes, ...] = ()  # for each picture a hash of its pixels


def fingerprint(
    problem: str,
    answer: str,
    images: list[Image.Image],
    choices: Sequence[str] | None = None,
    *,
    near: bool = True,
) -> Fingerprint:
    """Hash a cleaned row, so that later rows can be compared with it without its pictures.

    `answer` is the reference answer in its canonical form, and `choices` are the options to choose
    from. `near` says whether to compute the hashes that find scaled pictures. They take time, and
    data of a single split does not need them.
    """
    question = without_punctuation(problem)
    pixel_hashes = [diagram_hash(image) for image in images]
    pixels = "".join(pixel_hashes)
    text_to_the_letter = " ".join(problem.split())  # but for the kinds of white space
    return Fingerprint(
        exact=_joint_hash(question, pixels),
        question_and_gold=_joint_hash(question, answer),
        near=tuple(difference_hash(image) for image in images) if near else (),
        question=_joint_hash(text_to_the_letter, pixels, *(choices or ())),
        pictures=tuple(bytes.fromhex(pixel_hash)[:16] for pixel_hash in pixel_hashes),
    )


def _joint_hash(*texts: str) -> bytes:
    """Return a hash of 16 bytes of several texts, with a zero byte between them."""
    return hashlib.sha256("\0".join(texts).encode()).digest()[:16]


def without_punctuation(problem: str) -> str:
    """Return a question in lower case and without punctuation: `find ab` for `Find AB?`."""
    return _NO_SIGNS.sub(" ", problem.casefold()).strip()


def difference_hash(image: Image.Image) -> int:
    """Return a hash of 256 bits that a scaled or recompressed copy of a diagram nearly shares.

    The drawing without its margin becomes 17 x 16 patches of grey. A bit says whether a patch is
    clearly lighter than its right neighbour.
    """
    grey = image.convert("L")
    drawing = grey.point(lambda level: 255 if level < _INK else 0).getbbox()
    patches = grey.crop(drawing).resize((_GRID + 1, _GRID), Image.Resampling.BOX)
    levels = np.asarray(patches, dtype=np.int16)  # signed, for differences below 0
    is_lighter = levels[:, :-1] - levels[:, 1:] > _LEAST_CONTRAST
    return int.from_bytes(np.packbits(is_lighter).tobytes(), "big")


class _HeldOutRow(NamedTuple):
    """A row of a held-out split, as the index of leaks remembers it."""

    split: str
    row_id: str
    near: tuple[int, ...]  # as in its `Fingerprint`


class LeakMatch(NamedTuple):
    """A held-out row that another split has too."""

    row_id: str
    comparison: str  # what found it: `exact` or `near`


class LeakIndex:
    """The hashes of the held-out rows so far, which take about 400 bytes of memory a row."""

    def __init__(self) -> None:
        # The first row with each `Fingerprint.exact`.
        self._first_by_exact: dict[bytes, _HeldOutRow] = {}
        # All rows with each `Fingerprint.question_and_gold`.
        self._rows_by_question: dict[bytes, list[_HeldOutRow]] = defaultdict(list)

    def add(self, split: str, row_id: str, hashes: Fingerprint) -> None:
        """Remember a row of a held-out split."""
        row = _HeldOutRow(split=split, row_id=row_id, near=hashes.near)
        self._first_by_exact.setdefault(hashes.exact, row)
        self._rows_by_question[hashes.question_and_gold].append(row)

    def find(self, split: str, hashes: Fingerprint) -> LeakMatch | None:
        """Find a held-out row with the same diagram and question as a row of the split `split`.

        The held-out row has to be in another split. `hashes` are those of the row of `split`.
        """
        same = self._first_by_exact.get(hashes.exact)
        if same is not None and same.split != split:
            return LeakMatch(row_id=same.row_id, comparison="exact")
        for row in self._rows_by_question.get(hashes.question_and_gold, ()):
            if row.split != split and _are_near(row.near, hashes.near):
                return LeakMatch(row_id=row.row_id, comparison="near")
        return None


def _are_near(hashes: Sequence[int], other_hashes: Sequence[int]) -> bool:
    """Return whether two rows have equally many pictures, and nearly the same ones in order."""
    if len(hashes) != len(other_hashes):
        return False
    for picture_hash, other_hash in zip(hashes, other_hashes, strict=True):
        differing_bits = (picture_hash ^ other_hash).bit_count()
        if differing_bits > _NEAR_BITS:
            return False
    return True
