"""Pictures: decoded, turned upright, brought within the pixel budget, and known by what they show."""

import hashlib
import io
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from adora_vl.models.families import seeing_families
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers.image_utils import ImageInput

VISIONS = seeing_families()
DEFAULT_FAMILY = "qwen2_5_vl"
# pixels: the side of the smallest image token there is
UNIT = min(vision.unit for vision in VISIONS.values())
# the largest pixel limit that is accepted; no image that can be decoded has as many
MAX_PIXELS = 2**31
# above this ratio of the sides the model's processor raises, in the middle of a training
WIDEST = 200


MAX_DECODED_PIXELS = 50_000_000  # 150 MB once decoded; a diagram has a hundredth of it
_JPEGS = ("JPEG", "MPO")  # the second has more pictures behind the first, as those of phones have
_LYING = (5, 6, 7, 8)  # EXIF's orientations that exchange width and height
MIN_SIDE = 4  # pixels; no diagram is drawn in fewer
# Pillow would start Ghostscript for a stranger's EPS
FORMATS = (
    "PNG",
    "JPEG",
    "GIF",
    "BMP",
    "WEBP",
    "TIFF",
)


def open_picture(source: Any) -> Image.Image:
    """Return a picture of one of the `FORMATS`, or in HEIC where it is registered, not decoded.

    Raises what Pillow raises.
    """
    return Image.open(source, formats=(*FORMATS, *({"HEIF"} & Image.OPEN.keys())))


@lru_cache(maxsize=4096)
def model_size(
    width: int, height: int, unit: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return width and height, multiples of `unit`, that a processor with these limits resizes to.

    Raises `ValueError`.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        smart_resize,
    )  # seconds, so only where needed

    new_height, new_width = smart_resize(height, width, unit, min_pixels, max_pixels)
    return int(new_width), int(new_height)


def image_tokens(size: tuple[int, int], unit: int, low: int, high: int, row: object) -> int:
    """Return tokens of a picture of a row, by the processor's own rule.

    Raises `UserError` where the processor refuses it.
    """
    try:
        width, height = model_size(*size, unit, low, high)
    except ValueError as error:
        reason = (
            f"row {row} has an image of {size[0]} x {size[1]} pixels, which the model's "
            "processor refuses"
        )
        raise UserError(f"dataset: {reason} ({error}); remove the row") from error
    return width // unit * (height // unit)


def size_within(
    width: int,
    height: int,
    min_pixels: int | None,
    max_pixels: int | None,
    unit: int = VISIONS[DEFAULT_FAMILY].unit,
) -> tuple[int, int]:
    """Return the width and height, in pixels, at which to store a picture.

    They are unchanged where a processor with these limits would only round them to multiples of
    `unit`. Outside of the limits it is the size that the processor would choose, so that it has
    nothing left to do. None: no limit. Raises `ValueError` where the processor's rule has no size
    within the limits: a side is never under `unit` pixels.
    """
    rounded = round(width / unit) * round(height / unit) * unit**2
    if (min_pixels or 0) <= rounded <= (max_pixels or sys.maxsize):
        return width, height
    low = min_pixels or unit**2
    high = max_pixels or sys.maxsize
    new_width, new_height = model_size(
        width, height=height, unit=unit, min_pixels=low, max_pixels=high
    )
    if not low <= new_width * new_height <= high:
        raise ValueError(f"no size of its shape is within {low} to {high} pixels")
    return new_width, new_height


