"""A model with images of a family that is not among the known ones, trained in stock TRL's way."""

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, LlavaModel

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.packing.prompts import read_prompts
from adora_vl.utils.errors import UserError
from tests.support.tiny_llava import save_tiny_llava, tiny_llava_processor

COLOURS = ("black", "red", "blue", "white")


def rows_of(*images_of_rows: list[Image.Image]) -> list[dict[str, Any]]:
    """Return a row with the same short question for each list of images."""
    prompt = [{"role": "user", "content": "Which colour?"}]
    return [{"prompt": prompt, "images": images} for images in images_of_rows]


def one_colour(colour: str) -> Image.Image:
    return Image.new("RGB", (40, 40), colour)


ROWS = rows_of(*([one_colour(colour)] for colour in COLOURS))


def build_llava_trainer(folder: Path, rows, processor=None):
    """Build a trainer of a tiny LLaVA, whose reward is random, without the step's own parts."""
    save_tiny_llava(folder / "model")
    args = AdoraGRPOConfig(
        str(folder / "run"),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        adora_stock_step=True,
        adora_freeze=[],
    )
    return AdoraGRPOTrainer(
        str(folder / "model"),
        lambda completions, **_: torch.rand(len(completions)).tolist(),
        args,
        Dataset.from_list(rows),
        processing_class=processor or tiny_llava_processor(),
    )


@pytest.mark.slow
def test_the_model_sees_the_image_of_its_row_where_it_samples_and_where_it_learns(
    tmp_path, monkeypatch
):
    """Each pass gets the pixels of its rows: an image for each, equal ones in a group of two.

    Without them the pass would raise nothing, since an image token has an embedding of its own.
    """
    brightness_by_pass: list[list[float]] = []
    stock_features = LlavaModel.get_image_features

    @wraps(stock_features)
    def features(model, pixel_values: Tensor, *args, **kwargs):
        brightness_by_pass.append(pixel_values.flatten(1).mean(dim=1).tolist())
        return stock_features(model, pixel_values, *args, **kwargs)

    trainer = build_llava_trainer(tmp_path, ROWS)
    monkeypatch.setattr(LlavaModel, "get_image_features", features)
    trainer.train()

    colours_of_groups = set()
    for sampled, learned in zip(brightness_by_pass[::2], brightness_by_pass[1::2], strict=True):
        assert len(sampled) == 4
        assert sampled[0] == sampled[1] != sampled[2] == sampled[3]
        assert sorted(learned) == sorted(sampled), "TRL shuffles the rows in between"
        colours_of_groups |= set(sampled)
    assert len(colours_of_groups) == len(COLOURS), "two steps of two problems saw each image"


def test_each_row_keeps_its_pixels_where_prompts_are_equal():
    """The processor sees a prompt once, and every row gets the pixels of its own image."""
    processor = tiny_llava_processor()
    rows = [ROWS[1], ROWS[0], ROWS[1]]
    prompts = read_prompts(rows, processor, {})
    alone = [read_prompts([row], processor, {}).fields["pixel_values"] for row in rows]
    assert torch.equal(prompts.fields["pixel_values"], torch.cat(alone))
    assert prompts.num_images == [1, 1, 1]


class ImageProcessorWithSizes(CLIPImageProcessor):
    """Returns the sizes of images too, as that of LLaVA-NeXT does."""

    def __call__(self, images, **kwargs):
        output = super().__call__(images, **kwargs)
        output["image_sizes"] = [[40, 40]] * len(output["pixel_values"])
        return output


def test_images_that_cannot_be_divided_by_rows_are_refused_before_the_weights_are_loaded(tmp_path):
    """Rows with two images, and processors that return tiles or more than pixels, are refused."""
    two_images = [one_colour("red"), one_colour("blue")]
    with pytest.raises(UserError, match=r"^images: a row has 2 images; .* one image each"):
        build_llava_trainer(tmp_path, rows_of(two_images, two_images))

    with_sizes = tiny_llava_processor()
    with_sizes.image_processor.__class__ = ImageProcessorWithSizes
    with pytest.raises(UserError, match="the processor returns image_sizes beside the pixels"):
        build_llava_trainer(tmp_path, ROWS, with_sizes)
