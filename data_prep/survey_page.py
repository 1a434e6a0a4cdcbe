"""What a prepared data set holds, as one HTML page with plots."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from itertools import cycle, islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import ImageOps

from adora_vl.data.dataset import Row
from adora_vl.data.images import open_picture, png_bytes
from adora_vl.models.families import FAMILIES
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder, naming_write_errors, replace_file
from data_prep.survey import (
    UNKNOWN_VALUE,
    SplitSurvey,
    Survey,
    counts_text,
    left_out_lines,
    most_frequent_first,
    read_meta,
    total_value_counts,
    whole_prompt_lines,
)

_COLOUR_BY_SPLIT_NUMBER = ("#2f6fb0", "#e08b2d", "#4f9d69", "#9467bd")
_MAX_VALUES_SHOWN = 12
_PLOT_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "data_prep",  # else the ids in the file are random
    "svg.fonttype": "path",  # a reader's fonts do not change the picture
    "text.parse_math": False,  # a `$` of a row is a dollar, not TeX
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def draw_plots(survey: Survey) -> dict[str, str]:
    """Return the plots of a survey for its page, the SVG of each by its title."""
    svg_by_title = {}
    with matplotlib.rc_context(_PLOT_STYLE):
        for name, title in (
            ("answer form", "Answer forms"),
            ("goal", "Goals"),
            ("shape", "Shapes"),
        ):
            # Bars of nothing but `unknown` would say nothing.
            if _has_known_values(survey, name):
                svg_by_title[title] = _draw_as_svg(_draw_bars, survey.splits, name)
        splits = survey.splits.items()
        image_tokens = {name: list(split.image_tokens) for name, split in splits}
        characters = {name: list(split.characters) for name, split in splits}
        unit = f"tokens of {FAMILIES[survey.family].name}"
        svg_by_title["Image tokens per row"] = _draw_as_svg(_draw_histogram, image_tokens, unit)
        svg_by_title["Length of the problems"] = _draw_as_svg(
            _draw_histogram, characters, "characters"
        )
        svg_by_title["Image sizes"] = _draw_as_svg(_draw_scatter, survey.splits)
    return svg_by_title


def _has_known_values(survey: Survey, name: str) -> bool:
    """Return whether some row has the property `name`, one of `COUNTED_PROPERTIES`.

    The data of a user have neither goals nor shapes.
    """
    return bool(set(total_value_counts(name, survey.splits)) - {UNKNOWN_VALUE})


def _draw_as_svg(draw: Callable[..., None], *arguments: object) -> str:
    """Return a small plot as SVG: that of `draw`, called with its axes and the arguments.

    The SVG has no date, so that the same data give the same page.
    """
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, *arguments)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _draw_bars(axes: Axes, splits: dict[str, SplitSurvey], name: str) -> None:
    """Draw a bar for the share of rows with each value of the property `name`.

    There is a bar for each split at each value, and the most frequent value is on top.
    """
    values = most_frequent_first(total_value_counts(name, splits))[:_MAX_VALUES_SHOWN]
    # The bars of all splits beside a value take 0.8 of the space between two values.
    bar_height = 0.8 / len(splits)
    for index, (split, split_survey) in enumerate(splits.items()):
        row_count = max(1, split_survey.row_count)  # a split may be empty
        value_counts = split_survey.value_counts[name]
        axes.barh(
            # The first value is at 0 and the next ones below it; the y axis points up.
            y=[-(rank + index * bar_height) for rank in range(len(values))],
            width=[100 * value_counts[value] / row_count for value in values],
            height=bar_height,
            label=split,
            color=_COLOUR_BY_SPLIT_NUMBER[index % len(_COLOUR_BY_SPLIT_NUMBER)],
        )
    middle = bar_height * (len(splits) - 1) / 2
    labels = [value if len(value) <= 24 else value[:23] + "…" for value in values]
    axes.set_yticks([-(rank + middle) for rank in range(len(values))], labels)
    axes.set_xlabel("% of the rows")
    axes.grid(axis="x", alpha=0.3)


def _draw_histogram(axes: Axes, numbers_by_split: dict[str, list[int]], unit: str) -> None:
    """Draw a histogram of a number that each row has, such as the length of its problem.

    `numbers_by_split` has the numbers of all rows of each split, and `unit` is what they count.
    """
    # matplotlib draws no bars for an empty split.
    filled_splits = {split: numbers for split, numbers in numbers_by_split.items() if numbers}
    all_numbers = set[int]().union(*filled_splits.values())
    low = min(all_numbers, default=0)
    high = max(all_numbers, default=0)
    # The axis is about 20 wide at least, so that nearly equal numbers do not look far apart.
    padding = max(0, 10 - (high - low) // 2)
    axes.hist(
        list(filled_splits.values()),
        bins=30,
        range=(low - padding, high + padding),
        label=list(filled_splits),
        color=list(islice(cycle(_COLOUR_BY_SPLIT_NUMBER), len(filled_splits))),
        # With these weights the bars of a split add up to 100 %.
        weights=[[100 / len(numbers)] * len(numbers) for numbers in filled_splits.values()],
    )
    axes.set(xlabel=unit, ylabel="% of the rows")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", alpha=0.3)


def _draw_scatter(axes: Axes, splits: dict[str, SplitSurvey]) -> None:
    """Draw the widths and heights of images, a colour for each split."""
    for index, (split, split_survey) in enumerate(splits.items()):
        sizes = sorted(set(split_survey.image_sizes))
        widths = [width for width, _ in sizes]
        heights = [height for _, height in sizes]
        axes.scatter(
            widths,
            heights,
            s=9,
            alpha=0.6,
            label=split,
            color=_COLOUR_BY_SPLIT_NUMBER[index % len(_COLOUR_BY_SPLIT_NUMBER)],
        )
    axes.set(xlabel="width, pixels", ylabel="height, pixels", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)


_PAGE_GENERATOR = "adora_vl data_prep"  # tells a page of ours from any other file
_MAX_IMAGE_BYTES = 150_000  # a picture with more bytes is made smaller
_MAX_IMAGE_SIDE = 480
_MAX_CHARACTERS_SHOWN = 1500  # characters of a text that are shown
_PAGE_CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 1200px; }
nav a { margin-right: 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
figure, article { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .75rem; min-width: 0; }
figcaption { font-weight: 600; }
figure img { width: 100%; background: #fff; border-radius: 4px; }
article img { max-width: 100%; max-height: 260px; display: block; margin: 0 auto .5rem; background: #fff; }
article p { margin: .4rem 0; } p, dd, li, h3 { overflow-wrap: anywhere; white-space: pre-wrap; }
h3 { font-size: .85rem; margin: 0 0 .5rem; opacity: .75; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .6rem; margin: 0; font-size: .9rem; }
dt { opacity: .7; } dd { margin: 0; } ol { list-style: upper-alpha; margin: .3rem 0; padding-left: 1.8rem; }
li.right { font-weight: 700; } pre { overflow-x: auto; background: var(--soft); padding: .75rem; border-radius: 8px; }
"""


