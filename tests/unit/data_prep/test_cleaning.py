"""Rows are cleaned, kept aside with reason and bytes where they are broken, and stand in one split
alone.
"""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adora_vl.conversion.leakage import LeakIndex, difference_hash, fingerprint
from adora_vl.conversion.problem import RowError
from adora_vl.conversion.quarantine import LEAK_REASON, Quarantine
from adora_vl.data.dataset import read_manifest, stored_rows
from adora_vl.data.images import MAX_DECODED_PIXELS, UnreadableImageError, clean_image
from adora_vl.utils.errors import UserError
from tests.support.disk import file_contents
from tests.support.geometry3k import (
    read_quarantined_rows,
    run_prepare_geometry3k,
    write_problem_folder,
)
from tests.support.pictures import draw_figure, encode_picture


def decompression_bomb() -> bytes:
    """Return a PNG of a few hundred bytes whose header says 120,000 x 120,000 pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", 120_000, 120_000, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(10_000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def with_flipped_byte(content: bytes) -> bytes:
    """Return bytes whose middle one has all of its bits flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def two_frame_picture(form: str) -> bytes:
    """Return a picture of two frames."""
    frames = [draw_figure(1), draw_figure(2)]
    return encode_picture(frames[0], form, save_all=True, append_images=frames[1:])


# A function that damages the folder of a problem.
Damage = Callable[[Path], object]


def remove_file(name: str) -> Damage:
    """Return damage: a file of the folder is gone."""
    return lambda folder: (folder / name).unlink()


def write_file(name: str, content: bytes) -> Damage:
    """Return damage: a file of the folder has other content."""
    return lambda folder: (folder / name).write_bytes(content)


