"""Pictures of any kind become the same RGB, in the size that the model's processor would choose."""

import io
import os
import struct
import zlib
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from PIL import ExifTags, Image, ImageDraw, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from adora_vl.data.dataloader import DistinctRows, with_upright_rgb_images
from adora_vl.data.images import (
    PixelLimits,
    UnreadableImageError,
    clean_image,
    decoded_image,
    image_tokens,
    png_bytes,
    upright_rgb_copy,
)
from adora_vl.data.loading import UnreadableImage, decoded_rows, unreadable_rows
from adora_vl.data.prompt_lengths import stored_image_sizes
from adora_vl.data.shared_images import ImageWithDigest
from adora_vl.data.stored_images import stored_bytes


def encoded_as(picture: Image.Image, image_format: str) -> bytes:
    """Return the picture as a file of this format."""
    stream = io.BytesIO()
    picture.save(stream, image_format)
    return stream.getvalue()


def open_with_pillow(encoded: bytes) -> Image.Image:
    """Open a picture with Pillow alone, as somebody else's code would hand it over."""
    stream = io.BytesIO(encoded)
    return Image.open(stream)


def grey_picture(mode: str) -> Image.Image:
    """Return a picture of one grey with one white pixel, since one colour alone is refused."""
    grey = np.full((4, 6), 102, dtype=np.uint16)
    grey[3, 5] = 255
    if mode == "I;16":
        return Image.fromarray(grey * 257)
    shades = grey.astype(np.uint8)
    return Image.fromarray(shades).convert(mode)


