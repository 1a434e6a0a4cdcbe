"""Pictures: decoded, turned upright, fitted to the pixel budget, and known by what they show."""

import hashlib
import io
import re
import sys
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from adora_vl.models.families import vision_by_model_type
from adora_vl.utils.errors import UserError

# The families of models that see images, by their `model_type`, with how they cut images into
# tokens.
VISION_BY_FAMILY = vision_by_model_type()
# The family whose rule of sizes counts where no model is named.
DEFAULT_FAMILY = "qwen2_5_vl"
# The side of the smallest image token of all families, in pixels. With it nothing is resized that
# one of them could take as it is.
SMALLEST_TOKEN_SIDE = min(vision.token_side for vision in VISION_BY_FAMILY.values())
# The largest pixel limit that is accepted; no image that can be decoded has as many.
MAX_PIXELS = 2**31
# With a larger ratio of the sides the model's processor raises an error, in the middle of a
# training.
MAX_ASPECT_RATIO = 200


MAX_DECODED_PIXELS = 50_000_000  # 150 MB once decoded; a diagram has a hundredth of it
# MPO is a JPEG with more pictures behind the first, as phones write them.
JPEG_FORMATS = ("JPEG", "MPO")
# EXIF's orientations that exchange width and height.
SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
MIN_IMAGE_SIDE = 4  # pixels; no diagram is drawn in fewer
# Others are not opened: Pillow would start Ghostscript for a stranger's EPS.
PICTURE_FORMATS = (
    "PNG",
    "JPEG",
    "GIF",
    "BMP",
    "WEBP",
    "TIFF",
)


def open_picture(source: Any) -> Image.Image:
    """Open a picture by its header, without decoding its pixels.

    `source` is a path or a binary stream. Only the `PICTURE_FORMATS` are tried, and HEIC if a
    picture has needed it before.

    Raises what Pillow raises.
    """
    formats: tuple[str, ...] = PICTURE_FORMATS
    if "HEIF" in Image.OPEN:  # `_register_heif` has put it there
        formats = (*PICTURE_FORMATS, "HEIF")
    return Image.open(source, formats=formats)


@dataclass(frozen=True)
class PixelLimits:
    """The numbers of pixels between which pictures are resized; the defaults are no limits."""

    min_pixels: int = 0  # the least product of the sides
    max_pixels: int = sys.maxsize
    token_side: int = SMALLEST_TOKEN_SIDE  # of an image token in pixels; sides are multiples of it


_NO_LIMITS = PixelLimits()


@lru_cache(maxsize=4096)
def model_size(width: int, height: int, limits: PixelLimits) -> tuple[int, int]:
    """Return the width and height that a processor with these limits resizes a picture to.

    Raises `ValueError` where the processor refuses the ratio of the sides.
    """
    # Importing it takes seconds, so it is done only where it is needed.
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    new_height, new_width = smart_resize(
        height, width, limits.token_side, limits.min_pixels, limits.max_pixels
    )
    return int(new_width), int(new_height)


def image_tokens(size: tuple[int, int], limits: PixelLimits, row_id: object) -> int:
    """Return how many tokens a picture takes in a prompt, by the processor's own rule.

    A picture of 448 x 280 pixels within the limits, with a token side of 28, takes 16 * 10 tokens.

    Args:
        size: the width and height of the picture.
        limits: those to which the processor resizes.
        row_id: the id of the picture's row, for the error.

    Raises:
        UserError: the processor refuses the picture.
    """
    try:
        width, height = model_size(*size, limits)
    except ValueError as error:
        raise UserError(
            f"dataset: row {row_id} has an image of {size[0]} x {size[1]} pixels, which the "
            f"model's processor refuses ({error}); remove the row"
        ) from error
    columns = width // limits.token_side
    rows = height // limits.token_side
    return columns * rows


def size_to_store(width: int, height: int, limits: PixelLimits) -> tuple[int, int]:
    """Return the width and height, in pixels, at which to store a picture.

    A picture within the limits keeps its size. Any other gets the size to which the model's
    processor would resize it, so that the processor has nothing left to do. For example, with
    tokens of 28 x 28 pixels and at most 100,000 pixels, 300 x 200 stays. 1000 x 500 becomes
    420 x 196.

    Raises `ValueError` where the processor's rule has no size of this shape within the limits.
    """
    token_side = limits.token_side
    # The processor rounds each side to whole tokens before it compares.
    rounded_pixels = round(width / token_side) * round(height / token_side) * token_side**2
    if limits.min_pixels <= rounded_pixels <= limits.max_pixels:
        return width, height
    # The processor makes no side shorter than one token.
    limits = replace(limits, min_pixels=limits.min_pixels or token_side**2)
    new_width, new_height = model_size(width, height, limits)
    if not limits.min_pixels <= new_width * new_height <= limits.max_pixels:
        raise ValueError(
            f"no size of its shape is within {limits.min_pixels} to {limits.max_pixels} pixels"
        )
    return new_width, new_height


