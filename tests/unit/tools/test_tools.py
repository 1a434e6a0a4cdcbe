"""What a model may call.

Whatever the model writes into a call, or a tool does, the model gets an answer of one line at most.
"""

import io
import json
import random
import re
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageDraw

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.prompts import with_tools
from adora_vl.tools.ours import BUILT_IN_TOOLS, View
from adora_vl.tools.run import CALLS_PER_TURN, Toolbox, choose_tools
from adora_vl.tools.tries import nondeterminism_warnings
from adora_vl.utils.call_guards import OverdueError
from adora_vl.utils.errors import UserError

# what the model sees of a picture: its fewest and most pixels, and the side of an image token
VIEW_OF_56_PIXELS = View(low=56 * 56, high=56 * 56, unit=28)
VIEW_IN_THOUSANDTHS = View(low=256**2, high=4096**2, unit=32, relative=True)
LONGEST_TEXT = 2000  # characters of an answer, `max_text` by default
TOOLS_PAGE = Path(__file__).parents[3] / "docs" / "tools.md"


def picture_with_black_corner():
    """Return a white picture with a black corner of 56 x 56 pixels at the lower right."""
    image = Image.new("RGB", (448, 448), "white")
    image.paste("black", (392, 392, 448, 448))
    return image


def build_toolbox(*tools, view=VIEW_OF_56_PIXELS, **options):
    """Return a toolbox of these tools, or of all built-in ones, with options of the run."""
    return Toolbox(choose_tools(tools or [*BUILT_IN_TOOLS]), ToolOptions(**options), view)