class UnreadableImageError(ValueError):
    """The picture cannot be used.

    `kind`: the rule in one word, such as `image_truncated`; the message says why.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def clean_image(
    encoded: bytes, low: int | None = None, high: int | None = None, unit: int = UNIT
) -> Image.Image:
    """Return the picture upright, flattened on white, in mode RGB, and within the pixel limits.

    It is resized where its number of pixels is not within `low` and `high` (None: no limit).
    `unit`: the side of an image token, in pixels. Raises `UnreadableImageError` as `decoded_image`
    does, and for a picture with nothing on it, or with values that leave open what is white.
    """
    flat = decoded_image(encoded)
    _refuse_degenerate(flat)
    try:
        size = size_within(*flat.size, low, high, unit)
    except ValueError as error:
        raise UnreadableImageError(
            "image_shape", f"{flat.width} x {flat.height} pixels: {error}"
        ) from error
    return flat if size == flat.size else flat.resize(size, Image.Resampling.BICUBIC)


def png_bytes(image: Image.Image, **options: int) -> bytes:
    """Return the image as PNG without metadata, so that equal pixels are equal bytes.

    `options`: of Pillow's writer.
    """
    stream = io.BytesIO()
    image.save(stream, "PNG", icc_profile=None, **options)
    return stream.getvalue()


# no text, no place
_PLAIN_CHUNKS = (
    b"IHDR",
    b"IDAT",
    b"IEND",
    b"pHYs",
    b"gAMA",
    b"sRGB",
    b"cHRM",
    b"sBIT",
    b"bKGD",
)
# JFIF's and Adobe's; a camera's data, profiles and comments have others
_PLAIN_SEGMENTS = (
    0xE0,
    0xEE,
)
_TURNS = range(2, 9)  # EXIF's orientations but the upright one


def stored_bytes(encoded: bytes, image: Image.Image) -> bytes:
    """Return the bytes to store for `image`, which `clean_image` made of `encoded`.

    A PNG or JPEG with the same pixels is stored as the file itself, without a camera's data, texts
    and profiles: encoding it takes as long as all other work on a row, and a photograph as PNG is
    many times larger. Anything else becomes a new PNG. A JPEG that lies on its side keeps its
    orientation tag.
    """
    with open_picture(io.BytesIO(encoded)) as original:
        plain = None
        if original.mode == "RGB" and original.format == "PNG":
            plain = _plain_png(encoded, original, image)
        elif original.mode == "RGB" and original.format in _JPEGS:
            plain = _plain_jpeg(encoded, original, image)
        if plain is not None:
            return plain
    # in a fifth of the time
    return png_bytes(_rgb(image), compress_level=1, compress_type=zlib.Z_RLE)


def _plain_png(encoded: bytes, original: Image.Image, image: Image.Image) -> bytes | None:
    """Return a PNG without what is not of its pixels; None where `image` has other pixels."""
    if original.size != image.size:
        return None
    chunks = list(_chunks(encoded))
    if any(chunk[4:8] in (b"tRNS", b"eXIf") for chunk in chunks):  # transparent, or turned
        return None
    signature = encoded[:8]
    return signature + b"".join(chunk for chunk in chunks if chunk[4:8] in _PLAIN_CHUNKS)


def _plain_jpeg(encoded: bytes, original: Image.Image, image: Image.Image) -> bytes | None:
    """Return a JPEG without what is not of its pixels; None where `image` has another size.

    The tag that says how it is turned stays.
    """
    orientation = original.getexif().get(ExifTags.Base.Orientation)
    width, height = original.size
    upright_size = (height, width) if orientation in _LYING else (width, height)
    if image.size != upright_size:
        return None
    segment = b""
    if orientation in _TURNS:
        tags = Image.Exif()
        tags[ExifTags.Base.Orientation] = orientation
        exif = tags.tobytes()
        segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    return b"\xff\xd8" + segment + b"".join(_plain_segments(encoded)) + b"\xff\xd9"


def _plain_segments(encoded: bytes) -> Iterator[bytes]:
    """Yield the segments of a JPEG between its start and end markers, without a camera's data."""
    position = 2  # behind the start marker
    while True:
        marker = _MARKER.search(encoded, position)
        if marker is None or marker[1] == b"\xd9":  # the end of the picture
            return
        length = int.from_bytes(encoded[marker.end() : marker.end() + 2], "big")
        end = marker.end() + length
        kind = marker[1][0]
        if kind == 0xDA:  # a scan: its data follow, up to the next marker
            next_marker = _MARKER.search(encoded, end)
            end = next_marker.start() if next_marker else len(encoded)
        is_of_application = 0xE0 <= kind <= 0xEF or kind == 0xFE  # or a comment
        if not is_of_application or kind in _PLAIN_SEGMENTS:
            yield encoded[marker.start() : end]
        position = end


_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])", re.DOTALL)


