"""What a model may call, and that nothing which it writes, or a tool does, is more than one line to
it.
"""

import json
import random
import time

import numpy as np
import pytest
import torch
from PIL import Image

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.prompts import with_tools
from adora_vl.tools.ours import OURS, View
from adora_vl.tools.run import Toolbox, choose_tools
from adora_vl.utils.errors import UserError

SMALL = View(56 * 56, 56 * 56, 28)
THOUSANDTHS = View(256**2, 4096**2, 32, relative=True)


def picture():
    """A black corner of 56 x 56 pixels at the lower right."""
    image = Image.new("RGB", (448, 448), "white")
    image.paste("black", (392, 392, 448, 448))
    return image


def box(*tools, view=SMALL, **options):
    return Toolbox(choose_tools(tools or [*OURS]), ToolOptions(**options), view)


def written(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(toolbox, text, images=None):
    """What comes back, as one text and its pictures."""
    answer = toolbox.answer(text, [picture()] if images is None else images, seed="0", last=False)
    pictures = [part for part in answer.parts if not isinstance(part, str)]
    text = "".join(part if isinstance(part, str) else "<image>" for part in answer.parts)
    return text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"), pictures


def test_a_region_is_cut_from_the_picture_as_it_is_by_the_coordinates_of_the_family():
    for view, call in (
        (SMALL, written("zoom", x1=49, y1=49, x2=56, y2=56)),
        (THOUSANDTHS, written("zoom", x1=875, y1=875, x2=1000, y2=1000)),
    ):
        text, [cut] = said(box(view=view), call)
        assert (text, cut.size, cut.getextrema()) == ("Picture 1: <image>", (56, 56), ((0, 0),) * 3)
    assert "thousandths" in json.dumps(box(view=THOUSANDTHS).schemas)
    text, [cut] = said(box(), written("zoom", x1=0, y1=0, x2=1, y2=2))
    assert min(cut.size) == 28  # no picture is smaller than an image token
    text, [first, second] = said(
        box(max_pixels=448 * 448),
        written("line", x1=0, y1=0, x2=50, y2=50) + written("mark", x=9, y=9, label="A", picture=1),
    )
    assert "Picture 1: <image>" in text and "Picture 2: <image>" in text
    assert first.getpixel((200, 200)) == (220, 20, 20) == second.getpixel((200, 200))


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("calculate", {"expression": "2*sqrt(3)+1"}, "4.464101615"),
        ("calculate", {"expression": "sin(30) + 2**10"}, "1024.5"),
        ("calculate", {"expression": "7/4"}, "1.75"),
        ("calculate", {"expression": "1/0"}, "Error: the expression has no value here (undefined)"),
        (
            "calculate",
            {"expression": "__import__('os')"},
            "Error: the expression has no value here",
        ),
        ("measure", {"x1": 0, "y1": 0, "x2": 3, "y2": 4}, "5.0 pixels of the picture"),
        (
            "measure",
            {"x1": 9, "y1": 0, "x2": 0, "y2": 0, "x3": 0, "y3": 7},
            "90.0 degrees in the picture",
        ),
        ("zoom", {"x1": 5, "y1": 0, "x2": 5, "y2": 9}, "Error: the region is empty"),
        (
            "zoom",
            {"x1": 0, "y1": 0, "x2": 99, "y2": 9},
            "Error: (99, 9) is not in the picture, which ends at (56, 56)",
        ),
        ("zoom", {"x1": "0", "y1": 0, "x2": 9, "y2": 9}, "Error: x1 is no number"),
        ("zoom", {"x1": 0, "y1": 0, "x2": 9}, "Error: the argument 'y2' is missing"),
        (
            "zoom",
            {"x1": 0, "y1": 0, "x2": 9, "y2": 9, "picture": 3},
            "Error: picture: 3 is not there (0 to 0)",
        ),
        ("look", {}, "Error: no tool 'look'; there are zoom, mark"),
    ],
)
def test_what_our_tools_say(name, arguments, answer):
    assert said(box(), written(name, **arguments))[0].startswith(answer)


def test_ten_thousand_broken_calls_are_one_line_each():
    draw = random.Random(0)
    toolbox = box()
    whole = [
        written("zoom", x1=0, y1=0, x2=7, y2=7),
        written("calculate", expression="1+1"),
        '<tool_call>{"name": "zoom", "name": "mark", "arguments": {"x1": NaN, "y1": '
        "1e999}}</tool_call>",
        f'<tool_call>{{"name": "calculate", "arguments": {"[" * 90}}}</tool_call>',
        f"<tool_call>{'[' * 3000}",
        '<tool_call>{"name": "mark", "arguments": {"x": 1, "y": 1, "label": '
        '"\\ud800"}}</tool_call>',
    ]
    letters = '{}[]",:0123456789.eE-+\\u\x00\n ABCzé😀<>/'
    slowest = 0.0
    for _ in range(10_000):
        text = draw.choice(whole)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len("<tool_call>"), len(text) + 1)
            change = draw.choice(
                [draw.choice(letters), "", draw.choice(letters) * draw.randrange(1, 300)]
            )
            text = text[:at] + change + text[at + draw.randrange(0, 4) :]
        began = time.process_time()
        answer = toolbox.answer(text, [picture()] if "zoom" in text else [], seed="0", last=False)
        slowest = max(slowest, time.process_time() - began)
        for call in answer.calls:
            assert (
                call.failed == call.text.startswith("Error: ")
                and "\n" not in call.text
                and len(call.text) <= 400
            )
            assert len(call.text) <= 200 or not call.failed
            call.text.encode()
    print(f"the slowest took {1000 * slowest:.0f} ms")
    assert toolbox.answer("no call", [], seed="0", last=False) is None


