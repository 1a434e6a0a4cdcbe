"""Decoded pictures that several parts of a run hold: known by their digest, or copied on write."""

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from transformers.image_utils import ImageInput


class ImageWithDigest(Image.Image):
    """A decoded image that nobody draws on, so that its digest is computed only once."""

    @cached_property
    def digest(self) -> str:
        """The `content_digest`, by which the trainer's and the engine's image caches find it."""
        return content_digest(self)


def content_digest(image: Image.Image) -> str:
    """Return a hash of an image's mode, size, pixels and palette, in hexadecimal."""
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    if image.mode == "P":
        digest.update(bytes(image.getpalette() or []))
    return digest.hexdigest()


def as_image_with_digest(image: "ImageInput") -> Any:
    """Decode a PIL image, make it an `ImageWithDigest` in place, and return it.

    Anything but a PIL image is returned as it is.
    """
    if isinstance(image, Image.Image):
        image.load()
        image.__class__ = ImageWithDigest
    return image


class _CopyOnWriteImage(Image.Image):
    """A picture that shares the pixels of another one until somebody accesses them.

    Then it copies them and becomes a plain `Image.Image`.
    """

    @property
    def im(self) -> Any:
        """The pixels, through which every method of Pillow reads and writes.

        They are copied here, at their first use.
        """
        shared_pixels = super().im
        _make_plain_image(self)
        self.im = shared_pixels.copy()
        return self.im

    @im.setter
    def im(self, pixels: Any) -> None:
        _make_plain_image(self)
        self.im = pixels

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the picture as a plain one."""
        self.load()  # accesses the pixels, so that this is a plain picture from here on
        return self.__reduce_ex__(protocol)


def _make_plain_image(image: Image.Image) -> None:
    """Change the class of an image to Pillow's `Image`, in place."""
    image.__class__ = Image.Image


def copy_on_write(image: Image.Image) -> Image.Image:
    """Return a copy of a picture for a user's code, such as a reward function, that may draw on it.

    The pixels are copied at their first use. Most such functions never look at pictures, and they
    get the same one with every rollout of a group.
    """
    image.load()  # Pillow decodes a file only when its pixels are asked for
    image_copy = image._new(image.im)
    image_copy.__class__ = _CopyOnWriteImage
    return image_copy