class UnreadableImageError(ValueError):
    """The picture cannot be used; the message says why.

    `reason` is the reason in one word, by which refused rows are counted, such as
    `image_truncated`.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def clean_image(encoded: bytes, limits: PixelLimits = _NO_LIMITS) -> Image.Image:
    """Return the picture upright, flattened on white, in mode RGB, and within the pixel limits.

    `encoded` are the bytes of the picture's file. Raises `UnreadableImageError` as `decoded_image`
    does, and for a picture with nothing on it.
    """
    image = decoded_image(encoded)
    _refuse_degenerate(image)
    try:
        size = size_to_store(*image.size, limits)
    except ValueError as error:
        raise UnreadableImageError(
            reason="image_shape", why=f"{image.width} x {image.height} pixels: {error}"
        ) from error
    if size == image.size:
        return image
    return image.resize(size, Image.Resampling.BICUBIC)  # the processor's own filter


def png_bytes(image: Image.Image, **options: int) -> bytes:
    """Return the image as PNG without metadata, so that equal pixels are equal bytes.

    `options` are those of Pillow's PNG writer, such as `compress_level`.
    """
    stream = io.BytesIO()
    image.save(stream, "PNG", icc_profile=None, **options)
    return stream.getvalue()


_STRIP_HEIGHT = 128  # lines of pixels that are hashed at once


def pixel_hash(image: Image.Image) -> str:
    """Return a hash of what a picture shows: SHA-256 of its size and RGB pixels, in hexadecimal."""
    digest = hashlib.sha256(f"{image.size}".encode())
    image = rgb_image(image)
    # Strip by strip: a copy of the whole would take new memory each time, which costs more.
    for top in range(0, image.height, _STRIP_HEIGHT):
        bottom = min(image.height, top + _STRIP_HEIGHT)
        strip = image.crop((0, top, image.width, bottom))
        digest.update(strip.tobytes())
    return digest.hexdigest()


def file_within(folder: Path, name: str, root: Path | None = None) -> Path:
    """Return the file of a relative path in a data set, which has to stay in the data's folder.

    A data set from elsewhere must not show a model any file of this machine.

    Args:
        folder: where the path begins.
        name: the path.
        root: the folder that it must not leave, also not by a link; None for `folder`.

    Raises:
        UnreadableImageError: the path leaves the folder, or is no path.
    """
    try:
        file = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise UnreadableImageError("file_missing", f"{name!r:.80} is no path ({error})") from error
    data_root = (root or folder).resolve()
    if Path(name).is_absolute() or not file.is_relative_to(data_root):
        raise UnreadableImageError(
            "path_outside", f"the path {name!r:.80} leads out of the data's folder"
        )
    return file


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return the width and height of the upright picture, from the header alone.

    Raises what Pillow raises.
    """
    with open_picture(io.BytesIO(encoded)) as image:
        # A PNG may have its EXIF data after the pixels, and Pillow would decode these to look.
        if image.format == "PNG" and "exif" not in image.info:
            return image.size
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if orientation in SIDEWAYS_ORIENTATIONS:
            return image.height, image.width
        return image.size


