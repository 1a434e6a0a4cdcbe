"""The start that has to look again was taught the very tokens that a run has."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from adora_vl.builtin.small_model import train_and_save
from adora_vl.builtin.tiny_zoom import SEEN_SIZE, ZoomStart, _Teacher, prepare_zoom, zoom_call
from adora_vl.config.blocks import ToolOptions
from adora_vl.models.load import load_processor
from adora_vl.rollout.rollouts import FinishReason, Rollout, Segment
from adora_vl.rollout.turns import ToolLoop
from adora_vl.synthetic.corners import CORNER_NAMES, draw_numbered_corners
from adora_vl.synthetic.generate import generate
from adora_vl.tools.ours import View
from adora_vl.tools.run import Toolbox, choose_tools

PICTURE_SIZE = 448  # pixels of a picture's side


@pytest.fixture(scope="module")
def built_model(tmp_path_factory):
    """Build a model with one step in each stage of training; return its facts and its processor."""
    folder = tmp_path_factory.mktemp("zoom") / "model"
    plan = ZoomStart(steps=1, teacher_steps=1, batch_size=2)
    facts = train_and_save(folder, plan, prepare_zoom)
    return facts, load_processor(str(folder))


@pytest.fixture
def toolbox():
    """Return the toolbox of a run with zoom."""
    view = View(low=SEEN_SIZE**2, high=SEEN_SIZE**2, unit=28)
    return Toolbox(choose_tools(["zoom"]), ToolOptions(), view)


def tool_loop(toolbox: Toolbox, processor: Any) -> ToolLoop:
    """Return the loop of a run in which an image takes one token."""

    def decode(tokens: Sequence[int]) -> str:
        return str(processor.tokenizer.decode(tokens, skip_special_tokens=True))

    def tokens_of_image(image: object) -> int:
        return 1

    return ToolLoop(
        toolbox,
        processor,
        chat_template_kwargs={},
        count_image_tokens=tokens_of_image,
        max_answers=2,
        decode=decode,
    )


def test_what_follows_a_call_is_what_the_start_was_taught(built_model, toolbox):
    facts, processor = built_model
    assert facts["parameters"] < 1_000_000
    teacher = _Teacher(processor, toolbox, ZoomStart(calls=1))
    parts, images = teacher.conversation()
    ids = []
    for text, _ in parts:
        encoded = processor.tokenizer(text, add_special_tokens=False)
        ids.append(encoded["input_ids"])
    prompt_ids, call_ids, reply_ids, _ = ids
    picture, corner = images
    call = Segment(tokens=tuple(call_ids), logps=(0.0,) * len(call_ids), step=0)
    rollout = Rollout(segments=(call,), finish_reason=FinishReason.STOP)
    continued = tool_loop(toolbox, processor)(
        rollout,
        [picture],
        prompt_length=len(prompt_ids),
        max_length=400,
        step=0,
        seed="0",
    )
    assert list(continued.segments[1].tokens) == reply_ids
    assert continued.pictures[0].image.tobytes() == corner.tobytes()
    assert not continued.calls[0].failed


@pytest.mark.parametrize("corner", CORNER_NAMES)
def test_a_call_shows_the_corner_that_is_asked_for(corner, toolbox):
    picture, _ = draw_numbered_corners(random.Random(0), PICTURE_SIZE)
    reply = toolbox.answer(zoom_call(corner), [picture], seed="0", last=False)
    view: Any = reply.parts[2]
    left_edge = 0 if "left" in corner else PICTURE_SIZE - SEEN_SIZE
    top_edge = 0 if "top" in corner else PICTURE_SIZE - SEEN_SIZE
    expected = picture.crop((left_edge, top_edge, left_edge + SEEN_SIZE, top_edge + SEEN_SIZE))
    assert view.tobytes() == expected.tobytes()


def test_problems_ask_for_the_number_in_a_corner():
    rows = list(generate(8, size=PICTURE_SIZE, families=("corners",)))
    for row in rows:
        corner = row["meta"]["kind"]
        assert corner in CORNER_NAMES
        assert corner in row["problem"]
        assert 10 <= int(row["answer"]) < 100