def tool_call(name, **arguments):
    """Return a call of a tool as a model of the family Qwen writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def response_to(toolbox, text, images=None):
    """Return what calls in a text bring back: a text with <image> for each picture, and those."""
    answer = toolbox.answer(
        text, [picture_with_black_corner()] if images is None else images, seed="0", last=False
    )
    pictures = [part for part in answer.parts if not isinstance(part, str)]
    text = "".join(part if isinstance(part, str) else "<image>" for part in answer.parts)
    return text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"), pictures


def test_a_region_is_cut_from_the_picture_as_it_is_by_the_coordinates_of_the_family():
    """The black corner is cut out whole, by pixels and by thousandths of the picture."""
    for view, call in (  # the last eighth of both sides, in either kind of coordinates
        (VIEW_OF_56_PIXELS, tool_call("zoom", x1=49, y1=49, x2=56, y2=56)),
        (VIEW_IN_THOUSANDTHS, tool_call("zoom", x1=875, y1=875, x2=1000, y2=1000)),
    ):
        text, [region] = response_to(build_toolbox(view=view), call)
        assert text == "Picture 1: <image>"
        assert region.size == (56, 56)
        assert region.getextrema() == ((0, 0),) * 3
    assert "thousandths" in json.dumps(build_toolbox(view=VIEW_IN_THOUSANDTHS).schemas)

    text, [region] = response_to(build_toolbox(), tool_call("zoom", x1=0, y1=0, x2=1, y2=2))
    assert min(region.size) == 28  # no picture is smaller than an image token

    # The second of two calls in a turn draws on the picture that the first one has returned.
    text, [first, second] = response_to(
        build_toolbox(max_pixels=448 * 448),
        tool_call("line", x1=0, y1=0, x2=50, y2=50)
        + tool_call("mark", x=9, y=9, label="A", picture=1),
    )
    assert "Picture 1: <image>" in text
    assert "Picture 2: <image>" in text
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
        (
            "measure",
            {"x1": 9, "y1": 0, "x2": 0, "y2": 0, "y3": 7},
            "Error: a third point has both x3 and y3",
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
def test_our_tools_answer_with_the_value_or_say_what_is_wrong(name, arguments, answer):
    """Each call of a built-in tool has the value, or an error of one line."""
    assert response_to(build_toolbox(), tool_call(name, **arguments))[0].startswith(answer)


def test_ten_thousand_broken_calls_are_one_line_each():
    """Randomly changed calls give a value or a short error, and never raise one."""
    rng = random.Random(0)
    toolbox = build_toolbox()
    complete_calls = [
        tool_call("zoom", x1=0, y1=0, x2=7, y2=7),
        tool_call("calculate", expression="1+1"),
        '<tool_call>{"name": "zoom", "name": "mark", "arguments": {"x1": NaN, "y1": '
        "1e999}}</tool_call>",
        f'<tool_call>{{"name": "calculate", "arguments": {"[" * 90}}}</tool_call>',
        f"<tool_call>{'[' * 3000}",
        '<tool_call>{"name": "mark", "arguments": {"x": 1, "y": 1, "label": '
        '"\\ud800"}}</tool_call>',
    ]

    # Each text is a call in which up to five random places were changed.
    letters = '{}[]",:0123456789.eE-+\\u\x00\n ABCzé😀<>/'
    for _ in range(10_000):
        text = rng.choice(complete_calls)
        for _ in range(rng.randrange(1, 6)):
            position = rng.randrange(len("<tool_call>"), len(text) + 1)
            change = rng.choice(
                [rng.choice(letters), "", rng.choice(letters) * rng.randrange(1, 300)]
            )
            text = text[:position] + change + text[position + rng.randrange(0, 4) :]
        answer = toolbox.answer(
            text, [picture_with_black_corner()] if "zoom" in text else [], seed="0", last=False
        )
        for call in answer.calls:
            assert call.failed == call.text.startswith("Error: ")
            assert "\n" not in call.text
            assert len(call.text) <= 400
            assert len(call.text) <= 200 or not call.failed
            call.text.encode()
    assert toolbox.answer("no call", [], seed="0", last=False) is None


HOSTILE_TOOLS_FILE = '''
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
    ("misbehaviour", "answer"),
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
def test_whatever_a_tool_does_is_an_answer(tmp_path, monkeypatch, misbehaviour, answer):
    """A tool that hangs, exits, forks or edits its picture is answered; the picture stays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(HOSTILE_TOOLS_FILE)
    images = [picture_with_black_corner()]
    toolbox = build_toolbox("own.py:misbehave", seconds=1)
    assert "images" not in json.dumps(toolbox.schemas)
    text, pictures = response_to(toolbox, tool_call("misbehave", how=misbehaviour), images)
    assert text.startswith(answer)
    assert text.count("\n") == answer.count("\n")
    assert len(images) == 1
    assert images[0].getpixel((0, 0)) == (255, 255, 255)
    assert all(
        shown_picture.width * shown_picture.height <= VIEW_OF_56_PIXELS.high
        for shown_picture in pictures
    )
    assert "own.py" in toolbox.tool_set.hashes


class ValueThatRaises:
    """A value that raises an error wherever it is read."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def __getattribute__(self, name):
        if name == "__class__":
            return ValueThatRaises
        raise object.__getattribute__(self, "error")


class SpeechlessError(Exception):
    """An error that raises another one when it is made a text."""

    def __str__(self):
        raise ValueError("no words")


class ToolPanic(BaseException):
    """An error as compiled code raises it."""


class EndlessList(list):
    """A list whose iteration never ends."""

    def __iter__(self):
        while True:
            yield ""


class BrokenMapping(dict):
    """A dictionary that cannot be asked."""

    def get(self, *_):
        raise RuntimeError("closed")


class UnreadablePicture(Image.Image):
    """A picture whose file cannot be read any more."""

    def load(self):
        raise OSError("the file is gone")


def cyclic_list():
    """Return a list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


