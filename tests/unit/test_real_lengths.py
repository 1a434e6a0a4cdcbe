"""The benchmark at real lengths: what it feeds both trainers, and the least that a step can take."""

from __future__ import annotations

import statistics

import pytest
from transformers import Qwen2_5_VLConfig

from benchmarks.lower_bound import products
from benchmarks.real_lengths import answer_lengths, mrope, policy_seconds, whole_model


def test_answers_have_the_median_and_some_are_at_the_limit():
    lengths = answer_lengths(400, 1024, 8, equal=False)
    assert lengths == sorted(lengths) and lengths[-1] == 1024 and len(lengths) == 8
    assert statistics.median(lengths) == pytest.approx(400, rel=0.02)
    assert answer_lengths(400, 1024, 8, equal=True) == [400] * 8


@pytest.mark.parametrize("head", [16, 32, 64, 128])
def test_the_sections_of_mrope_are_half_a_head(head):
    assert sum(mrope(head)) == head // 2 and (head != 128 or mrope(head) == [16, 24, 24])


def test_the_matrix_products_of_a_step_by_hand():
    """One layer of width 8 with 2 heads and 1 for keys, a prompt of 3 with answers of 1 and 2 tokens."""
    config = Qwen2_5_VLConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=10, vision_config={"hidden_size": 4, "intermediate_size": 6, "depth": 1, "num_heads": 1},
    )  # fmt: skip
    found = products(config, [3], [[1, 2]], patches=5)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # queries, keys and values, output, MLP
    assert found["layers"] == 6 * weights * (3 + 0 + 1), "an answer's last token predicts nothing"
    assert found["head"] == 6 * 8 * 10 * 3
    assert found["attention"] == 12 * 8 * (4.5 + 3.5 + 8)
    assert found["vision"] == 6 * (4 * 16 + 3 * 24) * 5


def test_the_head_is_counted_once_however_many_layers_there_are():
    seconds = {"old pass": 1.0, "old pass, head": 2.0, "backward": 3.0, "backward, head": 4.0, "data": 9.0}
    assert policy_seconds(seconds) == 10 and policy_seconds(seconds, head=True) == 6
    assert whole_model(seconds, layers=2) == 4 * 18 + 6
