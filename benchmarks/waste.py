"""Work of a real step that is avoided here, measured with and without: `python -m benchmarks.waste`.

- decoded images of a generation of 16 problems x 8 rollouts that is learned from in 64 micro-batches, and megabytes of
  pixels alive with all of them at hand, as Transformers holds them
- bytes that a rank sends the others for the prompts of these 128 rollouts
- microseconds per token of the engine's detokenizer with and without text, by the tiny model's tokenizer
"""

from __future__ import annotations

import argparse
import io
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from transformers import AutoTokenizer
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import RepeatSampler

from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.prompts import conversation
from adora_vl.rollout.distinct_rows import DistinctRows
from adora_vl.rollout.environment import prepare_engine_environment
from adora_vl.rollout_log import texts

PROBLEMS, GROUP, MICRO_BATCHES, TOKENS = 16, 8, 64, 1024


class Stored:
    """Problems with an image each, stored as PNG."""

    def __init__(self, side: int) -> None:
        pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="png")
        self.stored, self.decoded = file.getvalue(), 0

    def __len__(self) -> int:
        return PROBLEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.decoded += 1
        image = Image.open(io.BytesIO(self.stored))
        image.load()
        return {"prompt": conversation(f"Problem {index}: find x."), "images": [image]}


def held(side: int, remember: bool) -> tuple[int, float, list[dict[str, Any]]]:
    """Decoded images, megabytes of distinct pixels alive with all micro-batches at hand, and the first one's rows."""
    stored = Stored(side)
    rows = DistinctRows(stored)
    sampler = list(RepeatSampler(range(PROBLEMS), GROUP, PROBLEMS, MICRO_BATCHES, shuffle=False))
    size = PROBLEMS * GROUP
    batches = []
    for start in range(0, len(sampler), size):
        rows = rows if remember else DistinctRows(stored)
        batches.append(rows.__getitems__(sampler[start : start + size]))
    images = {id(image): image for batch in batches for row in batch for image in row["images"]}
    return stored.decoded, sum(3 * i.width * i.height for i in images.values()) / 1e6, batches[0]


def sent(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pickled bytes of a rank's prompts with their images and as texts."""
    prompts = [prepare_multimodal_messages(row["prompt"], row["images"]) for row in rows]
    with mock.patch.object(texts, "gather_object", side_effect=lambda values: values):
        return len(pickle.dumps(prompts)), len(pickle.dumps(texts.gather_texts(prompts)))


def output_seconds(detokenize: bool) -> float:
    """Of the engine's detokenizer on a rollout of `TOKENS` tokens, token by token."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    ids = tokenizer("x = (180 - 40) / 2 = 70 so the angle at the top is half of the rest. ")["input_ids"]
    parameters = SamplingParams(detokenize=detokenize, max_tokens=TOKENS)
    request = EngineCoreRequest("0", ids, None, parameters, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer if detokenize else None, request)
    start = time.perf_counter()
    for place in range(TOKENS):
        detokenizer.update([ids[place % len(ids)]], False)
    return time.perf_counter() - start


def median(way: Callable[[], float], repeats: int) -> float:
    return statistics.median(way() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=560, help="pixels of an image's side")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    prepare_engine_environment()
    (decoded, megabytes, rows), (once, less, _) = held(options.side, False), held(options.side, True)
    print(f"decoded images   {decoded:>10} -> {once:<10} ratio {once / decoded:.3f}")
    print(f"MB of pixels     {megabytes:>10.0f} -> {less:<10.0f} ratio {less / megabytes:.3f}")
    before, after = sent(rows)
    print(f"bytes sent       {before:>10} -> {after:<10} ratio {after / before:.4f}")
    with_text, without = (median(partial(output_seconds, on), options.repeats) for on in (True, False))
    scale = 1e6 / TOKENS
    print(f"us per token     {with_text * scale:>10.2f} -> {without * scale:<10.2f} ratio {without / with_text:.2f}")


if __name__ == "__main__":
    main()
