"""What happens to a prompt before it is sampled, once and as before: `python -m benchmarks.way_in`.

- the trainer's side: TRL's two calls of the processor for 16 prompts x 8 rollouts with an image each. "Before" is the
  same code that forgets between the calls what it has rendered, tokenized and hashed
- the engine's side: vLLM's parser and its identity of an image, as vLLM does it and with the digest that is known
- the next generation's images: read, hashed and processed where it begins, or found ready

The ways come by turns; medians of the processor's seconds, and how often each thing is done.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from adora_vl.rollout.environment import prepare_engine_environment

prepare_engine_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import processing_utils  # noqa: E402
from trl.data_utils import apply_chat_template, prepare_multimodal_messages  # noqa: E402

from adora_vl.dedup.image_bank import ImageBank  # noqa: E402
from adora_vl.dedup.processor import StepProcessor  # noqa: E402
from adora_vl.models.load import limit_pixels, load_processor  # noqa: E402
from adora_vl.models.tiny.build import PRETRAINED  # noqa: E402
from adora_vl.prompts import conversation  # noqa: E402
from adora_vl.rollout import distinct_rows as rows_module  # noqa: E402
from adora_vl.rollout import image_cache  # noqa: E402
from adora_vl.rollout.distinct_rows import DistinctRows, KeptImage  # noqa: E402
from adora_vl.rollout.image_cache import ImageCache, effective_settings  # noqa: E402

PROBLEMS, GROUP = 16, 8
counts: Counter[str] = Counter()


def count(owner: Any, name: str, what: str, number: Callable[..., int]) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[what] += number(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


class StoredDiagrams:
    """Problems with an image each, stored as PNG."""

    def __init__(self, side: int) -> None:
        generator, self.files = np.random.default_rng(0), []
        for _ in range(PROBLEMS):
            small = Image.fromarray(generator.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8))
            file = io.BytesIO()
            small.resize((side, side), Image.Resampling.BICUBIC).save(file, format="png")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return PROBLEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = Image.open(io.BytesIO(self.files[index]))
        return {"prompt": conversation(f"Problem {index}: in the triangle ABC find x."), "images": [image]}


def forget(images: list[Any]) -> None:
    for image in images:
        vars(image).pop("digest", None)


def trainer_side(processor: Any, rows: list[dict[str, Any]], cache: ImageCache, once: bool) -> None:
    """As TRL asks for a generation."""
    step = StepProcessor(processor, cache, ImageBank(0), torch.device("cpu"))
    prompts = [prepare_multimodal_messages(row["prompt"], row["images"]) for row in rows]
    step.apply_chat_template(conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    if not once:
        step._prompts.clear()
        forget([row["images"][0] for row in rows])
    texts = []
    for prompt in prompts:
        if not once:
            step._texts.clear()
        texts.append(apply_chat_template({"prompt": prompt}, step)["prompt"])
    step(images=[row["images"] for row in rows], text=texts, padding=True, return_tensors="pt")


def engine_side(processor: Any, rows: list[dict[str, Any]], cache: ImageCache, once: bool) -> None:
    """vLLM's parser and its identity of each prompt's image; then the cache, where vLLM's processor looks first."""
    from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
    from vllm.multimodal.processing.inputs import ProcessorInputs

    from adora_vl.rollout.llm import with_known_images

    for row in rows[::GROUP]:
        prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": row["images"]}}
        prompt = with_known_images(prompt) if once else prompt
        items = MultiModalDataParser().parse_mm_data(prompt["multi_modal_data"])
        ProcessorInputs([1], items, parse_mm_uuids(prompt.get("multi_modal_uuids"))).get_mm_hashes("model", "blake3")
        image = items["image"].get(0)
        counts["images copied by vLLM"] += not isinstance(image, KeptImage)
        cache.preprocess(processor.image_processor)([image], do_rescale=False, do_normalize=False)


def fill(cache: ImageCache, processor: Any, rows: list[dict[str, Any]]) -> None:
    """Process the rows' images into the cache, as the trainer does."""
    image_processor = processor.image_processor
    for row in rows:
        cache.get(image_processor, row["images"][0], effective_settings(image_processor, {}))


class PartTimes:
    """Seconds and counts of each part, before and now."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[bool, list[float]]] = {}
        self.counts: dict[str, dict[bool, Counter[str]]] = {}

    @contextmanager
    def part(self, name: str, once: bool) -> Iterator[None]:
        counts.clear()
        start = time.process_time()
        yield
        spent = time.process_time() - start
        self.seconds.setdefault(name, {False: [], True: []})[once].append(spent)
        self.counts.setdefault(name, {})[once] = Counter(counts)

    def print(self) -> None:
        for name, seconds in self.seconds.items():
            before, now = (statistics.median(seconds[once]) for once in (False, True))
            print(f"{name:<48}{before:8.4f} s -> {now:8.4f} s   ratio {now / before:.2f}")
            before_counts, now_counts = self.counts[name][False], self.counts[name][True]
            for what in before_counts | now_counts:
                print(f"    {what:<44}{before_counts[what]:8}   -> {now_counts[what]:8}")


def one_way(processor: Any, stored: StoredDiagrams, turns: PartTimes, once: bool) -> None:
    cache, source = ImageCache(2**30), DistinctRows(stored)
    if once:  # the thread, while the policy learns from the generation before
        fill(cache, processor, [source.read_ahead(index) for index in range(PROBLEMS)])
    with turns.part("the images, where the generation begins", once):
        rows = source.__getitems__([index for index in range(PROBLEMS) for _ in range(GROUP)])
        fill(cache, processor, rows[::GROUP])
    images = [row["images"][0] for row in rows]
    forget(images)  # each part is counted by itself
    with turns.part("the trainer's side", once):
        trainer_side(processor, rows, cache, once)
    if not once:
        forget(images)
    with turns.part("the engine's side", once):
        engine_side(processor, rows, cache, once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=560, help="pixels of an image's side")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    from vllm.multimodal.hasher import MultiModalHasher

    processor: Any = load_processor(str(PRETRAINED))
    limit_pixels(processor, 784, options.side**2)
    count(processing_utils, "render_jinja_template", "prompts rendered", lambda conversations, **_: len(conversations))
    count(type(processor.tokenizer), "__call__", "prompts tokenized", lambda _, text, **__: len(text))
    for module in (rows_module, image_cache):
        count(module, "content_digest", "images hashed by us", lambda _: 1)
    count(MultiModalHasher, "hash_kwargs", "images hashed by vLLM", lambda *_, **__: 1)
    stored, turns = StoredDiagrams(options.side), PartTimes()
    for turn in range(options.turns + 1):
        if turn == 1:  # the first is not counted
            turns = PartTimes()
        for once in (False, True):
            one_way(processor, stored, turns, once)
    turns.print()


if __name__ == "__main__":
    main()