def odd_values():
    """Yield values of many types that a tool may return, and some that raise when they are read."""
    yield from (None, True, 3, 1.5, float("nan"), 10**5000, 1j, b"x", object(), type, print, ...)
    yield from (
        "",
        "text",
        "\ud800",
        "x" * 10**6,
        [],
        (),
        {},
        set(),
        cyclic_list(),
        [[["deep"]]],
        [None],
    )
    yield from (np.zeros(3), np.float32(1), np.array("x"), torch.zeros(2), torch.tensor(1.0))
    yield from (
        ValueThatRaises(RuntimeError("closed")),
        ValueThatRaises(ToolPanic()),
        ValueThatRaises(SpeechlessError()),
    )
    yield from (
        ValueThatRaises(StopIteration()),
        ValueThatRaises(RecursionError()),
        ValueThatRaises(MemoryError()),
    )
    yield from (
        BrokenMapping(),
        EndlessList(),
        {"type": np.array(["text", "image"])},
        {"type": "image"},
    )
    yield from ({"type": "image", "image": "no picture"}, {"type": ["text"]}, {1: object()})
    yield from (Image.new("RGB", (0, 5)), UnreadablePicture(), Image.new("L", (300, 1)))
    yield from (Image.new(mode, (56, 56)) for mode in ("RGBA", "LA", "P", "CMYK", "F", "1", "LAB"))
    yield (word for word in "generator")
    yield [Image.new("L", (56, 56)), "and", ValueThatRaises(RuntimeError("closed"))]


def test_whatever_a_tool_returns_is_an_answer():
    """Each of the odd values becomes a text of at most 2,000 characters, or pictures in RGB."""
    next_values = iter(())

    def return_next_value():
        """BrokenMapping."""
        return next(next_values)

    return_next_value.__annotations__["return"] = str
    toolbox = build_toolbox(return_next_value)
    for value in odd_values():
        next_values = iter([value])
        text, pictures = response_to(toolbox, tool_call("return_next_value"))
        assert text.count("\n") == 0 or not text.startswith("Error: ")
        text.encode()
        assert len(text) <= LONGEST_TEXT
        for picture in pictures:
            assert picture.mode == "RGB"
            assert min(picture.size) >= VIEW_OF_56_PIXELS.unit


def test_whatever_a_tool_raises_is_an_answer():
    """Errors of every base class, also those that end a program, are one line to the model."""
    errors = [ToolPanic("p"), SpeechlessError(), StopIteration(3), SystemExit(1), OverdueError()]
    next_errors = iter(errors)

    def raise_next_error() -> str:
        """Raise."""
        raise next(next_errors)

    toolbox = build_toolbox(raise_next_error)
    for _ in errors:
        text, _ = response_to(toolbox, tool_call("raise_next_error"))
        assert text.startswith("Error: ")
        assert "\n" not in text


