"""The diagrams of the recorded problems, each stored once under the hash of its pixels, small enough to look at."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from adora_vl.files import replacing

_SIDE = 512  # pixels; a diagram is legible at this size, and a data set of 100,000 stays at about a GB


class Diagrams:
    """Writes into `folder` until it holds `limit_bytes`. Every rank may write: equal content has an equal name."""

    def __init__(self, folder: Path, limit_bytes: float) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._names: dict[str, list[str]] = {}
        self._bytes: int | None = None

    def forget(self) -> None:
        """Forget what was stored, because the folder may have been emptied."""
        self._names.clear()
        self._bytes = None

    def keep(self, row: str | None, images: Sequence[Any]) -> list[str]:
        """Store those images of a row that are new, and return all their file names. `row` is the row's id."""
        if row is not None and row in self._names:
            return self._names[row]
        names = [self._keep(image) for image in images if isinstance(image, Image.Image)]
        if row is not None:
            self._names[row] = names
        return names

    def _keep(self, image: Image.Image) -> str:
        digest = hashlib.sha256(f"{image.mode} {image.size} ".encode())
        digest.update(image.tobytes())
        path = self.folder / f"{digest.hexdigest()[:16]}.png"
        if not path.exists() and self._used() < self.limit_bytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            small = image.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
            before = self._used()
            with replacing(path, durable=False) as stream:
                small.save(stream, "PNG")
            self._bytes = before + path.stat().st_size
        return path.name

    def _used(self) -> int:
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for path in self.folder.glob("*"))
        return self._bytes
