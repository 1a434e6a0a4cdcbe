"""Remembers how long the prompts of large data sets are, so that the next start need not count.

The lengths are in `prompt_lengths/` in the cache folder, which may be deleted: 8 bytes a row.
"""

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from adora_vl.utils.files import cache_folder, replace_file

_COUNTING_VERSION = "1"  # another one where the same texts would be counted in another way


class CachedLengths(NamedTuple):
    """The tokens of each prompt of a data set, and those of its images among them."""

    prompt_tokens: Sequence[int]
    image_tokens: Sequence[int]


class PromptLengthCache:
    """The file with the lengths of one data set, counted by one tokenizer with one template."""

    def __init__(self, identities: Sequence[str], texts: Sequence[str]) -> None:
        """Choose the file for these rows, whose name is a hash of all that the lengths depend on.

        Args:
            identities: hashes of the data's files and of the tokenizer with its template, and the
                limits on pixels as text.
            texts: the problems of all rows, in their order.
        """
        self._row_count = len(texts)
        # An empty identity means that the counter could not say what decides its counts.
        self._is_enabled = all(identities)
        digest = xxhash.xxh3_128(repr((_COUNTING_VERSION, *identities, self._row_count)).encode())
        for text in texts:
            digest.update(text.encode())
            digest.update(b"\0")
        self._file: Path = cache_folder() / "prompt_lengths" / f"{digest.hexdigest()}.npy"

    def read(self) -> CachedLengths | None:
        """Return the lengths in the file; None if there are none."""
        if not self._is_enabled:
            return None
        # A file may be cut off, or from somewhere else.
        with suppress(OSError, ValueError, EOFError):
            lengths_2N = np.load(self._file, allow_pickle=False)
            if lengths_2N.shape == (2, self._row_count) and lengths_2N.dtype == np.int32:
                prompt_tokens, image_tokens = lengths_2N.tolist()
                return CachedLengths(prompt_tokens=prompt_tokens, image_tokens=image_tokens)
        return None

    def write(self, lengths: CachedLengths) -> None:
        """Write lengths for the next start.

        If the disk has no room for them, the next start counts again.
        """
        if not self._is_enabled:
            return
        content = io.BytesIO()
        np.save(content, np.array([lengths.prompt_tokens, lengths.image_tokens], dtype=np.int32))
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, content.getvalue())
