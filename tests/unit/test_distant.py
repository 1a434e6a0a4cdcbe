"""Prompts moved far back: the same prompts, after text of their own, as far as model and engine allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.doctor.distant import POSITION, ROWS, far_prompts, head
from adora_vl.doctor.probe import Prompts
from adora_vl.models.load import load_processor
from adora_vl.models.tiny.build import PRETRAINED

TOKENIZER = load_processor(str(PRETRAINED)).tokenizer
IMAGE = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
WORDS = [token for token in range(len(TOKENIZER)) if token not in TOKENIZER.all_special_ids]


def trainer(model: int = 10**6, engine: int = 10**6) -> Any:
    config = SimpleNamespace(max_position_embeddings=model)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=engine)))
    return SimpleNamespace(
        _tokenizer=TOKENIZER, args=SimpleNamespace(seed=0), vllm_generation=SimpleNamespace(llm=llm),
        model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)),
    )  # fmt: skip


def prompts(shapes: list[tuple[list[int], list[int]]]) -> Prompts:
    """Of each row its words, and for each of its images the number of image tokens, four patches a token."""
    ids = [[token for size in sizes for token in [IMAGE] * size] + words for words, sizes in shapes]
    width, grids = max(map(len, ids)), [[1, 2, 2 * size] for _, sizes in shapes for size in sizes]
    kinds = torch.tensor([[0] * (width - len(row)) + [int(token == IMAGE) for token in row] for row in ids])
    patches = sum(2 * 2 * size for _, sizes in shapes for size in sizes)
    fields = {
        "image_grid_thw": torch.tensor(grids),
        "pixel_values": torch.arange(patches)[:, None].float(),
        "mm_token_type_ids": kinds,
    }
    names = [str(number) for number in range(len(ids))]
    return Prompts(names, ids, [[None] * len(sizes) for _, sizes in shapes], fields, [len(s) for _, s in shapes])


ROW = st.tuples(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=30), st.lists(st.integers(1, 9), min_size=1, max_size=3)
)


@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(ROW, min_size=1, max_size=5), tokens=st.integers(1, 40), longest=st.integers(130, 4000))
def test_the_same_prompts_with_their_images_stand_after_words_of_their_own(shapes, tokens, longest):
    near = prompts(shapes)
    far = far_prompts(trainer(engine=longest), near, tokens)
    assert far is not None and far.num_images is not None
    rows = len(shapes[:ROWS])
    assert max(map(len, far.ids)) == min(POSITION, longest - tokens)
    assert len({len(there) - len(here) for there, here in zip(far.ids, near.ids, strict=False)}) == 1
    for (words, _), there, here in zip(shapes, far.ids, near.ids, strict=False):
        assert there[-len(here) :] == here
        assert set(there[: -len(here)]) <= set(words)
    for ids, kinds in zip(far.ids, far.fields["mm_token_type_ids"], strict=True):
        padded = [0] * (len(kinds) - len(ids)) + [int(token == IMAGE) for token in ids]
        assert kinds.tolist() == padded
    sizes = [size for _, row in shapes[:rows] for size in row]
    assert far.fields["image_grid_thw"].prod(dim=-1).tolist() == [4 * size for size in sizes]
    assert torch.equal(far.fields["pixel_values"], near.fields["pixel_values"][: 4 * sum(sizes)])
    assert far.num_images == near.num_images[:rows] and len(far.names) == rows


@pytest.mark.parametrize("limits", [{"model": 40}, {"engine": 40}])
def test_where_model_or_engine_have_no_room_there_are_none(limits):
    assert far_prompts(trainer(**limits), prompts([(WORDS[:30], [4])]), 8) is None
    assert far_prompts(trainer(**limits), prompts([(WORDS[:20], [4])]), 8) is not None


def test_prompts_without_images_keep_none():
    plain = Prompts(["a", "b", "c"], [[20, 21], [22], [23]], None, {}, None)
    far = far_prompts(trainer(engine=100), plain, 10)
    assert far is not None and far.images is None and far.fields == {}
    assert [len(row) for row in far.ids] == [90, 89]
    assert head(plain, 1).ids == [[20, 21]]
