"""Images read, decoded and processed once give what the processor gives, to the bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import processing_utils
from trl.data_utils import apply_chat_template, prepare_multimodal_messages

from adora_vl import compat
from adora_vl.dedup.image_bank import ImageBank
from adora_vl.dedup.processor import FlatProcessor, StepProcessor
from adora_vl.models.load import load_processor
from adora_vl.models.tiny.architecture import TINY_FAMILIES
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.models.tiny.processor import processor_around
from adora_vl.prompts import conversation, conversation_with_images
from adora_vl.rollout import distinct_rows as rows_module
from adora_vl.rollout.distinct_rows import DistinctRows, kept
from adora_vl.rollout.image_cache import ImageCache
from adora_vl.rollout.requests import Request, asking_once, plan_requests


def picture(seed: int, size: tuple[int, int] = (70, 45), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture(scope="module")
def processor():
    return load_processor(str(PRETRAINED))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"min_pixels": 28 * 28, "max_pixels": 84 * 84},
        {"do_rescale": False, "do_normalize": False},  # what vLLM asks for
        {"do_normalize": False},
    ],
)
def test_the_cached_output_is_the_processors(processor, arguments):
    images = [picture(1), picture(2, (120, 90)), picture(3, mode="L"), picture(1)]
    ours = ImageCache(2**20)
    expected = processor.image_processor(images=images, return_tensors="pt", **arguments)
    for _ in range(2):
        cached = ours.preprocess(processor.image_processor)
        with compat.IMAGE_PROCESSING.replaced_by(cached, on=processor.image_processor):
            actual = processor.image_processor(images=images, return_tensors="pt", **arguments)
        assert torch.equal(actual["image_grid_thw"], expected["image_grid_thw"])
        assert actual["pixel_values"].dtype == expected["pixel_values"].dtype
        assert torch.equal(actual["pixel_values"], expected["pixel_values"])
    assert ours.processed == 3, "one of the four was there twice, and the second round asked for nothing new"
    assert "preprocess" not in vars(processor.image_processor)


def test_other_limits_are_another_entry_and_the_oldest_images_go_first(processor):
    cache = ImageCache(40_000)
    cached = cache.preprocess(processor.image_processor)
    for seed in range(6):
        cached([picture(seed)])
        assert cache.bytes_held <= 40_000 or seed == 0
    assert cache.processed == 6
    cached([picture(5)])
    assert cache.processed == 6
    cached([picture(0)])
    cached([picture(5)], min_pixels=56 * 56, max_pixels=56 * 56)
    assert cache.processed == 8


def test_a_step_processes_a_prompt_and_an_image_once_and_refers_to_them(processor):
    shared, other = picture(1), picture(2)
    prompts = [conversation_with_images(text, 1) for text in ("a", "a", "b b", "a")]
    images = [[shared], [shared], [shared], [other]]
    for prompt, (image,) in zip(prompts, images, strict=True):
        prompt[-1]["content"][0]["image"] = image
    texts = [processor.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    cache, bank = ImageCache(2**20), ImageBank(100)
    step = StepProcessor(processor, cache, bank, torch.device("cpu"))

    keywords = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    assert (
        step.apply_chat_template(conversation=prompts, **keywords)["input_ids"]
        == processor.apply_chat_template(conversation=prompts, **keywords)["input_ids"]
    )
    ours = step(images=images, text=texts, padding=True, return_tensors="pt")
    stock = processor(images=images, text=texts, padding=True, return_tensors="pt")
    assert cache.processed == len(bank) == 2
    patches, _ = bank.pixels(bank.starts)
    assert torch.equal(patches[ours["pixel_values"][:, 0] - 100], stock["pixel_values"])
    for name in ("image_grid_thw", "mm_token_type_ids", "input_ids", "attention_mask"):
        assert torch.equal(ours[name], stock[name]), name
    assert step.image_processor is processor.image_processor


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_rows_with_any_number_of_images_are_as_each_row_alone(processor, family):
    """TRL gives None for a row without images, and Transformers raises on it."""
    processor = processor_around(processor.tokenizer, family)
    images = [None, [picture(1)], [picture(2), picture(1), picture(3, (120, 90))], None]
    prompts = [conversation_with_images("a", len(row or [])) for row in images]
    texts = [processor.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    bank = ImageBank(0)
    step = StepProcessor(processor, ImageCache(2**20), bank, torch.device("cpu"))
    plain = FlatProcessor(processor)(images=images, text=texts, padding=True, return_tensors="pt")
    ours = step(images=images, text=texts, padding=True, return_tensors="pt")
    patches, _ = bank.pixels(bank.starts)
    assert torch.equal(patches[ours["pixel_values"][:, 0]], plain["pixel_values"]) and len(bank) == 3
    for name in ("image_grid_thw", "mm_token_type_ids", "input_ids", "attention_mask"):
        assert torch.equal(ours[name], plain[name]), name
    for row, text, ids, mask in zip(images, texts, ours["input_ids"], ours["attention_mask"], strict=True):
        alone = processor(images=row, text=[text], return_tensors="pt")["input_ids"][0]
        assert torch.equal(ids[mask.bool()], alone)


def test_a_generation_renders_tokenizes_and_hashes_each_prompt_once(processor, monkeypatch):
    """As TRL asks: tokens for the engine, each row's text, the policy's tensors; then the engine's turn."""
    counts = dict.fromkeys(["rendered", "tokenized", "hashed"], 0)

    def counted(owner: Any, name: str, what: str, number: Any) -> None:
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[what] += number(*args, **kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    problems, rollouts = 2, 3
    shown = [kept(picture(seed)) for seed in range(problems)]
    prompts = [prepare_multimodal_messages(conversation("find x"), [image]) for image in shown]
    prompts = [prompt for prompt in prompts for _ in range(rollouts)]
    images = [[image] for image in shown for _ in range(rollouts)]
    texts = [apply_chat_template({"prompt": prompt}, processor)["prompt"] for prompt in prompts]
    stock = processor(images=images, text=texts, padding=True, return_tensors="pt")
    counted(processing_utils, "render_jinja_template", "rendered", lambda conversations, **_: len(conversations))
    counted(type(processor.tokenizer), "__call__", "tokenized", lambda _, text, **__: len(text))
    counted(rows_module, "content_digest", "hashed", lambda _: 1)

    cache, bank = ImageCache(2**20), ImageBank(0)
    step = StepProcessor(processor, cache, bank, torch.device("cpu"))
    tokens = step.apply_chat_template(
        conversation=copy.deepcopy(prompts), tools=None, chat_template=None, add_generation_prompt=True, tokenize=True,
        return_dict=True,
    )  # fmt: skip
    assert [apply_chat_template({"prompt": prompt}, step)["prompt"] for prompt in prompts] == texts
    output = step(images=images, text=texts, padding=True, return_tensors="pt")
    for image in shown:
        cache.preprocess(processor.image_processor)([image])
    assert counts == dict.fromkeys(counts, problems) and cache.processed == problems
    assert tokens["input_ids"] == stock["input_ids"].tolist()
    for name in ("image_grid_thw", "mm_token_type_ids", "input_ids", "attention_mask"):
        assert torch.equal(output[name], stock[name]), name


def test_a_template_with_other_arguments_is_rendered_anew(processor):
    step = StepProcessor(processor, ImageCache(2**20), ImageBank(0), torch.device("cpu"))
    messages = conversation_with_images("a", 0)
    with_turn, without = (step.apply_chat_template(messages, add_generation_prompt=add) for add in (True, False))
    assert with_turn != without and with_turn.startswith(without)
    assert step.apply_chat_template(messages, chat_template="{{ messages | length }}") == str(len(messages))


def test_the_rows_of_a_batch_are_decoded_once_and_their_images_are_never_copied():
    reads: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            reads.append(index)
            return {"id": index, "images": [picture(index)]}

    dataset = DistinctRows(Rows())
    rows = dataset.__getitems__([2, 2, 0, 2])
    assert reads == [2, 0] and [row["id"] for row in rows] == [2, 2, 0, 2]
    assert rows[0]["images"][0] is rows[3]["images"][0]
    again = dataset.__getitems__([2, 2, 0, 2])
    assert reads == [2, 0] and again[0]["images"][0] is rows[0]["images"][0], "the next micro-batch asks for the same"
    assert dataset.__getitems__([1, 2])[1]["id"] == 2 and reads == [2, 0, 1]
    assert dataset.__getitems__([0])[0]["id"] == 0 and reads == [2, 0, 1, 0], "no more than one batch is held"
    rows[0]["note"] = "own"
    assert "note" not in rows[1], "what is written into one row is not in its copies"
    copied = copy.deepcopy(rows)
    assert copied[0]["images"][0] is rows[0]["images"][0]
    assert rows[0]["images"][0].tobytes() == picture(2).tobytes()
    assert isinstance(rows[0]["images"][0].resize((4, 4)), Image.Image)


@dataclass
class Parameters:
    n: int = 1
    seed: int | None = None

    def clone(self) -> Parameters:
        return copy.copy(self)


@dataclass
class Rollout:
    index: int
    text: str


@dataclass
class Output:
    outputs: list[Rollout] = field(default_factory=list)


def test_a_group_is_one_request_with_seeds_that_count_up():
    image, other = picture(1), picture(1)
    rows = [{"prompt_token_ids": [1, 2], "multi_modal_data": {"image": image}} for _ in range(4)]
    rows.append({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": other}})
    assert plan_requests(rows, [0, 0, 1, 1, 1], True) == [Request(0, 2), Request(2, 2), Request(4, 1)]
    assert len(plan_requests(rows, [0, 0, 1, 1, 1], False)) == 5

    def generate(prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Output]:
        # the rollouts of a request come in any order, and their seeds count up from its own
        return [Output([Rollout(i, f"seed {p.seed + i}") for i in reversed(range(p.n))]) for p in sampling_params]

    seeds = [10, 11, 50, 51, 52]
    for together in (True, False):
        asked = asking_once(generate, [0, 0, 1, 1, 1], seeds, together)
        outputs = asked(rows, sampling_params=Parameters(), use_tqdm=False)
        assert [[rollout.text for rollout in output.outputs] for output in outputs] == [[f"seed {s}"] for s in seeds]
