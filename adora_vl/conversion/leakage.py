"""Finds the same diagram with the same question in two splits: a model that was trained on it is
not tested by it.

Two hashes are compared, together with the question (case, spaces and punctuation aside, but for
signs of arithmetic):
- SHA-256 of the pixels: the same picture, whatever the gold;
- a difference hash of 16 x 16 comparisons of neighbouring patches inside the drawing's bounding
  box: the same picture scaled, recompressed or with another margin. It cannot see a digit, and
  textbooks print one figure with many numbers, so here the golds have to agree too.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from adora_vl.data.images import diagram_hash

# what two spellings of one question may differ in; 2+3 is not 2-3
_NO_SIGNS = re.compile(r"[^\w\\+\-*/^=<>]+")
_GRID = 16
_INK = 245  # grey levels below it are drawing, above it paper
_STEP = 8  # grey levels between neighbouring patches that are more than noise of a recompression
# Of 256 bits. The six real diagrams that were at hand, scaled by 0.5 to 2, as JPEG 50 and in 16
# colours, moved by about 30 at most; two different ones of them are at least 63 apart.
_NEAR_BITS = 32


@dataclass(frozen=True)
class Fingerprint:
    """What is remembered of a row: hashes alone."""

    exact: bytes
    question_and_gold: bytes
    near: tuple[int, ...]  # one difference hash of 256 bits for each image
    asked: bytes  # of what a model is asked, to the letter: the question, its options, its pictures
    pictures: tuple[bytes, ...] = ()  # of each one


def fingerprint(
    problem: str,
    answer: str,
    images: list[Image.Image],
    choices: Sequence[str] | None = None,
    *,
    near: bool = True,
) -> Fingerprint:
    """Of a cleaned row: its text, its canonical gold, its pictures, its options.

    `near`: whether to compare with others by difference hashes too, which take time.
    """
    question = question_key(problem)
    hashes = [diagram_hash(image) for image in images]
    pixels = "".join(hashes)
    return Fingerprint(
        exact=hashlib.sha256(f"{question}\0{pixels}".encode()).digest()[:16],
        question_and_gold=hashlib.sha256(f"{question}\0{answer}".encode()).digest()[:16],
        near=tuple(difference_hash(image) for image in images) if near else (),
        asked=hashlib.sha256(
            "\0".join((" ".join(problem.split()), pixels, *(choices or ()))).encode()
        ).digest()[:16],
        pictures=tuple(bytes.fromhex(digest)[:16] for digest in hashes),
    )


def question_key(problem: str) -> str:
    """A question without what two spellings of it may differ in."""
    return _NO_SIGNS.sub(" ", problem.casefold()).strip()


def difference_hash(image: Image.Image) -> int:
    """256 bits: whether a patch is darker than its left neighbour by more than noise."""
    grey = image.convert("L")
    drawing = grey.point(lambda level: 255 if level < _INK else 0).getbbox()
    patches = grey.crop(drawing).resize((_GRID + 1, _GRID), Image.Resampling.BOX)
    levels = np.asarray(patches, dtype=np.int16)
    return int.from_bytes(np.packbits(levels[:, :-1] - levels[:, 1:] > _STEP).tobytes(), "big")


class LeakIndex:
    """The rows of the held-out splits that were seen so far; memory grows by about 400 bytes per
    such row.
    """

    def __init__(self) -> None:
        self._exact: dict[bytes, tuple[str, str]] = {}
        self._near: dict[bytes, list[tuple[tuple[int, ...], str, str]]] = defaultdict(list)

    def add(self, split: str, row_id: str, print_: Fingerprint) -> None:
        self._exact.setdefault(print_.exact, (split, row_id))
        self._near[print_.question_and_gold].append((print_.near, split, row_id))

    def find(self, split: str, print_: Fingerprint) -> tuple[str, str] | None:
        """The id of a row of another split with the same diagram and question, and `exact` or
        `near`; else None.
        """
        other = self._exact.get(print_.exact)
        if other and other[0] != split:
            return other[1], "exact"
        for near, other_split, row_id in self._near.get(print_.question_and_gold, ()):
            pairs = zip(near, print_.near, strict=False)
            alike = len(near) == len(print_.near) and all(
                (a ^ b).bit_count() <= _NEAR_BITS for a, b in pairs
            )
            if other_split != split and alike:
                return row_id, "near"
        return None
