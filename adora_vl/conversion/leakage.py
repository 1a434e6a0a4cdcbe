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

import numpy as np
from PIL import Image

from adora_vl.data.images import diagram_hash

# Two spellings of one question may differ in these; the signs of arithmetic stay, since 2+3 is not
# 2-3.
_NO_SIGNS = re.compile(r"[^\w\\+\-*/^=<>]+")
_GRID = 16
_INK = 245  # a grey level below it is drawing, one above it is paper
_STEP = 8  # a difference of grey levels between patches that is more than noise of a recompression
# Two hashes of 256 bits are near if they differ in at most so many bits. The six real diagrams that
# were at hand, scaled by 0.5 to 2, as JPEG 50 and in 16 colours, moved by about 30 at most; two
# different ones of them are at least 63 apart.
_NEAR_BITS = 32


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of a row, which are all that is remembered of it."""

    exact: bytes  # the question's key and the pixels of all pictures
    question_and_gold: bytes  # the question's key and the gold
    near: tuple[int, ...]  # one difference hash of 256 bits for each image
    question: bytes  # what a model is asked, to the letter: the text, its options, its pictures
    pictures: tuple[bytes, ...] = ()  # the pixels of each picture


def fingerprint(
    problem: str,
    answer: str,
    images: list[Image.Image],
    choices: Sequence[str] | None = None,
    *,
    near: bool = True,
) -> Fingerprint:
    """Hash a cleaned row: its text, its canonical gold, its pictures and its options.

    `near` says whether to compute difference hashes too, which take time; data of a single split
    does not need them.
    """
    key = question_key(problem)
    hashes = [diagram_hash(image) for image in images]
    pixels = "".join(hashes)
    return Fingerprint(
        exact=hashlib.sha256(f"{key}\0{pixels}".encode()).digest()[:16],
        question_and_gold=hashlib.sha256(f"{key}\0{answer}".encode()).digest()[:16],
        near=tuple(difference_hash(image) for image in images) if near else (),
        question=hashlib.sha256(
            "\0".join((" ".join(problem.split()), pixels, *(choices or ()))).encode()
        ).digest()[:16],
        pictures=tuple(bytes.fromhex(digest)[:16] for digest in hashes),
    )


def question_key(problem: str) -> str:
    """Return a question without what two spellings of it may differ in."""
    return _NO_SIGNS.sub(" ", problem.casefold()).strip()


def difference_hash(image: Image.Image) -> int:
    """Return 256 bits: whether a patch is darker than its left neighbour by more than noise."""
    grey = image.convert("L")
    drawing = grey.point(lambda level: 255 if level < _INK else 0).getbbox()
    patches = grey.crop(drawing).resize((_GRID + 1, _GRID), Image.Resampling.BOX)
    levels = np.asarray(patches, dtype=np.int16)
    return int.from_bytes(np.packbits(levels[:, :-1] - levels[:, 1:] > _STEP).tobytes(), "big")


class LeakIndex:
    """The hashes of the held-out rows so far, which take about 400 bytes of memory a row."""

    def __init__(self) -> None:
        self._exact: dict[bytes, tuple[str, str]] = {}
        self._near: dict[bytes, list[tuple[tuple[int, ...], str, str]]] = defaultdict(list)

    def add(self, split: str, row_id: str, hashes: Fingerprint) -> None:
        """Remember a row of a held-out split."""
        self._exact.setdefault(hashes.exact, (split, row_id))
        self._near[hashes.question_and_gold].append((hashes.near, split, row_id))

    def find(self, split: str, hashes: Fingerprint) -> tuple[str, str] | None:
        """Find a row of another split with the same diagram and question.

        Returns its id, and the comparison that found it (`exact` or `near`), or None.
        """
        match = self._exact.get(hashes.exact)
        if match is not None:
            matching_split, row_id = match
            if matching_split != split:
                return row_id, "exact"
        for near, other_split, row_id in self._near.get(hashes.question_and_gold, ()):
            pairs = zip(near, hashes.near, strict=False)
            alike = len(near) == len(hashes.near) and all(
                (a ^ b).bit_count() <= _NEAR_BITS for a, b in pairs
            )
            if other_split != split and alike:
                return row_id, "near"
        return None