def _chunks(encoded: bytes) -> Iterator[bytes]:
    """Yield the chunks of a PNG, each with its length and name before it."""
    at = 8
    name = b""
    while at < len(encoded) and name != b"IEND":
        name = encoded[at + 4 : at + 8]
        end = at + 12 + int.from_bytes(encoded[at : at + 4], "big")
        yield encoded[at:end]
        at = end


_STRIP = 128  # lines


def diagram_hash(image: Image.Image) -> str:
    """Return SHA-256 of the RGB pixels and the size, in hexadecimal."""
    digest = hashlib.sha256(f"{image.size}".encode())
    image = _rgb(image)
    # the memory of a copy of the whole is new each time, which costs more
    for top in range(0, image.height, _STRIP):
        digest.update(image.crop((0, top, image.width, min(image.height, top + _STRIP))).tobytes())
    return digest.hexdigest()


def file_within(folder: Path, name: str, root: Path | None = None) -> Path:
    """Return the file to which a relative path from a data set leads, from `folder`.

    Raises `UnreadableImageError` if it leads out of `root` (None: the folder), also by a link: a
    data set from elsewhere must not show a model any file of this machine.
    """
    try:
        file = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise UnreadableImageError("file_missing", f"{name!r:.80} is no path ({error})") from error
    if Path(name).is_absolute() or not file.is_relative_to((root or folder).resolve()):
        raise UnreadableImageError(
            "path_outside", f"the path {name!r:.80} leads out of the data's folder"
        )
    return file


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return width and height that `decoded_image` would give, from the header alone.

    Raises what Pillow raises.
    """
    with open_picture(io.BytesIO(encoded)) as image:
        # Pillow would decode it to look behind the pixels
        if image.format == "PNG" and "exif" not in image.info:
            return image.size
        lies = image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING
        return (image.height, image.width) if lies else image.size


# What stands in the place of a picture: its first bytes, a word for it, what it is and what to do.
_NO_PICTURES = (
    (
        b"version https://git-lfs",
        "lfs_pointer",
        "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    ),
    (
        b"<!doctype html",
        "html",
        "a saved web page (HTML), such as an error page; download the file itself",
    ),
    (b"<html", "html", "a saved web page (HTML), such as an error page; download the file itself"),
    (b"<svg", "svg", "a drawing in SVG; export it as PNG"),
    (b"<?xml", "xml", "a text in XML, such as an error page or a drawing in SVG; export it as PNG"),
    (b"%pdf", "pdf", "a page in PDF; export it as PNG"),
)
_SIGNS = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
# the pictures of iPhones
_HEIF = re.compile(rb".{4}ftyp(?:hei[cxms]|hev[cmxs]|mif1|msf1)", re.DOTALL)


def named_content(start: bytes) -> tuple[str, str] | None:
    """Return a word and a description for the start of a file that is no picture and no table.

    None where the content is not recognized.
    """
    if _HEIF.match(start):
        return "heic", "a photograph in HEIC that cannot be read; save it as JPEG"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for sign, word, description in _NO_PICTURES:
        if text.startswith(sign):
            return word, description
    return None


def is_picture(encoded: bytes) -> bool:
    """Return whether the first bytes are those of a picture."""
    return encoded.startswith(_SIGNS) or _HEIF.match(encoded) is not None


def _register_heif(encoded: bytes) -> None:
    """Let Pillow read a picture in HEIC.

    Raises `UnreadableImageError` where pillow-heif is missing.
    """
    if not _HEIF.match(encoded):
        return
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        why = "a photograph in HEIC; pip install pillow-heif (the extra 'heic'), or save it as JPEG"
        raise UnreadableImageError("image_heic", why) from error
    register_heif_opener(thumbnails=False)


def decoded_image(encoded: bytes, *, first_frame: bool = False) -> Image.Image:
    """Return the picture upright, flattened on white, in mode RGB.

    The header alone decides whether it is decoded at all. `first_frame`: take the first of several
    frames, which are refused otherwise. Raises `UnreadableImageError` for bytes that are no
    picture, or one that is truncated, too large to decode, or has several frames.
    """
    with warnings.catch_warnings():
        # Pillow's own pixel limit is higher, and only a warning; so are broken tags
        warnings.simplefilter("ignore")
        try:
            _register_heif(encoded)
            with open_picture(io.BytesIO(encoded)) as image:
                _refuse_large(image)
                # a phone's second one is no motion
                frames = (
                    1 if first_frame or image.format in _JPEGS else getattr(image, "n_frames", 1)
                )
                if frames > 1:
                    raise UnreadableImageError("image_animated", f"it has {frames} frames")
                # the only one that shows a lost end: each chunk has a checksum
                if image.format == "PNG":
                    image.verify()
            with open_picture(io.BytesIO(encoded)) as image:
                _load(image)
                ImageOps.exif_transpose(image, in_place=True)
                return _flattened(image)
        except UnreadableImageError:
            raise
        except UnidentifiedImageError as error:  # its own text has a memory address in it
            word, why = named_content(encoded[:512]) or (
                "undecodable",
                "not in any known picture format",
            )
            raise UnreadableImageError(f"image_{word}", why) from error
        except Exception as error:
            unreadable = _unreadable(error)
            if unreadable.kind != "image_too_large" and _HEIF.match(encoded):
                why = f"a photograph in HEIC that cannot be read ({unreadable}); save it as JPEG"
                unreadable = UnreadableImageError("image_heic", why)
            raise unreadable from error


def as_shown(image: Image.Image) -> Image.Image:
    """Return a new picture as a person sees this one: upright, flattened on white, in mode RGB.

    Several frames give the present one.

    It is the door for each picture that somebody else's code hands over as an object: a row of
    Python's, or the answer of a tool. `decoded_image` is the same for encoded ones. The object that
    was handed over is not changed, and shares no pixel with the new one. Raises
    `UnreadableImageError` as `decoded_image` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `decoded_image`
        try:
            _refuse_large(image)
            _load(image)
            upright = ImageOps.exif_transpose(image)  # a copy, also where nothing is turned
            return _flattened(upright)
        except UnreadableImageError:
            raise
        except Exception as error:
            raise _unreadable(error) from error


