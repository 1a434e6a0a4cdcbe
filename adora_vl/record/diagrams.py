"""The diagrams of the recorded rollouts: PNG files, each stored once."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from adora_vl.utils.files import replacing_file

# pixels; a diagram is legible at this size, and a data set of 100,000 stays at about a GB
_MAX_SIDE_PIXELS = 512
# The note in a stored diagram that says how large it was
_SIZE_NOTE_KEY = "original size"


def read_original_size(path: Path) -> tuple[int, int] | None:
    """Return the width and height that a stored diagram had before `DiagramStore` made it smaller.

    They stand in a text note in the PNG file, as "640 480". None where the file is damaged.
    """
    try:
        with Image.open(path) as image:
            size_note = image.info.get(_SIZE_NOTE_KEY)
            if size_note is None:  # another program stored it
                return image.size
            width, height = size_note.split()
            return int(width), int(height)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


class DiagramStore:
    """The diagrams of the recorded rollouts, as PNG files that are named by their content.

    Files are written until the folder holds `limit_bytes`. Every rank may write: equal content has
    an equal name.
    """

    def __init__(self, folder: Path, limit_bytes: float) -> None:
        """Begin without knowing what the folder holds; nothing is read or written yet."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        # names of the image files of each dataset row whose images were stored already
        self._names_by_row_id: dict[str, list[str]] = {}
        # size of the folder, which `_used_bytes` counts when it is asked first
        self._folder_bytes: int | None = None

    def forget(self) -> None:
        """Forget what was stored, because the folder may have been emptied."""
        self._names_by_row_id.clear()
        self._folder_bytes = None

    def store(self, row_id: str | None, images: Sequence[object]) -> list[str]:
        """Store the images of a dataset row that are not stored yet, and return all file names.

        Args:
            row_id: the row's id. Its images are stored at the first call, and later calls return
                the same names. None for images that belong to no row: every call looks at them.
            images: the images of the row. An entry that is no PIL image is left out.

        Raises:
            OSError: the disk is full, or refuses for another reason.
        """
        if row_id is not None and row_id in self._names_by_row_id:
            return self._names_by_row_id[row_id]
        names = [self._store(image) for image in images if isinstance(image, Image.Image)]
        if row_id is not None:
            self._names_by_row_id[row_id] = names
        return names

    def _store(self, image: Image.Image) -> str:
        """Store an image, if it is new and the limit allows it, and return the name of its file.

        The name is a hash of mode, size and pixels, so equal images share one file.
        """
        digest = hashlib.sha256(f"{image.mode} {image.size} ".encode())
        digest.update(image.tobytes())
        path = self.folder / f"{digest.hexdigest()[:16]}.png"
        bytes_before = self._used_bytes()
        if not path.exists() and bytes_before < self.limit_bytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            small_image = image.convert("RGB")
            small_image.thumbnail((_MAX_SIDE_PIXELS, _MAX_SIDE_PIXELS))
            png_notes = PngInfo()
            png_notes.add_text(_SIZE_NOTE_KEY, f"{image.width} {image.height}")
            # Nothing waits for the disk, since a diagram that is lost in a crash does no harm.
            with replacing_file(path, durable=False) as stream:
                small_image.save(stream, "PNG", pnginfo=png_notes)
            self._folder_bytes = bytes_before + path.stat().st_size
        return path.name

    def _used_bytes(self) -> int:
        """Return the size of all files in the folder, which is counted once and kept up after."""
        if self._folder_bytes is None:
            self._folder_bytes = sum(_size_or_zero(path) for path in self.folder.glob("*"))
        return self._folder_bytes


def _size_or_zero(path: Path) -> int:
    """Return the bytes of a file, or 0 if it has gone since the folder was listed.

    For example, another rank's hidden file is renamed once it is written. If an error were raised
    here, the record would lack the names of this rank's diagrams.
    """
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
