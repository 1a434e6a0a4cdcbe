"""Remembers how long the prompts of large data sets are, so that the next start need not count.

The lengths are in `prompt_lengths/` in the cache folder, which may be deleted: 8 bytes a row.
"""

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from adora_vl.utils.files import cache_folder, replace_file

_COUNTING_VERSION = "1"  # another one where the same texts would be counted in another way


class RememberedLengths:
    """The lengths of one data set, counted by one tokenizer with one template."""

    def __init__(self, identities: Sequence[str], texts: Sequence[str]) -> None:
        """Find the file of these rows.

        Args:
            identities: of the files, the tokenizer with its template, and the limits on pixels.
            texts: of all rows, in their order.
        """
        self._rows = len(texts)
        # An empty identity: the counter could not say what decides its counts.
        self._can_remember = all(identities)
        digest = xxhash.xxh3_128(repr((_COUNTING_VERSION, *identities, self._rows)).encode())
        for text in texts:
            digest.update(text.encode())
            digest.update(b"\0")
        self._file: Path = cache_folder() / "prompt_lengths" / f"{digest.hexdigest()}.npy"

    def read(self) -> tuple[list[int], list[int]] | None:
        """Return the tokens of each prompt and those of its images; None if they are not known."""
        if not self._can_remember:
            return None
        # A file may be cut off, or from somewhere else.
        with suppress(OSError, ValueError, EOFError):
            lengths_2N = np.load(self._file, allow_pickle=False)
            if lengths_2N.shape == (2, self._rows) and lengths_2N.dtype == np.int32:
                prompt, image = lengths_2N.tolist()
                return prompt, image
        return None

    def write(self, prompt: Sequence[int], image: Sequence[int]) -> None:
        """Write the tokens of each prompt, and those of its images, for the next start.

        If the disk has no room for them, the next start counts again.
        """
        if not self._can_remember:
            return
        content = io.BytesIO()
        np.save(content, np.array([prompt, image], dtype=np.int32))
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, content.getvalue())
