"""What `data_prep convert` takes: `python -m benchmarks.convert`.

Under a minute.

Prints the processor's milliseconds for a row with a picture of a megapixel in a table of one split,
by what its file is, beside those of decoding that file alone, and for each number of `--rows` of
text the most memory and the rows a second of the processor, each in a process of its own. `--rows
100000 1000000` takes five minutes.
"""

import argparse
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageDraw

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.pipeline import read_and_clean
from adora_vl.conversion.tables import open_local, row_readers
from adora_vl.data.images import PixelLimits
from data_prep.cli import main as data_prep

PICTURE_SIZE = (1152, 896)
NUMBER_OF_PICTURES = 12
FORMAT_BY_NAME: dict[
    str, tuple[str, bool, int | None]
] = {  # format, as a photograph, EXIF's orientation
    "PNG, a drawing": ("PNG", False, None),
    "PNG, a photograph": ("PNG", True, None),
    "JPEG": ("JPEG", True, None),
    "JPEG of a camera": ("JPEG", True, 1),
    "JPEG of a camera on its side": ("JPEG", True, 6),
}


def encode_photo(number: int, form: str, photograph: bool, orientation: int | None) -> bytes:
    """Return a drawn picture of about a megapixel as encoded bytes.

    `photograph` adds noise, and `orientation` the tag of a camera.
    """
    image = Image.new("RGB", PICTURE_SIZE, (235, 232, 225))
    if photograph:
        noise = np.random.default_rng(number).normal(0, 6, (PICTURE_SIZE[1], PICTURE_SIZE[0], 3))
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    ImageDraw.Draw(image).polygon(
        [(100 + number, 800), (900, 820), (120, 150)], outline="black", width=5
    )
    tags = Image.Exif()
    stream = io.BytesIO()
    if orientation is not None:
        tags[ExifTags.Base.Make] = "Camera"
        tags[ExifTags.Base.Orientation] = orientation
    image.save(stream, form, **({} if orientation is None else {"exif": tags}))
    return stream.getvalue()


def decode_picture(file: Path) -> None:
    with Image.open(file) as image:
        image.load()


def milliseconds_per_picture(calls: list[Callable[[], object]]) -> float:
    """Return the processor's time for one call, the least of five rounds."""
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        for call in calls:
            call()
        rounds.append((time.process_time() - begin) / len(calls) * 1000)
    return min(rounds)


def measure_pictures(folder: Path) -> None:
    """Time the rows of pictures in each format, beside decoding alone, and print a table."""
    print(f"{'a row of a megapixel':<30} {'convert':>8} {'decoding':>9} {'ratio':>6}  ms")
    columns = Columns("q", "a", ("i",))
    for name, form in FORMAT_BY_NAME.items():
        files = [folder / f"{number}.img" for number in range(NUMBER_OF_PICTURES)]
        for number, file in enumerate(files):
            file.write_bytes(encode_photo(number, *form))
        rows = [
            {"q": f"How long is side {n}?", "a": str(n), "i": file.name}
            for n, file in enumerate(files)
        ]
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        opened = open_local(folder / "t.jsonl", columns)
        calls = list(
            row_readers(opened, split="train", name="t", columns=columns, drawn_test_split=None)
        )
        ours = milliseconds_per_picture(
            [
                partial(read_and_clean, call, PixelLimits(), with_perceptual_hashes=False)
                for call in calls
            ]
        )
        alone = milliseconds_per_picture([partial(decode_picture, file) for file in files])
        print(f"{name:<30} {ours:8.1f} {alone:9.1f} {ours / alone:6.2f}")


def write_text_table(rows: int, form: str, folder: Path) -> None:
    """Write `rows` rows of text to `t.FORM` in a folder, in the format `form`."""
    table = (
        {"q": f"What is {n} plus {n * 7 % 1000}?", "a": str(n + n * 7 % 1000)} for n in range(rows)
    )
    if form == "xlsx":
        import openpyxl

        book = openpyxl.Workbook(write_only=True)
        sheet = book.create_sheet()
        for cells in chain([("q", "a")], (tuple(row.values()) for row in table)):
            sheet.append(cells)
        book.save(folder / "t.xlsx")
        return
    with (folder / f"t.{form}").open("w") as file:
        if form == "csv":
            file.write("q,a\n")
            file.writelines(f"{row['q']},{row['a']}\n" for row in table)
        else:
            before, between, after = ("[", ",\n", "]") if form == "json" else ("", "\n", "")
            file.write(before)
            for n, row in enumerate(table):
                file.write((between if n else "") + json.dumps(row))
            file.write(after)


def measure_conversion(rows: int, form: str, folder: Path) -> None:
    """Convert `rows` rows of text, and print peak memory in MiB and the processor's seconds."""
    # Written by a process of its own, whose memory does not count here.
    words = [
        sys.executable,
        "-m",
        "benchmarks.convert",
        "--rows",
        str(rows),
        "--form",
        form,
        "--write",
        str(folder),
    ]
    subprocess.run(words, check=True)
    begin = time.process_time()
    words = [
        "--input",
        str(folder / f"t.{form}"),
        "--columns",
        "problem=q",
        "answer=a",
        "--workers",
        "1",
    ]
    data_prep(["convert", *words, "--output", str(folder / "out")])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time() - begin)


def main() -> None:
    """Run the measurements that the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 100_000])
    forms = ("jsonl", "json", "csv", "xlsx")
    parser.add_argument("--form", choices=forms, default=forms[0], help="of the table of text")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_text_table(arguments.rows[0], arguments.form, arguments.write)
        return
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.once:
            measure_conversion(arguments.rows[0], arguments.form, Path(temporary))
            return
        measure_pictures(Path(temporary))
    for rows in arguments.rows:
        words = [
            sys.executable,
            "-m",
            "benchmarks.convert",
            "--once",
            "--form",
            arguments.form,
            "--rows",
            str(rows),
        ]
        out = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
        print(
            f"{rows:>9,} rows of text: {float(out[-2]):.0f} MiB at most, "
            f"{rows / float(out[-1]):,.0f} rows a second"
        )


if __name__ == "__main__":
    main()