class KeptImage(Image.Image):
    """A decoded image that nothing here draws on."""

    @cached_property
    def digest(self) -> str:
        """The `content_digest`, computed once for the trainer's and the engine's processors."""
        return content_digest(self)


def content_digest(image: Image.Image) -> str:
    """Return a hash of an image's mode, size, pixels and palette, in hexadecimal."""
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    if image.mode == "P":
        digest.update(bytes(image.getpalette() or []))
    return digest.hexdigest()


def kept(image: "ImageInput") -> Any:
    """Return `image` itself, loaded, as a `KeptImage`; what is no PIL image stays."""
    if isinstance(image, Image.Image):
        image.load()
        image.__class__ = KeptImage
    return image


class _Lent(Image.Image):
    """A picture whose pixels are somebody else's until anything asks for them, and then its own."""

    @property
    def im(self) -> Any:
        """Pillow's pixels, through which every method of it reads and writes."""
        shared = super().im
        _becomes_plain(self)
        self.im = shared.copy()
        return self.im

    @im.setter
    def im(self, pixels: Any) -> None:
        _becomes_plain(self)
        self.im = pixels

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()  # then it is a plain picture, as which it is pickled and copied
        return self.__reduce_ex__(protocol)


def _becomes_plain(image: Image.Image) -> None:
    """Make an image a plain one again, of Pillow's own class."""
    image.__class__ = Image.Image


def lent(image: Image.Image) -> Image.Image:
    """Return a copy for code of somebody else's, which may draw on it.

    The pixels are copied at their first use, since most functions that are handed pictures never
    look at them, and the rollouts of a group are handed the same one many times.
    """
    image.load()  # a file is read late
    copied = image._new(image.im)
    copied.__class__ = _Lent
    return copied


def _refuse_large(image: Image.Image) -> None:
    """Refuse a picture by its header, before any memory is taken for its pixels."""
    if image.width * image.height > MAX_DECODED_PIXELS:
        why = f"{image.width} x {image.height} pixels are over the limit of {MAX_DECODED_PIXELS}"
        raise UnreadableImageError("image_too_large", why)


