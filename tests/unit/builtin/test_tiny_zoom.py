"""The start that has to look again was taught the very tokens that a run has."""

import random
from typing import Any

import pytest

from adora_vl.builtin.small_model import build_start
from adora_vl.builtin.tiny_zoom import SEEN, ZoomStart, _Teacher, begin_zoom, call_for
from adora_vl.config.blocks import ToolOptions
from adora_vl.models.load import load_processor
from adora_vl.rollout.rollouts import FinishReason, Rollout, Segment
from adora_vl.rollout.turns import ToolLoop
from adora_vl.synthetic.corners import CORNERS, drawn
from adora_vl.synthetic.generate import generate
from adora_vl.tools.ours import View
from adora_vl.tools.run import Toolbox, choose_tools


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoom") / "model"
    plan = ZoomStart(steps=1, teacher_steps=1, batch_size=2)
    facts = build_start(folder, plan, begin_zoom)
    return facts, load_processor(str(folder))


def test_what_follows_a_call_is_what_the_start_was_taught(built):
    facts, processor = built
    assert facts["parameters"] < 1_000_000
    toolbox = Toolbox(choose_tools(["zoom"]), ToolOptions(), View(SEEN**2, SEEN**2, 28))
    teacher = _Teacher(processor, toolbox, ZoomStart(calls=1))
    parts, images = teacher.turns()
    ids = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    decode = lambda tokens: processor.tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    turns = ToolLoop(toolbox, processor, {}, lambda image: 1, 2, decode)
    before = Rollout(
        segments=(Segment(tokens=tuple(ids[1]), logps=(0.0,) * len(ids[1]), step=0),),
        finish_reason=FinishReason.STOP,
    )
    after = turns(
        before,
        images[:1],
        prompt_length=len(ids[0]),
        max_length=400,
        step=0,
        seed="0",
    )
    assert list(after.segments[1].tokens) == ids[2]
    assert after.pictures[0].image.tobytes() == images[1].tobytes()
    assert not after.calls[0].failed


def test_a_call_shows_the_corner_that_is_asked_for():
    toolbox = Toolbox(choose_tools(["zoom"]), ToolOptions(), View(SEEN**2, SEEN**2, 28))
    image = drawn(random.Random(0), 448)[0]
    for corner in CORNERS:
        view: Any = toolbox.answer(call_for(corner), [image], seed="0", last=False).parts[2]
        x = 0 if "left" in corner else 392
        y = 0 if "top" in corner else 392
        assert view.tobytes() == image.crop((x, y, x + SEEN, y + SEEN)).tobytes()
    rows = list(generate(8, size=448, families=("corners",)))
    assert {row["meta"]["kind"] for row in rows} <= {*CORNERS}
    assert all(10 <= int(row["answer"]) < 100 for row in rows)
    assert all(row["meta"]["kind"] in row["problem"] for row in rows)
