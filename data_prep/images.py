"""Turns an encoded picture of any kind into an upright RGB image that the model accepts, and that into PNG bytes."""

from __future__ import annotations

import hashlib
import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from data_prep.pixels import UNIT, WIDEST, size_within

MAX_DECODED_PIXELS = 50_000_000  # 150 MB once decoded; a diagram has a hundredth of it
MIN_SIDE = 4  # pixels; no diagram is drawn in fewer


class UnreadableImageError(ValueError):
    """The picture cannot be used. `kind`: the rule in one word, such as `image_truncated`; the message says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def clean_image(
    encoded: bytes, min_pixels: int | None = None, max_pixels: int | None = None, unit: int = UNIT
) -> Image.Image:
    """The picture upright, flattened on white, in mode RGB, and resized where it is outside of the limits (None: none).

    `unit`: the side of an image token, in pixels.

    Raises `UnreadableImageError`: not a picture, truncated, animated, too large to decode, or with nothing on it.
    """
    flat = _decoded(encoded)
    _refuse_degenerate(flat)
    try:
        size = size_within(*flat.size, min_pixels, max_pixels, unit)
    except ValueError as error:
        raise UnreadableImageError("image_shape", f"{flat.width} x {flat.height} pixels: {error}") from error
    return flat if size == flat.size else flat.resize(size, Image.Resampling.BICUBIC)


def png_bytes(image: Image.Image) -> bytes:
    """The image as PNG without metadata, so that equal pixels are equal bytes."""
    stream = io.BytesIO()
    image.save(stream, "PNG", icc_profile=None)
    return stream.getvalue()


def diagram_hash(image: Image.Image) -> str:
    """SHA-256 of the RGB pixels and the size, in hexadecimal."""
    return hashlib.sha256(f"{image.size}".encode() + image.convert("RGB").tobytes()).hexdigest()


def _decoded(encoded: bytes) -> Image.Image:
    """Upright and RGB. The header alone decides whether anything is decoded at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own pixel limit is higher, and only a warning; so are broken tags
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                _refuse_undecoded(image)
                if image.format == "PNG":  # the only one that shows a lost end: each chunk has a checksum
                    image.verify()
            with Image.open(io.BytesIO(encoded)) as image:
                image.load()
                return _flattened(ImageOps.exif_transpose(image))
        except UnreadableImageError:
            raise
        except Image.DecompressionBombError as error:
            raise UnreadableImageError("image_too_large", str(error)) from error
        except UnidentifiedImageError as error:  # its own text has a memory address in it
            raise UnreadableImageError("image_undecodable", "not in any known picture format") from error
        except Exception as error:  # Pillow raises nearly anything here: OSError, SyntaxError, struct.error, ...
            why = str(error) or type(error).__name__
            kind = "image_truncated" if "truncated" in why.lower() else "image_undecodable"
            raise UnreadableImageError(kind, why) from error


def _refuse_undecoded(image: Image.Image) -> None:
    """Refuse an image by its header, before it is decoded."""
    if image.width * image.height > MAX_DECODED_PIXELS:
        size = f"{image.width} x {image.height}"
        raise UnreadableImageError("image_too_large", f"{size} pixels are over the limit of {MAX_DECODED_PIXELS}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise UnreadableImageError("image_animated", f"it has {frames} frames")


def _refuse_degenerate(image: Image.Image) -> None:
    width, height = image.size
    if min(width, height) < MIN_SIDE:
        raise UnreadableImageError("image_degenerate", f"{width} x {height} pixels are too few for a diagram")
    if all(low == high for low, high in (channel.getextrema() for channel in image.split())):
        colour = image.getpixel((0, 0))
        raise UnreadableImageError("image_degenerate", f"all of its {width} x {height} pixels are {colour}")
    if max(width, height) > WIDEST * min(width, height):
        raise UnreadableImageError(
            "image_shape", f"{width} x {height}: one side is over {WIDEST} times the other, which the model refuses"
        )


def _flattened(image: Image.Image) -> Image.Image:
    """RGB on white. A transparent diagram is drawn for white paper; Pillow alone would put its lines on black."""
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow clips 16 bits at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    drawn = image.convert("RGBA")
    paper = Image.new("RGB", drawn.size, "white")
    paper.paste(drawn, mask=drawn.getchannel("A"))
    return paper
