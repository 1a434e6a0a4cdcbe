"""Image tokens on the way to the engine and back."""

from __future__ import annotations

import pytest

from adora_vl.rollout.tokens import PromptMismatchError, check_prompts, collapse_image_runs, never_sampled_ids

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
