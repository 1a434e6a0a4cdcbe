"""Geometry3K, and any other dataset that `data_prep` made: `python -m eval.geometry3k {infer,score,run}`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from adora_vl.errors import UserError
from data_prep.storage import load_split
from eval.engines import EngineSettings, build_engine, check_model
from eval.fingerprint import Fields, data_hash, model_hash, write_json
from eval.options import parse
from eval.runner import PREDICTIONS, SCORE, Problem, infer
from eval.scoring import score_file
from eval.table import table

# The options that an answer can depend on. Not the limit (a run may be extended), nor the batch size.
_FINGERPRINT = (
    "engine",
    "split",
    "dtype",
    "max_tokens",
    "temperature",
    "seed",
    "min_pixels",
    "max_pixels",
    "system_prompt",
)


_TRAINING_TEXTS = ("solution", "slip")  # of `meta`; what the warm start of the tiny model learns from


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0 done, 2 the user's input is wrong."""
    try:
        options = parse(argv, "geometry3k")
        if options.verb == "score":
            _score(options.predictions, options.output, options.rounding)
            return 0
        _infer(options)
        if options.verb == "run":
            _score(options.output / PREDICTIONS, options.output / SCORE, options.rounding)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _infer(options: Namespace) -> None:
    model = check_model(options.model)
    dataset = load_split(options.data, options.split)
    if options.limit is not None:
        dataset = dataset.select(range(min(options.limit, len(dataset))))
    fingerprint: Fields = {"benchmark": "geometry3k", "model": model, "model_hash": model_hash(model)}
    fingerprint["data_hash"] = data_hash(options.data, options.split)
    fingerprint |= {name: getattr(options, name) for name in _FINGERPRINT}
    settings = EngineSettings(
        model=model,
        engine=options.engine,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        batch_size=options.batch_size,
    )
    summary = infer(
        problems(dataset),
        options.output,
        settings,
        fingerprint,
        system_prompt=options.system_prompt,
        build=build_engine,
    )
    failed = f", {summary.image_failed} images failed" if summary.image_failed else ""
    print(
        f"{summary.asked} answered in {summary.seconds:.1f} s{failed} -> {options.output / PREDICTIONS}",
        file=sys.stderr,
    )


def _score(predictions: Path, output: Path, rounding: bool) -> None:
    score = score_file(predictions, rounding=rounding)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, score)
    print(table(score))
    print(f"-> {output}", file=sys.stderr)


def problems(dataset: Dataset) -> list[Problem]:
    """The rows of a prepared split as the runner takes them; images stay encoded until they are needed."""
    encoded = dataset.with_format("arrow")  # bytes as they are in the file
    texts = dataset.remove_columns("images")
    counts = [count for chunk in encoded["images"][:].chunks for count in chunk.value_lengths().to_pylist()]
    return [
        Problem(_fields(row), row["problem"], count or 0, partial(_decode, encoded, index))
        for index, (row, count) in enumerate(zip(texts, counts, strict=True))
    ]


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    known = {key: row[key] for key in ("source", "split") if row.get(key)}
    meta = {key: value for key, value in (row.get("meta") or {}).items() if key not in _TRAINING_TEXTS}
    return {
        "pid": row["id"],
        "question": row["problem"],
        "answer": row["answer"],
        "choices": row.get("choices"),
        "metadata": {**known, **meta},
    }


def _decode(encoded: Dataset, index: int) -> list[Image.Image]:
    images = encoded[index]["images"][0].as_py() or []
    return [ImageFeature().decode_example(image).convert("RGB") for image in images]


if __name__ == "__main__":
    sys.exit(main())