def write_page(survey: Survey, path: Path) -> None:
    """Write the HTML page of a survey to the file `path`.

    Raises `UserError` where `path` is a file that is not such a page, or cannot be written.
    """
    content = render_page(survey)
    check_page(path)
    with naming_write_errors("html", path):
        replace_file(path, content)


def check_page(path: Path) -> None:
    """Raise `UserError` where the page of a survey cannot be written to `path`.

    A file that is there may only be replaced if it is such a page.
    """
    check_folder("html", path.parent)
    if not path.parent.exists():
        raise UserError(
            f"html: there is no folder {str(path.parent)!r}; make it, or choose another place"
        )
    existing_text = None
    # Turns the errors of the file system into a `UserError`.
    with naming_write_errors("html", path):
        if path.exists():
            existing_text = path.read_text(encoding="utf-8", errors="replace")[:1000]
    if existing_text is not None and _PAGE_GENERATOR not in existing_text:
        raise UserError(
            f"html: {str(path)!r} is not a page of ours; choose another name with --html"
        )


def render_page(survey: Survey) -> str:
    """Return the HTML page of a survey: some rows, a prompt, plots and counts.

    Its content policy forbids scripts and everything from other places, since the texts of rows
    are a stranger's.
    """
    row_count = sum(split_survey.row_count for split_survey in survey.splits.values())
    title = f"{survey.folder.resolve().name}: {pluralize(row_count, 'row')}"
    figures = ""
    for plot_title, svg in draw_plots(survey).items():
        figures += (
            f"<figure><figcaption>{escape(plot_title)}</figcaption>"
            f"<img alt='{escape(plot_title, quote=True)}' "
            f"src='{_data_uri(svg.encode(), 'svg+xml')}'></figure>"
        )
    cards = ""
    for split, split_survey in survey.splits.items():
        for row in split_survey.gallery:
            cards += _render_row(row, split)
    prompt_lines = whole_prompt_lines(survey.example) if survey.example is not None else []
    prompt = "\n".join(prompt_lines)
    left_out = "".join(f"<p>{escape(line)}</p>" for line in left_out_lines(survey.manifest))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='generator' "
        f"content='{_PAGE_GENERATOR}'><meta http-equiv='Content-Security-Policy' content=\"default-src "
        "'none'; img-src data:; style-src 'unsafe-inline'\"><meta name='viewport' "
        "content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_PAGE_CSS}</style></head><body>"
        f"<h1>{escape(title)}</h1>{left_out}<nav><a href='#rows'>Rows</a> <a "
        "href='#prompt'>Prompt</a> <a href='#plots'>Plots</a> <a href='#counts'>Counts</a></nav>"
        f"<h2 id='rows'>Rows, spread over the whole</h2><div class='grid'>{cards}</div>"
        f"<h2 id='prompt'>Prompt</h2><pre>{escape(prompt)}</pre>"
        f"<h2 id='plots'>Plots</h2><div class='grid'>{figures}</div>"
        f"<h2 id='counts'>Counts</h2><pre>{escape(counts_text(survey))}</pre></body></html>\n"
    )


