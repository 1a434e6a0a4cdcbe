"""Image tokens on the way to the engine and back."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from adora_vl.errors import RolloutError
from adora_vl.rollout.tokens import (
    PromptMismatchError,
    check_prompts,
    collapse_image_runs,
    mismatch_named,
    never_sample,
    never_sampled_ids,
)

IMAGE, START, END = 90, 91, 92


@pytest.mark.parametrize(
    ("ids", "collapsed"),
    [
        ([1, START, IMAGE, IMAGE, IMAGE, END, 2], [1, START, IMAGE, END, 2]),
        ([START, IMAGE, IMAGE, END, START, IMAGE, END], [START, IMAGE, END, START, IMAGE, END]),  # two images
        ([1, 1, 2, 2], [1, 1, 2, 2]),  # no image: other repetitions stay
        ([IMAGE, IMAGE], [IMAGE]),
        ([], []),
    ],
)
def test_each_run_of_image_tokens_becomes_one(ids, collapsed):
    assert collapse_image_runs(ids, IMAGE) == collapsed


def test_equal_prompts_pass():
    check_prompts([[1, 2], [3]], [(1, 2), (3,)], IMAGE)


def test_the_first_row_that_differs_is_named_with_the_token_counts():
    with pytest.raises(PromptMismatchError, match="trainer 1, engine 2.*min_pixels") as caught:
        check_prompts([[1], [1, IMAGE], [IMAGE]], [[1], [1, IMAGE, IMAGE], [2]], IMAGE)
    assert caught.value.row == 1


def test_a_text_difference_points_at_the_tokenizer():
    with pytest.raises(PromptMismatchError, match="tokenizer") as caught:
        check_prompts([[1, IMAGE, 2]], [[1, IMAGE, 3]], IMAGE)
    assert caught.value.row == 0


def test_a_missing_row_is_not_passed_over():
    with pytest.raises(ValueError, match="shorter"):
        check_prompts([[1], [2]], [[1]], IMAGE)


class _Tokenizer:
    def __init__(self, tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def test_vision_tokens_are_never_sampled():
    names = ["a", "<|image_pad|>", "<|vision_start|>", "b", "<|video_pad|>", "<|vision_end|>"]
    assert sorted(never_sampled_ids(_Tokenizer(names))) == [1, 2, 4, 5]
    assert never_sampled_ids(_Tokenizer(["a", "b"])) == []


@pytest.mark.parametrize(
    ("rows", "name"), [([{}, {"id": "train/7"}], "row train/7:"), ([{}, {}], "row #1 of this rank's batch:")]
)
def test_a_mismatch_names_the_row_by_its_id_or_its_number(rows, name):
    with pytest.raises(RolloutError, match=f"^{name} .*tokenizer"), mismatch_named(rows):
        check_prompts([[1], [2]], [[1], [3]], IMAGE)


def test_other_errors_keep_their_message():
    with pytest.raises(RolloutError, match="^the engine stopped$"), mismatch_named([{"id": "train/7"}]):
        raise RolloutError("the engine stopped")


def test_bans_are_added_to_those_of_the_user():
    settings: dict[str, Any] = {"suppress_tokens": [7, 3]}
    config = GenerationConfig()
    never_sample([3, 1], settings, config)
    assert settings["suppress_tokens"] == config.suppress_tokens == [1, 3, 7]


def test_without_vision_tokens_nothing_is_banned():
    settings: dict[str, Any] = {}
    config = GenerationConfig()
    never_sample([], settings, config)
    assert settings == {} and config.suppress_tokens is None
