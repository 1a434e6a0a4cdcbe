"""The survey of a dataset as one HTML page that loads nothing and runs nothing."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from string import ascii_uppercase

from PIL import Image

from adora_vl.commands import amount
from adora_vl.errors import UserError
from adora_vl.files import check_folder, replace_file, written_to
from data_prep.images import png_bytes
from data_prep.inspection import Survey
from data_prep.plots import plots
from data_prep.schema import Row
from data_prep.text_report import describe, what_was_left_out

_GENERATOR = "adora_vl data_prep"  # how a page of ours is told from a stranger's file
_IMAGE_BYTES = 150_000  # of one picture; a larger one is shown smaller
_IMAGE_SIDE = 480
_SHOWN_CHARACTERS = 1500  # of one text
_STYLE = """
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


def write_page(found: Survey, path: Path) -> None:
    """Write the page. Raises `UserError` where `path` is a file that is not such a page, or cannot be written."""
    content = page(found)
    check_page(path)
    with written_to("html", path):
        replace_file(path, content)


def check_page(path: Path) -> None:
    """Raise `UserError` where `path` is a file that is not such a page, or no page can be put."""
    check_folder("html", path.parent)
    if not path.parent.exists():
        raise UserError(f"html: there is no folder {str(path.parent)!r}; make it, or choose another place")
    with written_to("html", path):
        if path.exists() and _GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"html: {str(path)!r} is not a page of ours; choose another name with --html")


def page(found: Survey) -> str:
    """The whole document. Its policy forbids scripts and everything from elsewhere, whatever a row says."""
    rows = sum(f.counts["rows"]["rows"] for f in found.splits.values())
    title = f"{found.folder.resolve().name}: {amount(rows, 'row')}"
    figures = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption><img alt='{escape(name, quote=True)}' "
        f"src='{_data_uri(svg.encode(), 'svg+xml')}'></figure>"
        for name, svg in plots(found).items()
    )
    cards = "".join(_card(row, split) for split, facts in found.splits.items() for row in facts.gallery)
    left_out = "".join(f"<p>{escape(line)}</p>" for line in what_was_left_out(found))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='generator' content='{_GENERATOR}'>"
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{left_out}"
        "<nav><a href='#plots'>Plots</a> <a href='#counts'>Counts</a> <a href='#rows'>Rows</a></nav>"
        f"<h2 id='plots'>Plots</h2><div class='grid'>{figures}</div>"
        f"<h2 id='counts'>Counts</h2><pre>{escape(describe(found))}</pre>"
        f"<h2 id='rows'>Rows, spread over the whole</h2><div class='grid'>{cards}</div></body></html>\n"
    )


def _card(row: Row, split: str) -> str:
    pictures = "".join(f"<img alt='diagram' src='{_picture(image['bytes'])}'>" for image in row["images"][:4])
    choices = row.get("choices")
    listed = ""
    if choices:
        right = [_is_right(row, index, value) for index, value in enumerate(choices)]
        listed = "".join(
            f"<li{' class=right' if ok else ''}>{_text(value)}</li>" for value, ok in zip(choices, right, strict=True)
        )
        listed = f"<ol>{listed}</ol>"
    meta = row.get("meta") or {}
    facts = {
        "gold": row["answer"],
        "as in the source": row.get("answer_raw") or "",
        "goal": meta.get("goal") or "",
        "shapes": ", ".join(meta.get("shapes") or []),
        "family": meta.get("family") or "",
    }
    terms = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value)
    return (
        f"<article><h3>{_text(row['id'])} ({escape(split)})</h3>{pictures}"
        f"<p>{_text(row['problem'])}</p>{listed}<dl>{terms}</dl></article>"
    )


def _is_right(row: Row, index: int, value: str) -> bool:
    """Whether this choice is the gold: named by the letter of the source, or equal to its value."""
    raw = row.get("answer_raw") or ""
    return raw == ascii_uppercase[index : index + 1] if len(raw) == 1 and raw.isupper() else value == raw


def _text(value: str) -> str:
    return escape(value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…")


def _picture(encoded: bytes) -> str:
    """The stored picture, or a smaller one, as a data URI."""
    if len(encoded) > _IMAGE_BYTES:
        with Image.open(io.BytesIO(encoded)) as image:
            image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
            encoded = png_bytes(image)
            if len(encoded) > _IMAGE_BYTES:  # a photograph
                stream = io.BytesIO()
                image.convert("RGB").save(stream, "JPEG", quality=80)
                return _data_uri(stream.getvalue(), "jpeg")
    return _data_uri(encoded, "png")


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
