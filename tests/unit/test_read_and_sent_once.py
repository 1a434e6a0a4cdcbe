"""What a training run reads from its dataset and sends to the other ranks, in a real run of the command."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from accelerate.utils import gather_object
from datasets import Image
from PIL import Image as Pillow

from adora_vl.rollout.distinct_rows import kept
from adora_vl.rollout_log import texts
from tests.tiny_run import train

pytestmark = pytest.mark.slow

PROBLEMS, STEPS = 8, 2  # of a generation, which is learned from in 8 micro-batches


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """Two optimizer steps of eight micro-batches each: the images that were decoded, and what was gathered."""
    seen: dict[str, Any] = {"decoded": 0, "gathered": []}
    decode, gather = Image.decode_example, gather_object

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        seen["decoded"] += 1
        return decode(self, *arguments, **keywords)

    def watched(values: Any) -> Any:
        seen["gathered"].append(pickle.dumps(values))
        return gather(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "decode_example", counted)
        patch.setattr(texts, "gather_object", watched)
        train(
            tmp_path_factory.mktemp("runs") / "run", max_steps=STEPS, save_strategy="no", log_completions="true",
            per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=8, max_completion_length=8,
        )  # fmt: skip
    return seen


def test_a_problem_is_decoded_once_however_many_micro_batches_learn_from_it(run):
    """The loader is a batch ahead, so at the end it may have read the first problems of a third generation."""
    assert STEPS * PROBLEMS <= run["decoded"] <= (STEPS + 1) * PROBLEMS


def test_ranks_send_one_another_texts_and_no_pixels(run):
    assert len(run["gathered"]) >= STEPS * 2, "prompts and completions of each generation"
    assert not any(b"PIL" in sent or b"KeptImage" in sent for sent in run["gathered"])
    assert b"PIL" in pickle.dumps([[{"role": "user", "content": [{"image": Pillow.new("RGB", (8, 8))}]}]])


def test_what_is_no_conversation_is_gathered_as_it_is():
    image = kept(Pillow.new("RGB", (8, 8)))
    prompt: list[Any] = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "x"}]}
    ]
    alone = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    assert texts.gather_texts([prompt]) == [alone] and prompt[0]["content"][0]["image"] is image
    plain: list[list[Any]] = [["a", "b"], [[image], None], [0.5, None], ["column"], [[]], []]
    for values in plain:
        assert texts.gather_texts(values) == values
