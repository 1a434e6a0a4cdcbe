"""Pictures of any kind become the same RGB, in the size that the model's processor would choose."""

import io
import os
import struct
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import ExifTags, Image, ImageDraw, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from adora_vl.data.dataloader import DistinctRows, shown_rows
from adora_vl.data.images import (
    UnreadableImageError,
    clean_image,
    decoded_image,
    image_tokens,
    png_bytes,
    upright_rgb_copy,
)
from adora_vl.data.loading import UnreadableImage, decoded_rows, unreadable_rows
from adora_vl.data.prompt_lengths import sizes_in
from adora_vl.data.shared_images import KeptImage
from adora_vl.data.stored_images import stored_bytes


def encoded_as(picture: Image.Image, form: str) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, form)
    return stream.getvalue()


def test_any_kind_of_picture_becomes_the_same_rgb(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for mode in ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"]:
        with subtests.test(mode):
            grey = np.full((4, 6), 102, dtype=np.uint16)
            grey[3, 5] = 255  # a picture of one colour alone is refused
            picture = (
                Image.fromarray(grey * 257)
                if mode == "I;16"
                else Image.fromarray(grey.astype(np.uint8)).convert(mode)
            )
            path = tmp_path / ("picture.tiff" if mode == "CMYK" else "picture.png")
            picture.save(path)
            cleaned = clean_image(path.read_bytes())
            expected = picture.convert("RGB").getpixel((0, 0)) if mode == "1" else (102, 102, 102)
            assert cleaned.mode == "RGB"
            assert cleaned.size == (6, 4)
            assert cleaned.getpixel((0, 0)) == expected
            assert cleaned.getpixel((5, 3)) == (255, 255, 255)


def on_its_side(picture: Image.Image, form: str) -> bytes:
    """The picture with the tag of a camera that was held upright."""
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6
    stream = io.BytesIO()
    picture.save(stream, form, exif=tags)
    return stream.getvalue()


def test_a_picture_that_code_hands_over_is_shown_as_one_of_a_file(
    subtests: pytest.Subtests,
) -> None:
    """A row of Python's and a tool hand over objects; files have the same content."""
    drawn = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    ImageDraw.Draw(drawn).line((0, 0, 39, 29), fill=(0, 0, 0, 255))
    palette = drawn.quantize(8)
    grey = np.linspace(0, 65535, 1200).reshape(30, 40)
    noise = Image.effect_noise((40, 30), 80).convert("RGB")
    cases = {
        "transparent": (drawn, encoded_as(drawn, "PNG")),
        "a palette": (palette, encoded_as(palette, "PNG")),
        "grey and transparent": (drawn.convert("LA"), encoded_as(drawn.convert("LA"), "PNG")),
        "16 bits": (
            Image.fromarray(grey.astype(np.uint16)),
            encoded_as(Image.fromarray(grey.astype(np.uint16)), "PNG"),
        ),
        "floats": (
            Image.fromarray((grey / 65535).astype(np.float32)),
            encoded_as(Image.fromarray((grey / 65535).astype(np.float32)), "TIFF"),
        ),
        "print": (noise.convert("CMYK"), encoded_as(noise.convert("CMYK"), "TIFF")),
    }
    for form in ("JPEG", "PNG", "TIFF", "WEBP"):
        lies = on_its_side(noise, form)
        cases[f"on its side as {form}"] = (Image.open(io.BytesIO(lies)), lies)
    for name, (picture, encoded) in cases.items():
        with subtests.test(name):
            as_model_sees = upright_rgb_copy(picture)
            expected = decoded_image(encoded)
            assert as_model_sees.mode == "RGB"
            assert as_model_sees.size == expected.size
            assert as_model_sees.tobytes() == expected.tobytes()
            assert upright_rgb_copy(as_model_sees).tobytes() == as_model_sees.tobytes(), (
                "nothing is turned twice"
            )
            if "side" in name:
                assert as_model_sees.size == (30, 40)
            if "transparent" in name:
                assert as_model_sees.getpixel((39, 0)) == (255, 255, 255)
    plain = Image.new("RGB", (40, 30), "red")
    as_model_sees = upright_rgb_copy(plain)
    as_model_sees.putpixel((0, 0), 0)
    assert plain.getpixel((0, 0)) == (255, 0, 0), "it shares no pixel"
    premultiplied = Image.new("La", (40, 30), (0, 0))
    assert upright_rgb_copy(premultiplied).getpixel((0, 0)) == (255, 255, 255)
    for wrong, kind in (
        (Image.open(io.BytesIO(encoded_as(drawn, "PNG")[:60])), "image_truncated"),
        (Image.new("1", (10_000, 10_000)), "image_too_large"),
        (Image.fromarray(np.full((30, 40), np.nan, np.float32)), "image_range"),
    ):
        with pytest.raises(UnreadableImageError) as refused:
            upright_rgb_copy(wrong)
        assert refused.value.kind == kind


def test_rows_that_python_hands_over_are_shown_as_a_person_sees_them() -> None:
    drawn = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    lies = Image.open(io.BytesIO(on_its_side(Image.effect_noise((40, 30), 80), "JPEG")))
    rows: list[dict[str, Any]] = [
        {"images": [drawn, lies], "id": "a"},
        {"images": [drawn], "image": drawn},
        {"image": None},
    ]
    first, second, third = shown_rows(rows)
    assert [image.size for image in first["images"]] == [(40, 30), (30, 40)]
    assert all(isinstance(image, KeptImage) for image in [*first["images"], second["image"]])
    assert first["images"][0].getpixel((0, 0)) == (255, 255, 255)
    assert first["images"][0] is second["images"][0], "one object stays one"
    assert shown_rows([first])[0]["images"][0] is first["images"][0]
    assert third == {"image": None}
    assert drawn.mode == "RGBA", "what was handed over stays"
    assert type(drawn) is Image.Image, "what was handed over stays"
    (read,) = DistinctRows([rows[0]]).__getitems__([0])
    assert read["images"][1].size == (30, 40)
    nothing = Image.fromarray(np.full((8, 8), np.nan, np.float32))
    (broken,) = shown_rows([{"images": [nothing], "id": "b"}])
    assert unreadable_rows([broken])[0][0] == "b"


# The type of the values, the largest, and the values that become black, grey and white.
DEPTHS: list[tuple[Any, float, list[float]]] = [
    *((np.uint16, 2**bits - 1, [0, 2 ** (bits - 1), 2**bits - 1]) for bits in (8, 10, 12, 14, 16)),
    (np.int32, 65535, [0, 32768, 65535]),
    *((np.float32, white, [0.0, white / 2, white]) for white in (1.0, 255.0, 65535.0)),
]


def test_a_picture_of_any_depth_is_as_bright_as_it_was_meant() -> None:
    for kind, largest, values in DEPTHS:
        shades = np.repeat(np.array([values], kind), 4, axis=0).repeat(4, axis=1)
        form = "PNG" if kind is np.uint16 else "TIFF"
        cleaned = clean_image(encoded_as(Image.fromarray(shades), form))
        pixels: list[Any] = [cleaned.getpixel((at, 0)) for at in (0, 5, 11)]
        assert pixels[0] == (0, 0, 0), (kind, largest)
        assert pixels[2] == (255, 255, 255), (kind, largest)
        assert pixels[1] in [(127,) * 3, (128,) * 3], (kind, largest)


def test_a_picture_whose_white_nobody_can_tell_is_refused_with_the_remedy() -> None:
    shades = np.linspace(0, 1, 48).reshape(6, 8)
    for values in (
        shades * 1.1,
        shades - 0.1,
        shades * 0.2,
        shades * 1e6,
        np.where(shades > 0.5, np.nan, shades),
    ):
        with pytest.raises(UnreadableImageError, match="save it with 8 bits a channel") as refused:
            clean_image(encoded_as(Image.fromarray(values.astype(np.float32)), "TIFF"))
        assert refused.value.kind == "image_range"
    for largest, visible in ((4095, False), (16383, False), (60000, True)):
        colours = np.stack([shades * largest] * 3, axis=-1).astype(">u2")
        if visible:
            assert np.asarray(clean_image(_png_of_16_bits(colours))).max() == largest // 256
            continue
        with pytest.raises(UnreadableImageError, match="save it with 8 bits a channel"):
            clean_image(_png_of_16_bits(colours))


def _png_of_16_bits(colours: Any) -> bytes:
    """Encode a PNG of 16 bits a channel, which Pillow cannot write.

    `colours`: (height, width, 3).
    """
    height, width, _ = colours.shape
    lines = b"".join(b"\0" + line.tobytes() for line in colours)
    header = struct.pack(">2I5B", width, height, 16, 2, 0, 0, 0)
    chunks = (b"IHDR" + header, b"IDAT" + zlib.compress(lines), b"IEND")
    packed = (
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n%%EndComments\nshowpage\n"


def test_no_program_is_started_for_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a picture is opened: of a table, of a prepared folder, of a benchmark."""
    started = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho >> {started}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow looks for it once
    with pytest.raises(UnreadableImageError, match="not in any known picture format"):
        clean_image(EPS)
    stored = pa.table({"images": [[{"bytes": EPS, "path": None}]]})
    assert list(sizes_in(stored)) == [[None]]
    (tmp_path / "a.png").write_bytes(EPS)
    stored = [{"bytes": EPS, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}]
    images = decoded_rows({"images": [stored]})["images"][0]
    assert all(isinstance(image, UnreadableImage) for image in images)
    assert not started.exists()


def _gradient(width: int, height: int) -> bytes:
    return png_bytes(Image.linear_gradient("L").resize((width, height)).convert("RGB"))


def test_pictures_outside_of_the_limits_get_the_size_that_the_model_would_choose(
    subtests: pytest.Subtests,
) -> None:
    """The processor with the same limits leaves them as they are; the others keep their size."""
    sizes = [(900, 40), (40, 900), (33, 57), (640, 480), (5, 5)]
    for size, limits, unit in product(
        sizes, [(784, 1000), (3136, 100_000), (50_000, 60_000)], [28, 32]
    ):
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
    """Images are below, within and above the published limits of Qwen2.5-VL."""
    from transformers import Qwen2VLImageProcessor

    limits = (28, 56 * 56, 16384 * 28 * 28)
    processor = Qwen2VLImageProcessor(size={"shortest_edge": limits[1], "longest_edge": limits[2]})
    for size in ((20, 30), (56, 56), (250, 251), (1000, 70)):
        grid = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0]
        assert image_tokens(size, *limits, "1") == int(grid.prod()) // 4
    assert image_tokens((9000, 9000), *limits, "1") <= 16384


def test_a_file_is_stored_as_it_is_only_where_it_shows_the_same_and_tells_nothing_else(subtests):
    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    exif = Image.Exif()
    turned = Image.Exif()
    text = PngInfo()
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
            assert stored.startswith(b"\xff\xd8" if form == "JPEG" else b"\x89PNG")
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(stored)))
            assert upright.mode == "RGB"
            assert upright.size == cleaned.size
            assert upright.tobytes() == cleaned.tobytes()
            assert not upright.getexif()
            assert b"somebody" not in stored
    drawing = png_bytes(picture)
    assert b"more" not in stored_bytes(drawing + b"more", picture), (
        "what stands behind a PNG is not kept"
    )
    smaller = picture.resize((21, 15))
    stored = stored_bytes(drawing, smaller)
    assert Image.open(io.BytesIO(stored)).tobytes() == smaller.tobytes()
    Image.open(io.BytesIO(stored)).verify()