HOSTILE = '''
import os, random, sys, time
from PIL import Image

def misbehave(how: str, images: list):
    """Do what it should not.

    Args:
        how: What.
    """
    if how == "hang":
        try:
            time.sleep(60)
        except BaseException:
            raise
    if how == "exit":
        sys.exit(3)
    if how == "fork" and not os.fork():
        return "the child"
    if how == "fork":
        os.wait()
        return "the parent"
    if how == "print":
        print("to the screen")
    if how == "edit":
        images[0].paste("red", (0, 0, 9, 9)); images.clear()
        return "edited"
    if how == "raise":
        open("/no/such/place")
    if how == "draw":
        return random.random()
    return {"large": Image.new("L", (10_000, 10_000)), "long": "x" * 10**7, "flat": Image.new("L", (300, 1)),
        "object": object(), "none": None, "parts": ["see", {"type": "image", "image": Image.new("L", (200, 100))}],
        "many": [Image.new("L", (30, 30))] * 9}.get(how, "done")
'''


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ("hang", "Error: the tool took longer than 1 s"),
        ("exit", "Error: the tool called sys.exit"),
        ("fork", "the parent"),
        ("print", "done"),
        ("edit", "edited"),
        ("raise", "Error: FileNotFoundError: [Errno 2] No such file or directory: 'place'"),
        ("large", "Error: the tool's picture has 10000 x 10000 pixels, too many"),
        ("long", "Error: the tool's text has 10000000 characters, at most 2000"),
        ("flat", "Error: the tool's picture has 300 x 1 pixels"),
        ("object", "Error: the tool returned a object, no text and no picture"),
        ("none", "null"),
        ("parts", "see\nPicture 1: <image>"),
        ("many", "Error: no further pictures, there are 1 of 8"),
    ],
)
def test_whatever_a_tool_does_is_an_answer(tmp_path, monkeypatch, how, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(HOSTILE)
    images = [picture()]
    toolbox = box("own.py:misbehave", seconds=1)
    assert "images" not in json.dumps(toolbox.schemas)
    text, pictures = said(toolbox, written("misbehave", how=how), images)
    assert text.startswith(answer) and text.count("\n") == answer.count("\n")
    assert len(images) == 1 and images[0].getpixel((0, 0)) == (255, 255, 255)
    assert all(one.width * one.height <= SMALL.high for one in pictures)
    assert "own.py" in toolbox.chosen.hashes


def test_a_tool_draws_the_same_in_every_run_and_the_run_goes_on_as_if_it_had_not(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(HOSTILE)
    toolbox = box("own.py:misbehave")
    call = written("misbehave", how="draw")
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    first = [toolbox.answer(call * 2, [], seed=seed, last=False) for seed in ("a", "a", "b")]
    texts = [[one.text for one in answer.calls] for answer in first]
    assert texts[0] == texts[1] and len({*texts[0], *texts[2]}) == 4
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_calls_that_are_too_many_and_the_last_turn_are_said():
    toolbox = box(calls_per_turn=2)
    call = written("calculate", expression="1+1")
    answer = toolbox.answer(call * 9, [], seed="0", last=True)
    assert [one.text for one in answer.calls] == [
        "2",
        "2",
        "Error: too many calls in a turn, at most 2",
    ]
    assert answer.parts[-1] == "\nNo calls are left."


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "def f(x):\n    '''Text.\n\n    Args:\n        x: A.\n    '''",
            "needs type hints and a docstring",
        ),
        ("def f(x: int):\n    pass", "needs type hints and a docstring"),
        (
            "async def f(x: int):\n    '''T.\n\n    Args:\n        x: A.\n    '''",
            "is async; write a plain function",
        ),
        (
            "def f(*x: int):\n    '''T.\n\n    Args:\n        x: A.\n    '''",
            "has to name each of its parameters",
        ),
        ("def g():\n    '''T.'''", "no function 'f' there; it has g"),
    ],
)
def test_a_tool_that_no_model_can_be_told_of_is_refused(tmp_path, monkeypatch, source, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(UserError, match=f"^tools: 'own.py:f'.*{why}"):
        choose_tools(["own.py:f"])
    with pytest.raises(UserError, match="'zom' is none of zoom, .*did you mean 'zoom'"):
        choose_tools(["zom"])


def test_the_system_prompt_has_the_schemas_in_the_words_of_qwen():
    told = with_tools("Think.", box("calculate").schemas)
    assert told.startswith(
        "Think.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    )
    line = told.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(line) == box("calculate").schemas[0]
    assert told.endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert with_tools("Think.", []) == "Think." and with_tools(None, []) is None