def random_value(rng, depth=0):
    """Return a random value that JSON can hold, also one that no tool is made for.

    `depth`: how many lists and dictionaries are around it; below four there may be more.
    """
    type_number = rng.randrange(10 if depth < 4 else 8)
    if type_number == 8:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if type_number == 9:
        return {rng.choice("abxy"): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [
        None,
        rng.random() < 0.5,
        rng.randrange(-5, 70),
        rng.uniform(-1e3, 1e3),
        rng.choice([1e308, -1e308, 5e-324, -0.0]),
        10 ** rng.randrange(1, 400) * rng.choice([1, -1]),
        rng.choice(["", "0", "a" * 3000, "\ud800", "<|im_end|>", "\x00", "-" * 400, "picture"]),
        rng.choice([0, 1, 56, 57]),
    ][type_number]


def test_whatever_a_model_writes_into_a_call_is_an_answer():
    """Tools of ours and one that takes anything get arguments of any type, number and depth."""

    def anything(a, b) -> str:
        """Take anything.

        Args:
            a: Anything.
            b: Anything.
        """
        return f"{a:>5}{b.x}"

    anything.__annotations__ |= {"a": Any, "b": list[dict[str, float]]}
    rng = random.Random(1)
    toolbox = build_toolbox(*BUILT_IN_TOOLS, anything)
    names = [*BUILT_IN_TOOLS, "anything"]
    for _ in range(3000):
        name = rng.choice(names)
        parameters = toolbox._schema_by_name[name]["function"]["parameters"]["properties"]
        argument_names = [*parameters, "more"] if rng.random() < 0.1 else [*parameters]
        arguments = {key: random_value(rng) for key in argument_names if rng.random() < 0.9}
        text = json.dumps({"name": name, "arguments": arguments})
        if rng.random() < 0.2:
            text = text.replace("[", "[" * rng.choice([9, 600, 990]), 1)
        answer = toolbox.answer(
            f"<tool_call>{text}</tool_call>", [picture_with_black_corner()], seed="0", last=False
        )
        [call] = answer.calls
        assert call.failed == call.text.startswith("Error: ")
        assert call.name.encode() is not None
        assert len(call.text) <= LONGEST_TEXT
        assert "\n" not in call.text

    long_number = "1" * 400
    for inside in (
        f'"x1": {long_number}',
        f'"x1": 1, "picture": {long_number}',
        f'"x1": {"[" * 600}{"]" * 600}',
    ):
        text = f'{{"name": "zoom", "arguments": {{{inside}, "y1": 0, "x2": 5, "y2": 5}}}}'
        assert response_to(toolbox, f"<tool_call>{text}")[0].startswith("Error: ")


@pytest.mark.parametrize("how_stored", ["transparent", "16 bits", "floats", "on its side"])
def test_a_picture_of_a_tool_is_shown_as_a_person_sees_it(how_stored):
    """Transparency is white, any range of grey is 0 to 255, and a turned photo is upright."""
    diagonal_line = Image.new("RGBA", (84, 56), (0, 0, 0, 0))
    ImageDraw.Draw(diagonal_line).line((0, 0, 83, 55), fill=(0, 0, 0, 255), width=3)
    grey_ramp = np.linspace(0, 1, 84 * 56).reshape(56, 84)
    stream = io.BytesIO()
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6  # to be turned by 90 degrees
    diagonal_line.convert("RGB").save(stream, "JPEG", exif=tags)
    pictures = {
        "transparent": diagonal_line,
        "16 bits": Image.fromarray((grey_ramp * 65535).astype(np.uint16)),
        "floats": Image.fromarray(grey_ramp.astype(np.float32)),
        "on its side": Image.open(stream),
    }

    def show() -> Image.Image:
        """Show."""
        return pictures[how_stored]

    _, [picture] = response_to(build_toolbox(show, max_pixels=84 * 84), tool_call("show"))
    assert picture.size == ((56, 84) if how_stored == "on its side" else (84, 56))
    values = np.asarray(picture.convert("L")).astype(int)
    if how_stored == "transparent":
        assert values.max() == 255
        assert values.min() == 0
        assert (values == 255).mean() > 0.8, "all but the line"
    elif how_stored != "on its side":
        assert abs(values - grey_ramp * 255).max() <= 1
    pictures[how_stored].load()
    assert picture is not pictures[how_stored]


def test_what_a_tool_draws_on_is_its_own_and_what_it_returned_is_the_answers():
    """Neither the row's picture nor an answer that was given changes when a tool draws."""
    images = [picture_with_black_corner()]
    bytes_before = images[0].tobytes()
    pictures_seen_by_tool = []

    def draw(images: list) -> Image.Image:
        """Draw."""
        images[0].load()[0, 0] = (1, 2, 3)
        pictures_seen_by_tool.append(images[0])
        return images[0]

    toolbox = build_toolbox(draw, max_pixels=448 * 448)
    _, [answer_picture] = response_to(toolbox, tool_call("draw"), images)
    assert images[0].tobytes() == bytes_before
    assert answer_picture.getpixel((0, 0)) == (1, 2, 3)
    pictures_seen_by_tool[0].putpixel((0, 0), (9, 9, 9))
    assert answer_picture.getpixel((0, 0)) == (1, 2, 3)


def test_no_text_of_a_tool_may_have_a_token_of_the_models_own():
    """A docstring with such a token is refused; "<end>" is one because the toolbox is told so."""

    def look() -> str:
        """Look at <|image_pad|>."""

    def look_elsewhere() -> str:
        """Look at <end>."""

    with pytest.raises(UserError, match=r"^tools: 'look' has the model's own token <.image_pad"):
        build_toolbox(look)
    with pytest.raises(UserError, match="^tools: 'look_elsewhere' has the model's own token <end>"):
        Toolbox(
            choose_tools([look_elsewhere]),
            options=ToolOptions(),
            view=VIEW_OF_56_PIXELS,
            control_tokens=("<end>",),
        )


def test_a_tool_that_answers_the_same_call_in_two_ways_is_named():
    """Seeded generators are seeded for the call; the machine's own randomness and clock are not."""

    def draws_from_the_machine(sides: int) -> float:
        """Throw.

        Args:
            sides: Of the die.
        """
        return np.random.default_rng().random()

    def draws_from_the_clock(way: str) -> Image.Image:
        """Show.

        Args:
            way: In which way.
        """
        return Image.effect_noise((56, 56), time.perf_counter_ns() % 97 + 1)

    def draws_from_seeded_generators(sides: int) -> float:
        """Throw.

        Args:
            sides: Of the die.
        """
        return random.random() + float(np.random.random()) + float(torch.rand(()))

    def always_raises(value: float) -> str:
        """Refuse.

        Args:
            value: A number.
        """
        raise ValueError("never")

    def reads_the_picture(images: list) -> str:
        """Look."""
        return str(images[0].size)

    lines = nondeterminism_warnings(
        build_toolbox(
            draws_from_the_machine,
            draws_from_the_clock,
            draws_from_seeded_generators,
            always_raises,
            reads_the_picture,
            "zoom",
        ),
        [picture_with_black_corner()],
    )
    assert [line.split("'")[1] for line in lines] == [
        "draws_from_the_machine",
        "draws_from_the_clock",
    ]
    assert all("answers the same call in two ways" in line for line in lines)


def test_a_tool_draws_the_same_in_every_run_and_the_run_goes_on_as_if_it_had_not(
    tmp_path, monkeypatch
):
    """A tool's random numbers depend on seed and call; the run's generators stay as they were."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(HOSTILE_TOOLS_FILE)
    toolbox = build_toolbox("own.py:misbehave")
    call = tool_call("misbehave", how="draw")
    states_before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    answers = [toolbox.answer(call * 2, [], seed=seed, last=False) for seed in ("a", "a", "b")]
    texts = [[call_of_answer.text for call_of_answer in answer.calls] for answer in answers]
    assert texts[0] == texts[1]
    assert len({*texts[0], *texts[2]}) == 4, "two calls for each of two seeds"
    assert states_before == (
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
    )


def test_calls_that_are_too_many_and_the_last_turn_are_said():
    """Calls over the limit of a turn are refused, and the last turn says that it is the last."""
    toolbox = build_toolbox()
    call = tool_call("calculate", expression="1+1")
    answer = toolbox.answer(call * 9, [], seed="0", last=True)
    refusal = f"Error: too many calls in a turn, at most {CALLS_PER_TURN}"
    assert [call.text for call in answer.calls] == [*["2"] * CALLS_PER_TURN, refusal]
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
    """A tool needs type hints, a docstring and named parameters, and may not be async."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(UserError, match=f"^tools: 'own.py:f'.*{why}"):
        choose_tools(["own.py:f"])
    with pytest.raises(UserError, match="'zom' is none of zoom, .*did you mean 'zoom'"):
        choose_tools(["zom"])


def test_the_system_prompt_has_the_schemas_in_the_words_of_qwen():
    """The tools stand below the user's prompt; without tools the prompt stays as it is."""
    system_prompt = with_tools("Think.", build_toolbox("calculate").schemas)
    assert system_prompt.startswith(
        "Think.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    )
    line = system_prompt.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(line) == build_toolbox("calculate").schemas[0]
    assert system_prompt.endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert with_tools("Think.", []) == "Think."
    assert with_tools(None, []) is None


def test_the_documented_lines_show_what_a_tool_of_ones_own_answers(tmp_path, monkeypatch, capsys):
    """The page's tool is described to the model, and a call of it returns the picture it draws."""
    blocks = re.findall(r"```python\n(.*?)```", TOOLS_PAGE.read_text(), re.DOTALL)
    (tool_file,) = [block for block in blocks if block.startswith("# my_tools.py")]
    (try_it,) = [block for block in blocks if "box.answer(" in block]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(tool_file)
    (tmp_path / "try_it.py").write_text(try_it)
    runpy.run_path("try_it.py")
    schemas, answer = capsys.readouterr().out.splitlines()
    assert "'name': 'grid'" in schemas
    assert "PIL.Image.Image" in answer
    assert "Error" not in answer
