"""The slice of Qwen2.5-VL-7B: its folder is the published model but for the number of layers. Built here without its
widths, by the same code.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from adora_vl.memory.model import config_for_planning, describe
from adora_vl.rewards.grade import grade
from adora_vl.rollout.tokens import never_sampled_ids
from benchmarks.slice import by_quarters
from benchmarks.slice_model import PUBLISHED, build_model, draw_rows, slice_config, write_data
from data_prep.storage import load_split

NARROW = {
    "hidden_size": 28, "intermediate_size": 8, "num_attention_heads": 14, "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 0]},
    "vision_config": {"hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 28},
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("slice"), draw_rows(4)
    write_data(folder / "data", rows)
    build_model(folder / "model", slice_config(1, 2, **NARROW), rows)
    return folder


def test_all_but_the_number_of_layers_is_published():
    whole = describe(config_for_planning(f"Qwen/{PUBLISHED}")[0])
    part = describe(slice_config(2, 9), dtype="bfloat16")
    for name in ("width", "heads", "kv_heads", "head_size", "mlp_width"):
        for tower in ("text", "vision"):
            assert getattr(getattr(part, tower), name) == getattr(getattr(whole, tower), name)
    assert (part.text.layers, part.vision.layers, part.vocabulary, part.tied) == (2, 9, 152_064, False)
    assert slice_config(1, 9).vision_config.fullatt_block_indexes == [7, 8], "a window everywhere but as published"
    assert slice_config(1, 4).get_text_config().rope_parameters["mrope_section"] == [16, 24, 24]


def test_the_tokenizer_has_the_special_tokens_where_the_config_says(built):
    processor = AutoProcessor.from_pretrained(built / "model")
    config = AutoModelForImageTextToText.from_pretrained(built / "model").config
    ids = processor.tokenizer.convert_tokens_to_ids
    assert ids("<|image_pad|>") == processor.image_token_id == config.image_token_id == 151655
    assert ids("<|im_end|>") == config.get_text_config().eos_token_id == processor.tokenizer.eos_token_id == 151645
    assert never_sampled_ids(processor.tokenizer) == [151655, 151656, 151652, 151653, 151654]


def test_chance_solves_some_of_the_problems_and_any_token_can_be_decoded(built):
    tokenizer, data = AutoProcessor.from_pretrained(built / "model").tokenizer, load_split(built / "data", "train")
    draw = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 152_064, (len(data) * 8, 512), generator=draw)
    verdicts = [
        grade(tokenizer.decode(ids, skip_special_tokens=True), data[number % len(data)]["answer"]).verdict
        for number, ids in enumerate(answers.tolist())
    ]
    assert {"correct", "wrong"} <= set(verdicts)


def test_the_images_are_as_large_as_those_that_people_train_on(built):
    processor, data = AutoProcessor.from_pretrained(built / "model"), load_split(built / "data", "train")
    grids = processor.image_processor(images=[row["images"][0] for row in data], return_tensors="pt")["image_grid_thw"]
    assert (grids.prod(dim=-1) // 4).tolist() == [324, 961, 324, 961]


def test_the_same_seed_gives_the_same_bfloat16_weights(built, tmp_path):
    build_model(tmp_path / "model", slice_config(1, 2, **NARROW), draw_rows(4))
    one, two = (AutoModelForImageTextToText.from_pretrained(f / "model", dtype="auto") for f in (built, tmp_path))
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert first.dtype == torch.bfloat16, name
        assert torch.equal(first, second), name


def test_differences_are_told_by_quarters_of_the_answers():
    places = [[0.0], [0.0], [1.0, 3.0], [], [4.0], [4.0], [], []]
    assert by_quarters(places) == [(0, 1, 0.0, 0.0), (2, 3, 2.0, 3.0), (4, 5, 4.0, 4.0)]
