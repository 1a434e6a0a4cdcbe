"""The columns of a prepared dataset, as `datasets` features. All sources write them; training and `eval` read them."""

from __future__ import annotations

from typing import Any

from datasets import Features, Image, List, Value

REQUIRED_COLUMNS = ("id", "images", "problem", "answer")

FEATURES = Features(
    {
        "id": Value("string"),  # unique and stable, e.g. geometry3k/train/15
        "images": List(Image()),  # RGB, upright
        "problem": Value("string"),  # an <image> for each image, where each stands; or none, and they stand before it
        "answer": Value("string"),  # canonical gold
        "answer_raw": Value("string"),  # as the source has it
        "choices": List(Value("string")),  # null where the problem is open
        "split": Value("string"),
        "source": Value("string"),
        "meta": {
            "goal": Value("string"),
            "shapes": List(Value("string")),
            "family": Value("string"),  # synthetic problems only, else empty
            "kind": Value("string"),  # which case of its family, where there are several (synthetic problems only)
            "solution": Value("string"),  # a worked answer where the source has one, else empty
            "slip": Value("string"),  # a typical wrong answer to the same problem (synthetic problems only), else empty
        },
    }
)

Row = dict[str, Any]