def _render_row(row: Row, split: str) -> str:
    """Return the HTML of one row: its first four pictures, problem, choices and properties.

    The right choice is marked.
    """
    pictures = "".join(
        f"<img alt='diagram' src='{_picture_as_data_uri(image['bytes'])}'>"
        for image in row["images"][:4]
    )
    # `answer_raw` may be the letter of the right choice or its text. A folder that is not ours may
    # lack this column.
    answer_in_source = str(row.get("answer_raw") or "")
    right_choice = answer_in_source or row["answer"]
    is_letter = len(right_choice) == 1 and right_choice.isupper()
    items = ""
    for letter, choice in zip(ascii_uppercase, row.get("choices") or (), strict=False):
        is_right = right_choice == (letter if is_letter else choice)
        items += f"<li{' class=right' if is_right else ''}>{_escape_shortened(choice)}</li>"
    choices = f"<ol>{items}</ol>" if items else ""
    meta = read_meta(row)
    properties = {
        "right answer": row["answer"],
        "as in the source": answer_in_source,
        "goal": meta.goal,
        "shapes": ", ".join(meta.shapes),
        "family": meta.family,
    }
    property_list = ""
    for name, value in properties.items():
        if value:
            property_list += f"<dt>{name}</dt><dd>{_escape_shortened(value)}</dd>"
    title = f"{_escape_shortened(row['id'])} ({escape(split)})"
    problem = _escape_shortened(row["problem"])
    return (
        f"<article><h3>{title}</h3>{pictures}<p>{problem}</p>{choices}<dl>{property_list}</dl>"
        "</article>"
    )


def _escape_shortened(value: str) -> str:
    """Return a text for HTML, cut where it is too long for a card."""
    if len(value) > _MAX_CHARACTERS_SHOWN:
        value = value[:_MAX_CHARACTERS_SHOWN] + "…"
    return escape(value)


def _picture_as_data_uri(encoded: bytes) -> str:
    """Return a stored picture as a data URI, smaller where it would make the page too large."""
    if len(encoded) > _MAX_IMAGE_BYTES:
        with open_picture(io.BytesIO(encoded)) as image:
            ImageOps.exif_transpose(image, in_place=True)
            image.thumbnail((_MAX_IMAGE_SIDE, _MAX_IMAGE_SIDE))
            encoded = png_bytes(image)
            if len(encoded) > _MAX_IMAGE_BYTES:  # a photograph
                stream = io.BytesIO()
                image.convert("RGB").save(stream, "JPEG", quality=80)
                return _data_uri(stream.getvalue(), "jpeg")
    return _data_uri(encoded, "png")


def _data_uri(content: bytes, subtype: str) -> str:
    """Return a picture as a data URI, for the page to hold; `subtype` is `png` of `image/png`."""
    return f"data:image/{subtype};base64,{base64.b64encode(content).decode()}"