PNG_PICTURE = encode_picture(draw_figure(3))
JPEG_PICTURE = encode_picture(draw_figure(3), "JPEG")
# by the name of a fault: the picture, the changed keys of data.json or the damage to the folder,
# and the reason under which the row is refused
PICTURE_AND_KIND_BY_FAULT: dict[str, tuple[bytes, str]] = {
    "empty picture": (b"\0", "image_undecodable"),
    "text as a picture": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_svg"),
    "PNG cut in half": (PNG_PICTURE[: len(PNG_PICTURE) // 2], "image_truncated"),
    "PNG without its end": (PNG_PICTURE[:-12], "image_truncated"),
    "JPEG cut in half": (JPEG_PICTURE[: len(JPEG_PICTURE) // 2], "image_truncated"),
    "BMP cut": (encode_picture(draw_figure(3), "BMP")[:-100], "image_truncated"),
    "PNG with a flipped byte": (with_flipped_byte(PNG_PICTURE), "image_undecodable"),
    "animated GIF": (two_frame_picture("GIF"), "image_animated"),
    "animated PNG": (two_frame_picture("PNG"), "image_animated"),
    "animated WebP": (two_frame_picture("WEBP"), "image_animated"),
    "decompression bomb": (decompression_bomb(), "image_too_large"),
    "one pixel": (encode_picture(Image.new("RGB", (1, 1))), "image_degenerate"),
    "three rows of pixels": (
        encode_picture(draw_figure(3).crop((0, 50, 100, 53))),
        "image_degenerate",
    ),
    "all white": (encode_picture(Image.new("RGB", (50, 50), "white")), "image_degenerate"),
    "all transparent": (
        encode_picture(Image.new("RGBA", (50, 50), (9, 200, 3, 0))),
        "image_degenerate",
    ),
    "over 200 times as wide as high": (
        encode_picture(Image.linear_gradient("L").resize((900, 4))),
        "image_shape",
    ),
}
FIELDS_AND_KIND_BY_FAULT: dict[str, tuple[dict[str, Any], str]] = {
    "blank text": ({"problem_text": " \n"}, "no_text"),
    "no text": ({"problem_text": None}, "field_type"),
    "text that is a number": ({"problem_text": 12}, "field_type"),
    "half a surrogate pair": ({"problem_text": "Find \ud835."}, "field_type"),
    "letter without its choice": ({"answer": "E"}, "letter_without_choice"),
    "small letter": ({"answer": "b"}, "letter_without_choice"),
    "no answer": ({"answer": ""}, "letter_without_choice"),
    "answer that is a number": ({"answer": 2}, "field_type"),
    "no choices": ({"choices": None}, "field_type"),
    "empty choices": ({"choices": []}, "no_choices"),
    "choice of another type": ({"choices": ["5", 7]}, "field_type"),
    "blank choice": ({"choices": ["5", " "]}, "letter_without_choice"),
    "an open list as a gold": ({"choices": ["5", "2, 4, ..."]}, "gold"),
    "empty box as a gold": ({"choices": ["5", "{}"]}, "gold"),
    "gold that divides by zero": ({"choices": ["5", "\\frac{1}{0}"]}, "gold"),
    "huge gold": ({"choices": ["5", "9" * 600]}, "gold"),
    "gold with hidden characters": ({"choices": ["5", "1\u202e2"]}, "gold"),
}
DAMAGE_AND_KIND_BY_FAULT: dict[str, tuple[Damage, str]] = {
    "no picture": (remove_file("img_diagram.png"), "file_missing"),
    "no data.json": (remove_file("data.json"), "file_missing"),
    "data.json cut": (write_file("data.json", b'{"problem_text": "Find'), "not_json"),
    "data.json of another kind": (write_file("data.json", b"[1, 2]"), "not_json"),
    "data.json that is no UTF-8": (
        write_file("data.json", b'{"problem_text": "\xff"}'),
        "not_json",
    ),
    "data.json nested without end": (write_file("data.json", b"[" * 200_000), "not_json"),
}
FAULTS = [*PICTURE_AND_KIND_BY_FAULT, *FIELDS_AND_KIND_BY_FAULT, *DAMAGE_AND_KIND_BY_FAULT]
VALUE_AND_REMEDY_BY_FAULT = {  # of some: the value and the remedy
    "letter without its choice": "the answer 'E' is not the letter of one of its 2 choices; write one of A, B in",
    "answer that is a number": "'answer' is 2; make it a text in",
    "no choices": "'choices' is missing; make it a list of texts in",
    "blank choice": "choice B, the right one, is ' '",
    "an open list as a gold": "with the right answer '2, 4, ...' no answer would be graded as right",
    "no picture": "img_diagram.png cannot be read",
    "PNG cut in half": "is not usable (Truncated File Read)",
}


def write_broken_folder(root: Path, fault: str, number: int) -> tuple[Path, str]:
    """Write a folder that is broken in one way, and return it with the reason to expect."""
    if fault in PICTURE_AND_KIND_BY_FAULT:
        content, reason = PICTURE_AND_KIND_BY_FAULT[fault]
        return write_problem_folder(root, number=number, image=content), reason
    if fault in FIELDS_AND_KIND_BY_FAULT:
        changed_fields, reason = FIELDS_AND_KIND_BY_FAULT[fault]
        return write_problem_folder(root, number=number, **changed_fields), reason
    damage, reason = DAMAGE_AND_KIND_BY_FAULT[fault]
    folder = write_problem_folder(root, number=number)
    damage(folder)
    return folder, reason


@pytest.fixture(scope="module")
def prepared_broken_folders(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, dict[str, Path], dict[str, str]]:
    """Prepare the folders of all `FAULTS`, and two good ones.

    Returns the raw folder, the output, the broken folder of each fault, and the reason under which
    its row is to be refused.
    """
    root = tmp_path_factory.mktemp("broken")
    folders = {}
    reasons = {}
    for number, fault in enumerate(FAULTS):
        folders[fault], reasons[fault] = write_broken_folder(root / "raw", fault, number)
    for number in (500, 501):
        write_problem_folder(root / "raw", number=number)
    assert (
        run_prepare_geometry3k("intergps", root / "raw", root / "out", "--allow-quarantined", "1")
        == 0
    )
    return root / "raw", root / "out", folders, reasons


def test_a_broken_row_is_kept_aside_with_reason_and_bytes(
    prepared_broken_folders: Any, subtests: pytest.Subtests
) -> None:
    """A refused row is kept aside with its reason, the remedy, and all files of its source."""
    for fault in FAULTS:
        with subtests.test(fault):
            _, output, folders, reasons = prepared_broken_folders

            row_id = f"geometry3k/train/{folders[fault].name}"
            (line,) = [line for line in read_quarantined_rows(output) if line["id"] == row_id]
            assert line["reason"] == reasons[fault], line["detail"]
            assert VALUE_AND_REMEDY_BY_FAULT.get(fault, "") in line["detail"], line["detail"]
            assert line["detail"].startswith(f"{row_id}: ")
            assert "; " in line["detail"]
            assert "object at 0x" not in line["detail"]
            quarantined_bytes = {(output / name).read_bytes() for name in line["files"]}
            original_bytes = {path.read_bytes() for path in folders[fault].iterdir()}
            # Without a data.json nothing is read, so there is nothing to keep.
            if fault != "no data.json":
                assert quarantined_bytes == original_bytes


def test_good_rows_survive_among_broken_ones_and_everything_is_counted(
    prepared_broken_folders: Any,
) -> None:
    """Good rows among broken ones are stored, and each refused row counts under its reason."""
    _, output, _, reasons = prepared_broken_folders
    good_ids = [row["id"] for row in stored_rows(output, "train")]
    assert good_ids == ["geometry3k/train/500", "geometry3k/train/501"]
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest["counts"] == {"train": 2}
    assert len(FAULTS) >= 25
    assert manifest["quarantined"]["rows"] == len(FAULTS)
    assert len(read_quarantined_rows(output)) == len(FAULTS)
    assert sum(manifest["quarantined"]["reasons"].values()) == len(FAULTS)
    assert set(manifest["quarantined"]["reasons"]) == set(reasons.values())
    assert set(manifest["files"]) | {"manifest.json"} == set(file_contents(output))


def test_broken_rows_give_the_same_bytes_again_and_with_workers(
    prepared_broken_folders: Any, tmp_path: Path
) -> None:
    """Broken rows give the same output again, byte by byte, with four processes."""
    raw, output, _, _ = prepared_broken_folders
    options = ("--allow-quarantined", "1", "--workers", "4")
    code = run_prepare_geometry3k("intergps", raw, tmp_path / "again", *options)
    assert code == 0
    assert file_contents(tmp_path / "again") == file_contents(output)


def test_too_many_broken_rows_are_an_error_that_says_where_to_look(tmp_path, capsys):
    """Over 2 % of broken rows end the command, and leave what was there before.

    The error counts each kind, and names the report and the option that accepts such rows.
    """
    for number in range(70):
        write_problem_folder(tmp_path / "raw", number=number)
    (tmp_path / "raw" / "train" / "3" / "img_diagram.png").write_bytes(b"x")

    # One row of 70 is under the 2 % that are allowed.
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out") == 0, (
        "2 % are allowed"
    )
    contents_before = file_contents(tmp_path / "out")
    assert len(read_quarantined_rows(tmp_path / "out")) == 1

    # Three are over it, and nothing is written but the report.
    for number in (3, 4):
        (tmp_path / "raw" / "train" / str(number) / "img_diagram.png").write_bytes(b"x")
    (tmp_path / "raw" / "train" / "5" / "data.json").write_text("{")
    capsys.readouterr()
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: input: 3 of 70 rows (4.3%) cannot be used")
    assert error.count("\n") == 4
    assert "error: image_undecodable: 2 rows, the first is geometry3k/train/3: image 0" in error
    assert "error: not_json: 1 row, the first is geometry3k/train/5: " in error
    assert "--allow-quarantined 0.05" in error, "rounded up"
    assert file_contents(tmp_path / "out") == contents_before, "the old output has to stay"
    report = tmp_path / "out.quarantine"
    assert str(report / "quarantine.jsonl") in error
    report_lines = read_quarantined_rows(report)
    assert len(report_lines) == 3
    for line in report_lines:
        for name in line["files"]:
            assert (report / name).is_file()

    assert (
        run_prepare_geometry3k(
            "intergps", tmp_path / "raw", tmp_path / "out", "--allow-quarantined", "0.05"
        )
        == 0
    )
    assert not report.exists(), "the report of the earlier try is out of date"
    assert len(read_quarantined_rows(tmp_path / "out")) == 3
    assert len(list(stored_rows(tmp_path / "out", "train"))) == 67
    assert "quarantined: 3 rows" in capsys.readouterr().out


def test_a_foreign_folder_at_the_place_of_the_report_is_kept(tmp_path, capsys):
    """A folder of somebody else's in the place of the report is kept; the command is refused."""
    write_problem_folder(tmp_path / "raw", answer="Z")
    (tmp_path / "out.quarantine").mkdir()
    (tmp_path / "out.quarantine" / "thesis.tex").write_text("years of work")
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out") == 2
    assert "out.quarantine" in capsys.readouterr().err
    assert file_contents(tmp_path / "out.quarantine") == {"thesis.tex": b"years of work"}


def test_no_input_reaches_a_path(tmp_path: Path) -> None:
    """An id or file content with ../ in it makes no path: kept files are named by their content."""
    tmp_path.joinpath("in").mkdir()
    quarantine = Quarantine(tmp_path / "in")
    quarantine.add(
        "train",
        RowError("../../evil", "gold", "wrong", "remedy", original_files=[b"../../x", PNG_PICTURE]),
    )
    assert {path.name for path in tmp_path.rglob("*")} >= {"in", "quarantine", "quarantine.jsonl"}
    assert len(list(tmp_path.iterdir())) == 1
    line = json.loads((tmp_path / "in" / "quarantine.jsonl").read_text())
    # `bin` is for content that is no picture
    endings = [name.rsplit(".")[-1] for name in line["files"]]
    assert endings == ["bin", "png"]


def stored_ids(output: Path, split: str) -> list[str]:
    """Return the ids of the stored rows of a split, without the name of the data set."""
    return [row["id"].removeprefix("geometry3k/") for row in stored_rows(output, split)]


@pytest.fixture
def folders_with_leaks(tmp_path: Path) -> Path:
    """Write problems of three splits; training rows 1, 2 and 7 are held-out problems seen again.

    The held-out ones are test/900 and val/800. The comments say how each of the others differs.
    """
    raw = tmp_path / "raw"
    figure = draw_figure(1, size=300)
    write_problem_folder(
        raw, "test", number=900, image=encode_picture(figure), problem_text="Find m \\widehat A B ."
    )
    write_problem_folder(raw, "val", number=800, image=encode_picture(draw_figure(2)))
    # the very pixels
    write_problem_folder(
        raw, "train", number=1, image=encode_picture(figure), problem_text="find  m \\widehat A B"
    )
    # seen again by a camera
    write_problem_folder(
        raw, "train", number=2, image=encode_picture(figure.resize((190, 190)), "JPEG", quality=60)
    )
    # another question
    write_problem_folder(
        raw, "train", number=3, image=encode_picture(figure), problem_text="Find the radius."
    )
    # the same figure, another number
    write_problem_folder(
        raw, "train", number=4, image=encode_picture(figure.resize((190, 190))), answer="A"
    )
    # another figure
    write_problem_folder(raw, "train", number=5, image=encode_picture(draw_figure(3)))
    write_problem_folder(
        raw, "train", number=6, image=encode_picture(draw_figure(3))
    )  # twice in one split is no leak
    write_problem_folder(
        raw, "train", number=7, image=encode_picture(draw_figure(2))
    )  # of the other held-out split
    return raw


def test_leaks_are_dropped_from_train_and_reported(folders_with_leaks, tmp_path, capsys):
    """A training row that a held-out split has too is dropped, kept aside and reported.

    A row with the same figure and another question or answer is no leak.
    """
    assert run_prepare_geometry3k("intergps", folders_with_leaks, tmp_path / "out") == 0
    assert stored_ids(tmp_path / "out", "train") == ["train/3", "train/4", "train/5", "train/6"]
    assert stored_ids(tmp_path / "out", "test") == ["test/900"]
    assert stored_ids(tmp_path / "out", "validation") == ["validation/800"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    also = {"also": "geometry3k/test/900"}
    assert manifest["leaks"] == {
        "found": 3,
        "dropped": 3,
        "rows": [
            {"id": "geometry3k/train/1", **also, "by": "exact"},
            {"id": "geometry3k/train/2", **also, "by": "near"},
            {"id": "geometry3k/train/7", "also": "geometry3k/validation/800", "by": "exact"},
        ],
    }
    assert "leaks: 3 rows" in capsys.readouterr().out
    lines = read_quarantined_rows(tmp_path / "out")
    assert [line["id"][-1] for line in lines] == ["1", "2", "7"]
    assert {line["reason"] for line in lines} == {"leak"}
    original_bytes = [(tmp_path / "out" / name).read_bytes() for name in lines[0]["files"]]
    assert encode_picture(draw_figure(1, size=300)) in original_bytes


def test_leaks_that_are_kept_are_reported_all_the_same(
    folders_with_leaks: Path, tmp_path: Path
) -> None:
    """Leaks that `--keep-leaks` keeps, or that are between two held-out splits, are reported."""
    write_problem_folder(tmp_path / "held", "val", number=1, image=encode_picture(draw_figure(1)))
    write_problem_folder(tmp_path / "held", "test", number=2, image=encode_picture(draw_figure(1)))
    for raw, options, leak_count in (
        (folders_with_leaks, ("--keep-leaks",), 3),
        (tmp_path / "held", (), 1),
    ):
        assert (
            run_prepare_geometry3k("intergps", raw, tmp_path / "out", "--overwrite", *options) == 0
        )
        manifest = read_manifest(tmp_path / "out")
        assert manifest is not None
        assert manifest["leaks"]["found"] == leak_count
        assert manifest["leaks"]["dropped"] == 0
        assert manifest["quarantined"]["rows"] == 0
        assert sum(manifest["counts"].values()) == (9 if options else 2), "all rows are kept"


def test_the_pixels_alone_count_where_the_golds_differ(tmp_path: Path) -> None:
    """One of the two golds is wrong: no reason to train on the test question."""
    write_problem_folder(tmp_path / "raw", "test", number=1, image=encode_picture(draw_figure(1)))
    write_problem_folder(
        tmp_path / "raw", "train", number=2, image=encode_picture(draw_figure(1)), answer="A"
    )
    write_problem_folder(tmp_path / "raw", "train", number=3)
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out") == 0
    assert stored_ids(tmp_path / "out", "train") == ["train/3"]


def hash_distance(first: Image.Image, second: Image.Image) -> int:
    """Return in how many bits the difference hashes of two pictures differ."""
    return (difference_hash(first) ^ difference_hash(second)).bit_count()


def test_copies_of_the_real_diagrams_are_near_and_others_far(geometry3k_raw: Path) -> None:
    """Scaled, recoloured and padded copies of real diagrams are found; no other diagram is."""
    real = [
        clean_image(path.read_bytes())
        for path in sorted(geometry3k_raw.glob("train/*/img_diagram.png"))
    ]
    index = LeakIndex()
    for number, image in enumerate(real):
        index.add("test", str(number), fingerprint("Find x.", "5", [image]))
    for number, image in enumerate(real):
        half = (image.width // 2, image.height // 2)
        margin = Image.new("RGB", (image.width + 40, image.height + 10), "white")
        margin.paste(image, (30, 5))
        for copy in (
            image.resize(half),
            image.convert("P", palette=Image.Palette.ADAPTIVE, colors=16),
            margin,
        ):
            assert index.find("train", fingerprint("find x", "5", [copy])) == (str(number), "near")
    distances = []
    for number, image in enumerate(real):
        for earlier_image in real[:number]:
            distances.append(hash_distance(image, earlier_image))
    assert min(distances) > 50  # of the 256 bits of a hash


def test_the_hash_of_a_drawing_is_of_what_gets_darker_and_not_of_noise() -> None:
    """A bit of the hash is set where the picture gets darker to the right, but not by noise.

    The 17 stripes of 4 pixels get darker by 15 levels each, brighter by 15, or differ by 3.
    """

    def hash_of(levels: Any) -> int:
        row = np.repeat(levels, 4)
        pixels = np.tile(row, (64, 1)).astype(np.uint8)
        return difference_hash(Image.fromarray(pixels))

    falling = np.linspace(240, 0, 17)
    assert hash_of(falling) == 2**256 - 1  # all 256 bits
    rising = falling[::-1]
    noise = 200 + 3 * (np.arange(17) % 2)
    assert hash_of(rising) == 0
    assert hash_of(noise) == 0


def test_one_image_is_not_two() -> None:
    """A problem with one picture is no copy of one with this picture and another."""
    index = LeakIndex()
    index.add("test", "a", fingerprint("Find x.", "5", [draw_figure(1), draw_figure(2)]))
    assert index.find("train", fingerprint("Find x.", "5", [draw_figure(1)])) is None
    assert index.find("test", fingerprint("Find x.", "5", [draw_figure(1), draw_figure(2)])) is None


def test_a_bomb_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture whose header has too many pixels is refused before it is decoded.

    One is above Pillow's own limit of 179 million pixels, and one below it.
    """

    def decoded(image: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    # the same PNG with another width and height in its header, and their checksum
    side = int(MAX_DECODED_PIXELS**0.5) + 10
    smaller_bomb = bytearray(decompression_bomb())
    smaller_bomb[16:24] = struct.pack(">II", side, side)
    smaller_bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(smaller_bomb[12:29])))
    for content in (decompression_bomb(), bytes(smaller_bomb)):
        with pytest.raises(UnreadableImageError) as caught:
            clean_image(content)
        assert caught.value.reason == "image_too_large"


def test_a_source_of_leaks_alone_is_refused_without_a_share_of_unusable_rows(tmp_path):
    """A source whose rows are all leaks is refused, but not for its share of unusable rows.

    Leaks are usable rows that a benchmark has too.
    """
    quarantine = Quarantine(tmp_path)
    for number in range(3):
        quarantine.add(
            "train", RowError(f"r{number}", LEAK_REASON, "is in the test split", "leave it out")
        )
    with pytest.raises(UserError) as refusal:
        quarantine.check(rows=3, stored=0, allowed_share=0.02, quarantine_folder=tmp_path)
    message = str(refusal.value)
    assert "input: all of 3 rows are left out" in message
    assert f"{LEAK_REASON}: 3 rows, the first is r0" in message
    assert "cannot be used, over" not in message