def _load(image: Image.Image) -> None:
    """Decode the pixels, where that is still to be done, and refuse what would be nearly black."""
    deep = re.search(";16[BLN]", str(getattr(image, "tile", "")))  # of a colour
    image.load()
    if deep and not (image.mode == "I" or image.mode.startswith("I;16")):
        _refuse_dark(image)


def _unreadable(error: Exception) -> UnreadableImageError:
    """Return what Pillow raised while it decoded, in our words.

    It raises nearly anything: OSError, SyntaxError, struct.error, ...
    """
    why = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return UnreadableImageError("image_too_large", why)
    kind = "image_truncated" if "truncated" in why.lower() else "image_undecodable"
    return UnreadableImageError(kind, why)


def _refuse_degenerate(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture that is too small or narrow, or of one colour."""
    width, height = image.size
    if min(width, height) < MIN_SIDE:
        raise UnreadableImageError(
            "image_degenerate", f"{width} x {height} pixels are too few for a diagram"
        )
    # mostly enough, in a hundredth of the time
    coarse = image.resize((32, 32), Image.Resampling.NEAREST)
    if _of_one_colour(coarse) and _of_one_colour(image):
        colour = image.getpixel((0, 0))
        raise UnreadableImageError(
            "image_degenerate", f"all of its {width} x {height} pixels are {colour}"
        )
    if max(width, height) > WIDEST * min(width, height):
        wrong = (
            f"{width} x {height}: one side is over {WIDEST} times the other, which the model "
            "refuses"
        )
        raise UnreadableImageError("image_shape", wrong)


def _of_one_colour(image: Image.Image) -> bool:
    """Return whether all pixels of a picture are the same."""
    return all(
        low == high
        for low, high in (image.getchannel(band).getextrema() for band in image.getbands())
    )


def _scaled(image: Image.Image) -> Image.Image:
    """Return a grey picture of more than 8 bits, or of floats, in 8 bits.

    The file does not say what is white: it is the largest number of 8, 10, 12, 14 or 16 bits, or 1
    for floats, that the picture comes near. Raises `UnreadableImageError` where it comes near none.
    """
    values = np.asarray(image)
    has_floats = image.mode == "F"
    smallest = float(values.min())
    largest = float(values.max())
    whites = (1, 255, 65535) if has_floats else (255, 1023, 4095, 16383, 65535)
    white = next((white for white in whites if largest <= white), 0)
    if not (smallest >= 0 and white / 4 <= largest <= white):
        raise UnreadableImageError(
            "image_range", f"of its values from {smallest:g} to {largest:g} {_NO_WHITE}"
        )
    scaled = values.astype(np.float32) * 255 / white
    if has_floats:
        scaled = np.rint(scaled)
    return Image.fromarray(scaled.astype(np.uint8))


_NO_WHITE = (
    "it cannot be told which is white, and it would be nearly black; save it with 8 bits a channel"
)


def _refuse_dark(image: Image.Image) -> None:
    """Refuse colours of 16 bits that are used for 14 or less: Pillow keeps the upper 8 alone, so no
    scale helps.
    """
    colours = [image.getchannel(band) for band in image.getbands() if band != "A"]
    if max(int(np.max(np.asarray(colour))) for colour in colours) < 64:
        raise UnreadableImageError(
            "image_range", f"of its colours of 16 bits up to a quarter of the range {_NO_WHITE}"
        )


def _flattened(image: Image.Image) -> Image.Image:
    """Return RGB on white.

    A transparent diagram is drawn for white paper; Pillow alone would put its lines on black.
    """
    # Pillow clips them at 255 instead of scaling them
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scaled(image)
    if not image.has_transparency_data:
        return _rgb(image)
    if image.mode == "La":  # premultiplied grey, which Pillow converts to no other mode but this
        image = image.convert("LA")
    drawn = image if image.mode == "RGBA" else image.convert("RGBA")
    cover = drawn.getchannel("A")
    if cover.getextrema() == (255, 255):  # nothing shows through
        return drawn.convert("RGB")
    paper = Image.new("RGB", drawn.size, "white")
    paper.paste(drawn, mask=cover)
    return paper


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image in mode RGB, which is no copy where it has that already."""
    return image if image.mode == "RGB" else image.convert("RGB")