def test_any_kind_of_picture_becomes_the_same_rgb(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """A picture of any mode becomes RGB with the same grey, 102 of 255."""
    for mode in ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"]:
        with subtests.test(mode):
            picture = grey_picture(mode)
            file_name = "picture.tiff" if mode == "CMYK" else "picture.png"
            path = tmp_path / file_name
            picture.save(path)

            cleaned = clean_image(path.read_bytes())

            expected: object = (102, 102, 102)
            if mode == "1":  # black and white alone, by Pillow's own pattern
                expected = picture.convert("RGB").getpixel((0, 0))
            assert cleaned.mode == "RGB"
            assert cleaned.size == (6, 4)
            assert cleaned.getpixel((0, 0)) == expected
            assert cleaned.getpixel((5, 3)) == (255, 255, 255)


def encoded_on_its_side(picture: Image.Image, image_format: str) -> bytes:
    """Return the picture as a file, with the tag of a camera that was held upright."""
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6
    stream = io.BytesIO()
    picture.save(stream, image_format, exif=tags)
    return stream.getvalue()


def transparent_line() -> Image.Image:
    """Return a black line on nothing."""
    picture = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    corners = (0, 0, 39, 29)
    ImageDraw.Draw(picture).line(corners, fill=(0, 0, 0, 255))
    return picture


def noise_in_rgb() -> Image.Image:
    """Return a picture that is nowhere like itself turned."""
    noise = Image.effect_noise((40, 30), 80)
    return noise.convert("RGB")


def test_a_picture_that_code_hands_over_is_shown_as_one_of_a_file(
    subtests: pytest.Subtests,
) -> None:
    """A picture object, of a row or a tool, becomes the same RGB pixels as a file with its content.

    Transparency becomes white, and a picture that a tag turns is turned, but only once.
    """
    line = transparent_line()
    shades = np.linspace(0, 65535, 1200).reshape(30, 40)
    shades_of_16_bits = shades.astype(np.uint16)
    shades_in_floats = (shades / 65535).astype(np.float32)
    noise = noise_in_rgb()
    # The name of the case, the object, and the format of the file with the same content.
    drawn_cases = [
        ("transparent", line, "PNG"),
        ("a palette", line.quantize(8), "PNG"),
        ("grey and transparent", line.convert("LA"), "PNG"),
        ("16 bits", Image.fromarray(shades_of_16_bits), "PNG"),
        ("floats", Image.fromarray(shades_in_floats), "TIFF"),
        ("print", noise.convert("CMYK"), "TIFF"),
    ]
    cases = {}
    for name, picture, image_format in drawn_cases:
        cases[name] = (picture, encoded_as(picture, image_format))
    for image_format in ("JPEG", "PNG", "TIFF", "WEBP"):
        turned_file = encoded_on_its_side(noise, image_format)
        cases[f"on its side as {image_format}"] = (open_with_pillow(turned_file), turned_file)
    for name, (picture, encoded) in cases.items():
        with subtests.test(name):
            expected = decoded_image(encoded)

            shown_picture = upright_rgb_copy(picture)

            assert shown_picture.mode == "RGB"
            assert shown_picture.size == expected.size
            assert shown_picture.tobytes() == expected.tobytes()
            shown_again = upright_rgb_copy(shown_picture)
            assert shown_again.tobytes() == shown_picture.tobytes(), "nothing is turned twice"
            if "side" in name:
                assert shown_picture.size == (30, 40)
            if "transparent" in name:
                assert shown_picture.getpixel((39, 0)) == (255, 255, 255)


def test_a_copy_shares_no_pixel_with_what_was_handed_over() -> None:
    red = Image.new("RGB", (40, 30), "red")

    copied = upright_rgb_copy(red)
    copied.putpixel((0, 0), 0)

    assert red.getpixel((0, 0)) == (255, 0, 0)


def test_premultiplied_grey_is_put_on_white() -> None:
    premultiplied = Image.new("La", (40, 30), (0, 0))

    shown_picture = upright_rgb_copy(premultiplied)

    assert shown_picture.getpixel((0, 0)) == (255, 255, 255)


def test_a_broken_picture_that_code_hands_over_is_refused_by_its_kind() -> None:
    """A picture object that is cut off, too large or of no numbers is refused with its reason."""
    line_file = encoded_as(transparent_line(), "PNG")
    no_numbers = np.full((30, 40), np.nan, np.float32)
    broken_pictures = [
        (open_with_pillow(line_file[:60]), "image_truncated"),
        (Image.new("1", (10_000, 10_000)), "image_too_large"),
        (Image.fromarray(no_numbers), "image_range"),
    ]
    for picture, kind in broken_pictures:
        with pytest.raises(UnreadableImageError) as refused:
            upright_rgb_copy(picture)
        assert refused.value.reason == kind


def test_rows_that_python_hands_over_are_shown_as_a_person_sees_them() -> None:
    """Transparency becomes white, and a picture that a tag turns is turned.

    A row has a list of pictures, one in another column, or none.
    """
    transparent = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    noise = Image.effect_noise((40, 30), 80)
    turned = open_with_pillow(encoded_on_its_side(noise, "JPEG"))
    row_of_two: dict[str, Any] = {"images": [transparent, turned], "id": "a"}
    row_of_both_columns: dict[str, Any] = {"images": [transparent], "image": transparent}
    row_of_none: dict[str, Any] = {"image": None}

    first, second, third = with_upright_rgb_images([row_of_two, row_of_both_columns, row_of_none])

    shown_image, shown_turned = first["images"]
    assert shown_image.size == (40, 30)
    assert shown_turned.size == (30, 40)
    for image in (shown_image, shown_turned, second["image"]):
        assert isinstance(image, ImageWithDigest)
    assert shown_image.getpixel((0, 0)) == (255, 255, 255)
    assert shown_image is second["images"][0], "one object stays one"
    (first_again,) = with_upright_rgb_images([first])
    assert first_again["images"][0] is shown_image
    assert third == {"image": None}
    assert transparent.mode == "RGBA", "what was handed over stays"
    assert type(transparent) is Image.Image, "what was handed over stays"


def test_a_data_set_of_python_rows_shows_them_as_a_person_sees_them() -> None:
    """A picture that a tag turns is turned in the rows that the loader reads by `DistinctRows`."""
    noise = Image.effect_noise((40, 30), 80)
    turned = open_with_pillow(encoded_on_its_side(noise, "JPEG"))
    rows = DistinctRows([{"images": [turned], "id": "a"}])

    (row,) = rows.__getitems__([0])

    assert row["images"][0].size == (30, 40)


def test_a_row_whose_picture_cannot_be_shown_is_named() -> None:
    """`unreadable_rows` yields the id and the reason of rows whose picture cannot be shown.

    Its values are no numbers, or one side is over 200 times the other.
    """
    no_numbers = np.full((8, 8), np.nan, np.float32)
    narrow = Image.new("RGB", (8001, 40))  # the processor of the model would raise in a step
    as_narrow_as_allowed = Image.new("RGB", (8000, 40))
    rows: list[dict[str, Any]] = [
        {"images": [Image.fromarray(no_numbers)], "id": "a"},
        {"images": [as_narrow_as_allowed, narrow], "id": "b"},
        {"image": narrow, "id": "c"},
        {"images": [as_narrow_as_allowed], "id": "d"},
    ]

    reasons = dict(unreadable_rows(with_upright_rgb_images(rows)))

    assert list(reasons) == ["a", "b", "c"]
    assert "one side is over 200 times the other" in reasons["b"]


class Depth(NamedTuple):
    """A type of values, and those of a picture's three stripes: black, grey and white."""

    value_type: Any
    black: float
    grey: float
    white: float


DEPTHS = [
    Depth(np.uint16, black=0, grey=128, white=255),
    Depth(np.uint16, black=0, grey=512, white=1023),
    Depth(np.uint16, black=0, grey=2048, white=4095),
    Depth(np.uint16, black=0, grey=8192, white=16383),
    Depth(np.uint16, black=0, grey=32768, white=65535),
    Depth(np.int32, black=0, grey=32768, white=65535),
    Depth(np.float32, black=0.0, grey=0.5, white=1.0),
    Depth(np.float32, black=0.0, grey=127.5, white=255.0),
    Depth(np.float32, black=0.0, grey=32767.5, white=65535.0),
]


def test_a_picture_of_any_depth_is_as_bright_as_it_was_meant() -> None:
    """Black, grey and white of a picture become 0, 127 or 128, and 255, whatever its bit depth.

    Cameras and scanners use 10, 12 or 14 of the 16 bits of a value.
    """
    for depth in DEPTHS:
        stripes = np.array([[depth.black, depth.grey, depth.white]], depth.value_type)
        shades = stripes.repeat(4, axis=0).repeat(4, axis=1)
        image_format = "PNG" if depth.value_type is np.uint16 else "TIFF"
        encoded = encoded_as(Image.fromarray(shades), image_format)

        cleaned = clean_image(encoded)

        assert cleaned.getpixel((0, 0)) == (0, 0, 0), depth
        assert cleaned.getpixel((11, 0)) == (255, 255, 255), depth
        assert cleaned.getpixel((5, 0)) in [(127,) * 3, (128,) * 3], depth


def test_floats_whose_white_nobody_can_tell_are_refused_with_the_remedy() -> None:
    """A picture of floats whose range does not tell its white is refused with the remedy.

    White may be 1.0, 255 or 65535; other ranges could mean anything.
    """
    shades = np.linspace(0, 1, 48).reshape(6, 8)
    unclear_shades = [
        shades * 1.1,
        shades - 0.1,
        shades * 0.2,
        shades * 1e6,
        np.where(shades > 0.5, np.nan, shades),
    ]
    for values in unclear_shades:
        picture = Image.fromarray(values.astype(np.float32))
        encoded = encoded_as(picture, "TIFF")
        with pytest.raises(UnreadableImageError, match="save it with 8 bits a channel") as refused:
            clean_image(encoded)
        assert refused.value.reason == "image_range"


def colours_up_to(largest: int) -> Any:
    """Return (6, 8, 3) values of 16 bits, in the byte order of a PNG."""
    shades = np.linspace(0, 1, 48).reshape(6, 8)
    colours = np.stack([shades * largest] * 3, axis=-1)
    return colours.astype(">u2")


def test_colours_that_use_14_of_16_bits_are_refused_with_the_remedy() -> None:
    """Pillow keeps the upper 8 bits alone, so they would be nearly black."""
    for largest in (4095, 16383):
        encoded = png_of_16_bits(colours_up_to(largest))
        with pytest.raises(UnreadableImageError, match="save it with 8 bits a channel"):
            clean_image(encoded)


def test_colours_that_use_all_16_bits_are_kept() -> None:
    encoded = png_of_16_bits(colours_up_to(60000))

    cleaned = clean_image(encoded)

    assert np.asarray(cleaned).max() == 60000 // 256  # the upper 8 of 16 bits


def png_of_16_bits(colours: Any) -> bytes:
    """Encode a PNG of 16 bits a channel, which Pillow cannot write.

    `colours`: (height, width, 3).
    """
    height, width, _ = colours.shape
    pixel_lines = b"".join(b"\0" + line.tobytes() for line in colours)
    header = struct.pack(">2I5B", width, height, 16, 2, 0, 0, 0)
    chunks = (
        b"IHDR" + header,
        b"IDAT" + zlib.compress(pixel_lines),
        b"IEND",
    )
    encoded = b"\x89PNG\r\n\x1a\n"
    for chunk in chunks:
        encoded += struct.pack(">I", len(chunk) - 4)  # without the name, which has four bytes
        encoded += chunk
        encoded += struct.pack(">I", zlib.crc32(chunk))
    return encoded


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a Ghostscript on the path that makes the file which is returned when it is started."""
    started = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho >> {started}\n")
    program.chmod(0o755)
    search_path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{search_path}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow looks for it once
    return started


def test_no_program_is_started_for_a_picture(tmp_path: Path, ghostscript_calls: Path) -> None:
    """An EPS picture is not read, wherever it is opened, and Ghostscript is not started for it.

    Pillow would start it, though the file has the name of a PNG. `ghostscript_calls` exists after a
    call.
    """
    file = tmp_path / "a.png"
    file.write_bytes(EPS)
    in_a_table = {"bytes": EPS, "path": None}
    in_a_file = {"bytes": None, "path": str(file)}

    with pytest.raises(UnreadableImageError, match="not in any known picture format"):
        clean_image(EPS)
    table = pa.table({"images": [[in_a_table]]})
    sizes = list(stored_image_sizes(table))
    rows = decoded_rows({"images": [[in_a_table, in_a_file]]})

    assert sizes == [[None]]
    for image in rows["images"][0]:
        assert isinstance(image, UnreadableImage)
    assert not ghostscript_calls.exists()


def gradient_png(width: int, height: int) -> bytes:
    """Return a PNG of this size from black to white."""
    gradient = Image.linear_gradient("L").resize((width, height))
    return png_bytes(gradient.convert("RGB"))


SIZES = [
    (900, 40),
    (40, 900),
    (33, 57),
    (640, 480),
    (5, 5),
]
PIXEL_LIMITS = [
    (784, 1000),
    (3136, 100_000),
    (50_000, 60_000),
]
TOKEN_SIDES = [28, 32]


def test_without_limits_a_picture_keeps_its_size() -> None:
    for width, height in SIZES:
        assert clean_image(gradient_png(width, height)).size == (width, height)


def test_pictures_outside_of_the_limits_get_the_size_that_the_model_would_choose(
    subtests: pytest.Subtests,
) -> None:
    """A picture outside of the pixel limits gets the size that the model's processor would choose.

    With the same limits that processor leaves it as it is. Other pictures keep their size.
    """
    for size, limits, unit in product(SIZES, PIXEL_LIMITS, TOKEN_SIDES):
        with subtests.test(f"{size} {limits} {unit}"):
            width, height = size
            low, high = limits
            encoded = gradient_png(width, height)
            model_height, model_width = smart_resize(height, width, unit, low, high)
            if not low <= model_width * model_height <= high:
                with pytest.raises(UnreadableImageError, match="no size of its shape is within"):
                    clean_image(encoded, PixelLimits(low, high, unit))
                continue

            stored_width, stored_height = clean_image(encoded, PixelLimits(low, high, unit)).size

            rounded_width = round(width / unit) * unit
            rounded_height = round(height / unit) * unit
            if low <= rounded_width * rounded_height <= high:
                assert (stored_width, stored_height) == size
                continue
            assert (stored_width, stored_height) == (model_width, model_height)
            resized_again = smart_resize(stored_height, stored_width, unit, low, high)
            assert resized_again == (stored_height, stored_width)


def test_tokens_are_those_of_the_models_own_processor() -> None:
    """`image_tokens` counts as Qwen2.5-VL's processor does, below, within and above its limits."""
    from transformers import Qwen2VLImageProcessor

    limits = PixelLimits(min_pixels=56 * 56, max_pixels=16384 * 28 * 28, token_side=28)
    processor = Qwen2VLImageProcessor(
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    )
    for size in (
        (20, 30),
        (56, 56),
        (250, 251),
        (1000, 70),
    ):
        inputs = processor(images=[Image.new("RGB", size)], return_tensors="pt")
        patches = int(inputs["image_grid_thw"][0].prod())

        tokens = image_tokens(size, limits, "1")

        assert tokens == patches // 4  # 2 x 2 patches are merged into one token
    assert image_tokens((9000, 9000), limits, "1") <= 16384


class StoredCase(NamedTuple):
    """A picture, how its file is written, and whether that file is stored as it is."""

    name: str
    picture: Image.Image
    image_format: str
    options: dict[str, Any]
    is_stored_as_it_is: bool


def camera_tags(orientation: int | None = None) -> Image.Exif:
    """Return the tags that a camera writes, with the way it was held if that is given."""
    tags = Image.Exif()
    tags[ExifTags.Base.Make] = "a camera"
    if orientation is not None:
        tags[ExifTags.Base.Orientation] = orientation
    return tags


def turned_png_cases() -> list[StoredCase]:
    """Return PNGs that say in a text how they are turned, and keep their size when it is done."""
    gradient = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    tags = camera_tags(orientation=3).tobytes().hex()
    profile = PngInfo()
    profile.add_text("Raw profile type exif", f"\nexif\n{len(tags) // 2:8d}\n{tags}\n", zip=True)
    xmp = PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="3"/>')
    return [
        StoredCase(
            "ImageMagick's PNG", gradient, "PNG", {"pnginfo": profile}, is_stored_as_it_is=False
        ),
        StoredCase("Adobe's PNG", gradient, "PNG", {"pnginfo": xmp}, is_stored_as_it_is=False),
    ]


def stored_cases() -> list[StoredCase]:
    """Return files that show their pixels alone, and files that tell or show something else."""
    gradient = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    tags = camera_tags()
    turned_tags = camera_tags(orientation=6)
    text = PngInfo()
    text.add_text("author", "somebody")
    see_through = gradient.convert("RGBA")
    see_through.putalpha(128)
    noise = noise_in_rgb()
    lines = Image.new("L", (40, 30), "white")
    ImageDraw.Draw(lines).line((3, 5, 35, 20), fill=0)
    grey = gradient.convert("L")
    palette = gradient.convert("P")
    no_colour = {"transparency": (255, 255, 255)}
    return [
        StoredCase("photograph", gradient, "JPEG", {"quality": 80}, is_stored_as_it_is=True),
        StoredCase("drawing", gradient, "PNG", {"dpi": (72, 72)}, is_stored_as_it_is=True),
        StoredCase("camera", gradient, "JPEG", {"exif": tags}, is_stored_as_it_is=False),
        StoredCase(
            "camera held upright", gradient, "JPEG", {"exif": turned_tags}, is_stored_as_it_is=False
        ),
        StoredCase("comment", gradient, "JPEG", {"comment": "somebody"}, is_stored_as_it_is=False),
        StoredCase(
            "profile", gradient, "JPEG", {"icc_profile": b"profile"}, is_stored_as_it_is=False
        ),
        StoredCase("text", gradient, "PNG", {"pnginfo": text}, is_stored_as_it_is=False),
        StoredCase("camera's PNG", gradient, "PNG", {"exif": tags}, is_stored_as_it_is=False),
        *turned_png_cases(),
        StoredCase("grey", grey, "PNG", {}, is_stored_as_it_is=False),
        StoredCase("palette", palette, "PNG", {}, is_stored_as_it_is=False),
        StoredCase("see-through", see_through, "PNG", {}, is_stored_as_it_is=False),
        StoredCase(
            "colour that stands for none", gradient, "PNG", no_colour, is_stored_as_it_is=False
        ),
        StoredCase(
            "another format", gradient, "WEBP", {"lossless": True}, is_stored_as_it_is=False
        ),
        StoredCase(
            "noise in another format", noise, "WEBP", {"lossless": True}, is_stored_as_it_is=False
        ),
        StoredCase("grey lines", lines, "PNG", {}, is_stored_as_it_is=False),
    ]


def test_a_file_is_stored_as_it_is_only_where_it_shows_the_same_and_tells_nothing_else(
    subtests: pytest.Subtests,
) -> None:
    """An upright RGB JPEG or PNG that tells nothing else is stored unchanged; others are not.

    They are encoded anew. What is stored shows the pixels of the cleaned picture.
    """
    for case in stored_cases():
        with subtests.test(case.name):
            stream = io.BytesIO()
            case.picture.save(stream, case.image_format, **case.options)
            encoded = stream.getvalue()
            cleaned = clean_image(encoded)

            stored = stored_bytes(encoded, cleaned)

            assert (stored == encoded) == case.is_stored_as_it_is
            signature = b"\xff\xd8" if case.image_format == "JPEG" else b"\x89PNG"
            assert stored.startswith(signature)
            upright = ImageOps.exif_transpose(open_with_pillow(stored))
            assert upright.mode == "RGB"
            assert upright.size == cleaned.size
            assert upright.tobytes() == cleaned.tobytes()
            assert not upright.getexif()
            assert b"somebody" not in stored


def test_what_stands_behind_a_png_is_not_stored() -> None:
    """Bytes behind the end of a PNG are not stored, since they may be anything."""
    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    encoded = png_bytes(picture)

    stored = stored_bytes(encoded + b"more", picture)

    assert b"more" not in stored


def test_a_picture_that_was_resized_is_stored_as_a_new_png() -> None:
    """A picture that was made smaller is stored as a PNG with the smaller one's pixels."""
    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    smaller = picture.resize((21, 15))

    stored = stored_bytes(png_bytes(picture), smaller)

    assert open_with_pillow(stored).tobytes() == smaller.tobytes()
    open_with_pillow(stored).verify()