# Files that stand in the place of a picture: their first bytes in lower case, the word for them in
# `image_html` and the like, and what they are and what to do.
_NON_PICTURES = (
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
# The first bytes of PNG, JPEG, GIF, WebP, BMP and both byte orders of TIFF.
_PICTURE_SIGNATURES = (
    b"\x89PNG\r\n",
    b"\xff\xd8\xff",
    b"GIF8",
    b"RIFF",
    b"BM",
    b"II*\0",
    b"MM\0*",
)
# The first bytes of HEIC, the format of iPhones' photographs.
_HEIF_SIGNATURE_PATTERN = re.compile(rb".{4}ftyp(?:hei[cxms]|hev[cmxs]|mif1|msf1)", re.DOTALL)


class NonPicture(NamedTuple):
    """What a file is that stands in the place of a picture or a table."""

    format_name: str  # such as `html`
    description: str  # what it is and what to do: `a drawing in SVG; export it as PNG`


def describe_non_picture(first_bytes: bytes) -> NonPicture | None:
    """Return what a file is that stands in the place of a picture, such as a saved error page.

    `first_bytes` are those of the file. Returns None for any other file, such as a picture.
    """
    if _HEIF_SIGNATURE_PATTERN.match(first_bytes):
        return NonPicture("heic", "a photograph in HEIC that cannot be read; save it as JPEG")
    text = first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip().lower()  # without a byte order mark
    for signature, format_name, description in _NON_PICTURES:
        if text.startswith(signature):
            return NonPicture(format_name, description)
    return None


def is_picture(encoded: bytes) -> bool:
    """Return whether a file begins as a picture does."""
    return (
        encoded.startswith(_PICTURE_SIGNATURES)
        or _HEIF_SIGNATURE_PATTERN.match(encoded) is not None
    )


def _register_heif(encoded: bytes) -> None:
    """Let Pillow read HEIC from now on, if `encoded` is a picture in that format.

    Raises `UnreadableImageError` where pillow-heif is missing.
    """
    if not _HEIF_SIGNATURE_PATTERN.match(encoded):
        return
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        why = "a photograph in HEIC; pip install pillow-heif (the extra 'heic'), or save it as JPEG"
        raise UnreadableImageError("image_heic", why) from error
    register_heif_opener(thumbnails=False)


def decoded_image(encoded: bytes, *, first_frame: bool = False) -> Image.Image:
    """Decode a picture, and return it upright, flattened on white, in mode RGB.

    Args:
        encoded: the bytes of the picture's file.
        first_frame: whether to take the first of several frames; else several are refused.

    Raises:
        UnreadableImageError: the bytes are no picture, or one that is truncated, too large to
            decode, has several frames, or leaves open which of its values is white.
    """
    with warnings.catch_warnings():
        # Pillow's own pixel limit is higher, and only a warning; so are broken tags.
        warnings.simplefilter("ignore")
        try:
            return _decode_upright(encoded, first_frame)
        except UnreadableImageError:
            raise
        except UnidentifiedImageError as error:  # its own text has a memory address in it
            non_picture = describe_non_picture(encoded[:512])
            if non_picture is None:
                non_picture = NonPicture("undecodable", "not in any known picture format")
            raise UnreadableImageError(
                reason=f"image_{non_picture.format_name}", why=non_picture.description
            ) from error
        except Exception as error:
            unreadable = _unreadable_error(error)
            is_heic = _HEIF_SIGNATURE_PATTERN.match(encoded) is not None
            if is_heic and unreadable.reason != "image_too_large":
                why = f"a photograph in HEIC that cannot be read ({unreadable}); save it as JPEG"
                unreadable = UnreadableImageError(reason="image_heic", why=why)
            raise unreadable from error


def _decode_upright(encoded: bytes, first_frame: bool) -> Image.Image:
    """Return a picture as `decoded_image` does, but raise what Pillow raises.

    The header alone decides whether a picture is decoded at all. Without `first_frame` a picture of
    several frames is refused.
    """
    _register_heif(encoded)
    with open_picture(io.BytesIO(encoded)) as image:
        _refuse_large(image)
        if not first_frame:
            _refuse_animated(image)
        # Only a PNG shows that its end is lost, since each of its chunks has a checksum.
        if image.format == "PNG":
            image.verify()
    # Pillow cannot go on with a picture that was verified, so it is opened once more.
    with open_picture(io.BytesIO(encoded)) as image:
        _load_pixels(image)
        ImageOps.exif_transpose(image, in_place=True)
        return _flattened_on_white(image)


def _refuse_animated(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture of several frames."""
    # The second picture in a JPEG, which phones write, is no frame of a film.
    frames = 1 if image.format in JPEG_FORMATS else getattr(image, "n_frames", 1)
    if frames > 1:
        raise UnreadableImageError("image_animated", f"it has {frames} frames")


def upright_rgb_copy(image: Image.Image) -> Image.Image:
    """Return a new picture as a person sees this one: upright, flattened on white, in mode RGB.

    Every picture object from code that is not ours passes here, such as one in a user's rows or in
    the answer of a tool (`decoded_image` is for encoded ones). That object is not changed, and
    shares no pixel with the new one. Of several frames the present one is taken.

    Raises `UnreadableImageError` as `decoded_image` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `decoded_image`
        try:
            _refuse_large(image)
            _load_pixels(image)
            upright = ImageOps.exif_transpose(image)  # a copy, also where nothing is turned
            return _flattened_on_white(upright)
        except UnreadableImageError:
            raise
        except Exception as error:
            raise _unreadable_error(error) from error


def _refuse_large(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture that is too large to decode.

    `image` was opened by its header, so that no memory was taken for its pixels yet.
    """
    if image.width * image.height > MAX_DECODED_PIXELS:
        why = f"{image.width} x {image.height} pixels are over the limit of {MAX_DECODED_PIXELS}"
        raise UnreadableImageError("image_too_large", why)


def _load_pixels(image: Image.Image) -> None:
    """Decode the pixels of an opened picture, and refuse one that would be nearly black.

    Pillow keeps the upper 8 of 16 bits of a colour. Where a file uses only the lower bits, the
    picture is lost.
    """
    # Pillow's decoder for this file says how many bits a channel has, until it has decoded it.
    decoder = str(getattr(image, "tile", ""))
    has_16_bits = re.search(";16[BLN]", decoder) is not None
    image.load()
    keeps_all_bits = image.mode == "I" or image.mode.startswith("I;16")  # grey
    if has_16_bits and not keeps_all_bits:
        _refuse_dark(image)


def _unreadable_error(error: Exception) -> UnreadableImageError:
    """Return our error, which has a reason, for what Pillow raised while it decoded a picture.

    Pillow raises nearly anything: OSError, SyntaxError, struct.error, ...
    """
    why = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return UnreadableImageError("image_too_large", why)
    reason = "image_truncated" if "truncated" in why.lower() else "image_undecodable"
    return UnreadableImageError(reason, why)


def _refuse_degenerate(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture that is too small or narrow, or of one colour."""
    width, height = image.size
    if min(width, height) < MIN_IMAGE_SIDE:
        raise UnreadableImageError(
            "image_degenerate", f"{width} x {height} pixels are too few for a diagram"
        )
    # A look at 32 x 32 of the pixels is mostly enough, and takes a hundredth of the time.
    pixel_sample = image.resize((32, 32), Image.Resampling.NEAREST)
    if _has_one_colour(pixel_sample) and _has_one_colour(image):
        colour = image.getpixel((0, 0))
        raise UnreadableImageError(
            "image_degenerate", f"all of its {width} x {height} pixels are {colour}"
        )
    refuse_narrow(image)


def refuse_narrow(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture that is too narrow for the model's processor."""
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        why = (
            f"{width} x {height}: one side is over {MAX_ASPECT_RATIO} times the other, which the model "
            "refuses"
        )
        raise UnreadableImageError("image_shape", why)


def _has_one_colour(image: Image.Image) -> bool:
    """Return whether all pixels of a picture are the same."""
    for band in image.getbands():
        darkest, brightest = image.getchannel(band).getextrema()
        if darkest != brightest:
            return False
    return True


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey picture of more than 8 bits, or of floats, with 8 bits a pixel.

    The file does not say which value is white. It is taken to be the largest number of 8, 10, 12,
    14 or 16 bits (for floats: also 1) that the picture's brightest value comes near.

    Raises `UnreadableImageError` where it comes near none.
    """
    values = np.asarray(image)
    has_floats = image.mode == "F"
    smallest = float(values.min())
    largest = float(values.max())
    possible_whites = (1, 255, 65535) if has_floats else (255, 1023, 4095, 16383, 65535)
    white = next((value for value in possible_whites if value >= largest), 0)
    # The brightest value of a picture of 12 bits is above 1023, a quarter of its white.
    is_near_white = white / 4 <= largest <= white
    if smallest < 0 or not is_near_white:
        raise UnreadableImageError(
            "image_range", f"of its values from {smallest:g} to {largest:g} {_UNKNOWN_WHITE_ADVICE}"
        )
    scaled = values.astype(np.float32) * 255 / white
    if has_floats:
        scaled = np.rint(scaled)  # the conversion below would cut off the fraction
    return Image.fromarray(scaled.astype(np.uint8))


_UNKNOWN_WHITE_ADVICE = (
    "it cannot be told which is white, and it would be nearly black; save it with 8 bits a channel"
)


def _refuse_dark(image: Image.Image) -> None:
    """Raise `UnreadableImageError` for a picture of 16 bits a colour that uses 14 or fewer of them.

    Pillow keeps the upper 8 bits alone, so what such a picture shows is lost.
    """
    colour_bands = [image.getchannel(band) for band in image.getbands() if band != "A"]
    brightest = max(int(np.max(np.asarray(band))) for band in colour_bands)
    if brightest < 64:  # a quarter of the 8 bits: the two upper bits are never set
        raise UnreadableImageError(
            "image_range",
            f"of its colours of 16 bits up to a quarter of the range {_UNKNOWN_WHITE_ADVICE}",
        )


def _flattened_on_white(image: Image.Image) -> Image.Image:
    """Return a picture in mode RGB, with white where it is transparent.

    A transparent diagram is drawn for white paper. Pillow alone would make the paper black.
    """
    # Pillow would clip the values of these modes at 255 instead of scaling them.
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scaled_to_8_bits(image)
    if not image.has_transparency_data:
        return rgb_image(image)
    if image.mode == "La":  # premultiplied grey, which Pillow converts to LA alone
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    opacity = rgba.getchannel("A")
    if opacity.getextrema() == (255, 255):  # nothing shows through
        return rgba.convert("RGB")
    white_paper = Image.new("RGB", rgba.size, "white")
    white_paper.paste(rgba, mask=opacity)
    return white_paper


def rgb_image(image: Image.Image) -> Image.Image:
    """Return the image in mode RGB, which is no copy where it has that already."""
    return image if image.mode == "RGB" else image.convert("RGB")
