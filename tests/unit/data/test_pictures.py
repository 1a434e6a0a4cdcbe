"""Pictures of any kind become the same RGB, in the size that the model's processor would choose."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from adora_vl.data.images import UnreadableImageError, clean_image, image_tokens, png_bytes, stored_bytes


def test_any_kind_of_picture_becomes_the_same_rgb(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for mode in ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"]:
        with subtests.test(mode):
            grey = np.full((4, 6), 102, dtype=np.uint16)
            grey[3, 5] = 255  # a picture of one colour alone is refused
            picture = (
                Image.fromarray(grey * 257) if mode == "I;16" else Image.fromarray(grey.astype(np.uint8)).convert(mode)
            )
            path = tmp_path / ("picture.tiff" if mode == "CMYK" else "picture.png")
            picture.save(path)
            cleaned = clean_image(path.read_bytes())
            expected = picture.convert("RGB").getpixel((0, 0)) if mode == "1" else (102, 102, 102)
            assert (cleaned.mode, cleaned.size, cleaned.getpixel((0, 0))) == ("RGB", (6, 4), expected)
            assert cleaned.getpixel((5, 3)) == (255, 255, 255)


def _gradient(width: int, height: int) -> bytes:
    return png_bytes(Image.linear_gradient("L").resize((width, height)).convert("RGB"))


def test_pictures_outside_of_the_limits_get_the_size_that_the_model_would_choose(subtests: pytest.Subtests) -> None:
    """So that the processor with the same limits leaves them as they are; the others keep their size."""
    sizes = [(900, 40), (40, 900), (33, 57), (640, 480), (5, 5)]
    for size, limits, unit in product(sizes, [(784, 1000), (3136, 100_000), (50_000, 60_000)], [28, 32]):
        with subtests.test(f"{size} {limits} {unit}"):
            assert clean_image(_gradient(*size)).size == size, "without limits"
            rounded = round(size[0] / unit) * round(size[1] / unit) * unit * unit
            by_rule = smart_resize(size[1], size[0], unit, *limits)[::-1]
            if not limits[0] <= by_rule[0] * by_rule[1] <= limits[1]:
                with pytest.raises(UnreadableImageError, match="no size of its shape is within"):
                    clean_image(_gradient(*size), *limits, unit)
                continue
            stored = clean_image(_gradient(*size), *limits, unit).size
            if limits[0] <= rounded <= limits[1]:
                assert stored == size
            else:
                assert stored == by_rule == smart_resize(stored[1], stored[0], unit, *limits)[::-1]


def test_tokens_are_those_of_the_models_own_processor() -> None:
    """With the published limits of Qwen2.5-VL, for images below, within and above them."""
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28})
    for size in ((20, 30), (56, 56), (250, 251), (1000, 70)):
        grid = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0]
        assert image_tokens(*size) == int(grid.prod()) // 4
    assert image_tokens(9000, 9000) <= 16384


def test_a_file_is_stored_as_it_is_only_where_it_shows_the_same_and_tells_nothing_else(
    subtests: pytest.Subtests,
) -> None:
    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    exif, turned, text = Image.Exif(), Image.Exif(), PngInfo()
    exif[ExifTags.Base.Make] = turned[ExifTags.Base.Make] = "a camera"
    turned[ExifTags.Base.Orientation] = 6
    text.add_text("author", "somebody")
    see_through = picture.convert("RGBA")
    see_through.putalpha(128)
    noise = Image.effect_noise((40, 30), 80).convert("RGB")
    lines = Image.new("L", (40, 30), "white")
    ImageDraw.Draw(lines).line((3, 5, 35, 20), fill=0)
    cases: list[tuple[str, Image.Image, str, dict[str, Any], bool]] = [
        ("photograph", picture, "JPEG", {"quality": 80}, True),
        ("drawing", picture, "PNG", {"dpi": (72, 72)}, True),
        ("camera", picture, "JPEG", {"exif": exif}, False),
        ("camera held upright", picture, "JPEG", {"exif": turned}, False),
        ("comment", picture, "JPEG", {"comment": "somebody"}, False),
        ("profile", picture, "JPEG", {"icc_profile": b"profile"}, False),
        ("text", picture, "PNG", {"pnginfo": text}, False),
        ("camera's PNG", picture, "PNG", {"exif": exif}, False),
        ("grey", picture.convert("L"), "PNG", {}, False),
        ("palette", picture.convert("P"), "PNG", {}, False),
        ("see-through", see_through, "PNG", {}, False),
        ("colour that stands for none", picture, "PNG", {"transparency": (255, 255, 255)}, False),
        ("another format", picture, "WEBP", {"lossless": True}, False),
        ("noise in another format", noise, "WEBP", {"lossless": True}, False),
        ("grey lines", lines, "PNG", {}, False),
    ]
    for name, image, form, options, same in cases:
        with subtests.test(name):
            stream = io.BytesIO()
            image.save(stream, form, **options)
            cleaned = clean_image(stream.getvalue())
            stored = stored_bytes(stream.getvalue(), cleaned)
            assert (stored == stream.getvalue()) == same
            shown = Image.open(io.BytesIO(stored))
            assert (shown.mode, shown.size, shown.tobytes()) == ("RGB", cleaned.size, cleaned.tobytes())
            assert not shown.getexif() and b"somebody" not in stored
    drawing = png_bytes(picture)
    assert b"more" not in stored_bytes(drawing + b"more", picture), "what stands behind a PNG is not kept"
    smaller = picture.resize((21, 15))
    stored = stored_bytes(drawing, smaller)
    assert Image.open(io.BytesIO(stored)).tobytes() == smaller.tobytes()
    Image.open(io.BytesIO(stored)).verify()
