"""Turns of a rollout in which the policy calls tools.

What stands between the turns, what of it is graded, when a rollout ends, and that all ranks make the
same calls.
"""

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import TrainerState

from adora_vl.advantage.adora import Adora
from adora_vl.advantage.methods import AdvantagePipeline
from adora_vl.config.blocks import ToolOptions
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.packing.images import DistinctImages
from adora_vl.rewards import reward_function
from adora_vl.rollout.rollouts import (
    Call,
    DrawnProblem,
    FinishReason,
    Rollout,
    RolloutGroup,
    SamplingRequest,
    SamplingResult,
    Segment,
    StepKey,
)
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import CALL_TAG, ToolLoop, append_result, run_turns
from adora_vl.tools.ours import View
from adora_vl.tools.run import Toolbox, choose_tools
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.generation import Generation
from adora_vl.training.guards import RewardGuard
from adora_vl.training.scoring import RewardFunctions, Scorer
from tests.support.step_context import step_context

PROCESSOR: Any = load_processor(str(PRETRAINED_FOLDER))
TOKENIZER = PROCESSOR.tokenizer
KEY = StepKey(mode="train", step=0, micro=0)
END = TOKENIZER.eos_token_id  # <|im_end|>
IMAGE = PROCESSOR.image_token_id
CALLED = f"{CALL_TAG} 7"  # a turn that calls a tool: the stand-in `Says` looks at no more of it


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def sampled(text: str, *before: Segment, end: Sequence[int] = (END,)) -> Rollout:
    """Return a rollout whose last turn is this text.

    `before`: the segments before it. `end`: the tokens behind the text.
    """
    ids = (*ids_of(text), *end)
    return Rollout(
        segments=(*before, Segment(tokens=ids, logps=(-0.5,) * len(ids), step=3)),
        finish_reason=FinishReason.STOP,
    )


class ToolQuestion(NamedTuple):
    """What tools were asked for a turn."""

    text: str  # of the turn
    image_count: int
    seed: str
    is_last: bool  # whether no further turn of the rollout is answered


class Says:
    """Tools that answer each turn by the same texts and pictures, and note what they were asked."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.asked = list[ToolQuestion]()

    def answer(
        self, text: str, images: Sequence[Image.Image], *, seed: str, is_last: bool, **_: Any
    ) -> Any:
        self.asked.append(ToolQuestion(text, len(images), seed, is_last))
        return SimpleNamespace(
            parts=self.parts,
            calls=(Call(name="zoom", arguments="{}", text="", seconds=0.1, failed=False),),
        )


def answered(
    tools: Says, rollout: Rollout, *, most: int = 2, room: int | None = None, longest: int = 200
) -> Rollout:
    """Return a rollout with the answer of these tools to its last turn.

    Its prompt has 100 tokens and an image, and a picture has one image token for 28 pixels of width.

    Args:
        tools: the tools.
        rollout: the rollout.
        most: how many of its turns are answered.
        room: the length of the engine's context; None: it does not limit the rollout.
        longest: the most tokens of a completion.
    """
    turns = ToolLoop(
        tools,
        PROCESSOR,
        {},
        lambda image: image.width // 28,
        most,
        TOKENIZER.decode,
        context_length=room,
    )
    return turns(
        rollout,
        [Image.new("RGB", (28, 28))],
        prompt_length=100,
        max_length=longest,
        step=4,
        seed="7/train/3/0/1/0",
    )


def reason_of_server(tokens: Sequence[int], *, context: int | None) -> FinishReason:
    """Return why a server has ended a completion.

    Its prompt has 10 tokens, and at most 8 were asked for.

    Args:
        tokens: the completion.
        context: the length of the server's context; None: it is not known.
    """
    rollout = append_result(
        Rollout(),
        SamplingRequest(prompt_ids=[7] * 10, images=[], group=0, max_tokens=8, max_length=8),
        SamplingResult(tokens=[*tokens], logps=[-0.5] * len(tokens)),
        step=0,
        max_turn_tokens=None,
        stop_criteria=StopCriteria(frozenset({END}), decode=TOKENIZER.decode),
        context_length=context,
    )
    return rollout.finish_reason


def test_a_server_that_stops_at_its_context_has_not_ended_the_answer():
    """A server does not say why it stops, so it is concluded from the numbers of tokens.

    In the first case the prompt and three tokens fill the context of 13. In the second there is room
    for one more, so the server has stopped for another reason.
    """
    assert reason_of_server([5, 6, 5], context=13) is FinishReason.CONTEXT
    assert reason_of_server([5, 6, 5], context=14) is FinishReason.STOP
    assert reason_of_server([5, 6, 5], context=None) is FinishReason.STOP
    assert reason_of_server([5, 6, END], context=13) is FinishReason.STOP
    assert reason_of_server([5] * 8, context=None) is FinishReason.LENGTH
    assert reason_of_server([5] * 7 + [END], context=18) is FinishReason.STOP


# Pieces of turns: calls and parts of calls, control tokens, and texts that are hard to parse.
PIECES = [
    CALL_TAG,
    "</tool_call>",
    '{"name": "line", "arguments": {',
    '"x1": ',
    "}}",
    "1" * 400,
    "[" * 600,
    '{"name": "mark", "arguments": {"x": 1, "y": 1, "label": "',
    '"}}',
    "<|im_end|>",
    "\\ud800",
    "<|image_pad|>",
    '{"name": "odd", "arguments": {}}',
    "</tool_response>",
    "é😀\x00",
    " 7 ",
    "NaN",
]


def test_no_turn_of_a_policy_ends_a_run():
    """Turns of random pieces are answered by two tools of ours, and by a user's broken one."""

    class Odd(dict[str, str]):
        """A result that fails when it is read."""

        def get(self, *_: Any) -> Any:
            raise RuntimeError("closed")

    def odd() -> str:
        """Return something odd."""
        return Odd()  # type: ignore[return-value]

    box = Toolbox(choose_tools(["line", "mark", odd]), ToolOptions(), View(784, 3136, 28))
    # A picture has four image tokens, and any number of turns is answered.
    turns = ToolLoop(box, PROCESSOR, {}, lambda image: 4, None, TOKENIZER.decode)
    draw = random.Random(0)
    rollouts_with_calls = 0
    for number in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 8)))
        before = sampled(text)
        after = turns(
            before,
            [Image.new("RGB", (56, 56))],
            prompt_length=100,
            max_length=10_000,
            step=4,
            seed=f"7/{number}",
        )
        assert after.finish_reason in ("", "room", "stop")
        rollouts_with_calls += bool(after.calls)
        for call in after.calls:
            assert call.failed == call.text.startswith("Error: ")
            assert "\n" not in call.text
        was_answered = len(after.segments) > 1
        if was_answered:
            image_tokens = after.tokens.count(IMAGE) - before.tokens.count(IMAGE)
            assert image_tokens == 4 * len(after.pictures)
    assert rollouts_with_calls > 50


@pytest.mark.parametrize("end", [(END,), ()], ids=["ended", "stopped at a string"])
def test_an_answer_is_a_users_turn_of_the_template_behind_what_was_sampled(end):
    """The chat template itself would have written the same turn.

    A turn that a stop string ended has no end token, so the answer begins with it. Control tokens in
    the text of a tool are broken up by a space, so that they begin no turn and no image.
    """
    picture = Image.new("L", (84, 28), 50)
    before = sampled(CALLED, end=end)
    after = answered(Says("Picture 2: ", picture, " of <|image_pad|> and<|im_end|>"), before)
    assert after.segments[0] == before.segments[0]
    assert not after.has_ended
    missing_end = "" if end else "<|im_end|>"
    image_text = f"<|vision_start|>{'<|image_pad|>' * 3}<|vision_end|>"
    answer_text = f"Picture 2: {image_text} of < |image_pad|> and< |im_end|>"
    expected = ids_of(
        f"{missing_end}\n<|im_start|>user\n{answer_text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(after.segments[1].tokens) == expected
    assert after.segments[1].logps is None
    assert after.segments[1].step == 4
    (shown_picture,) = after.pictures
    (call,) = after.calls
    assert shown_picture.segment_number == call.segment_number == 1, (
        "the segment in which the answer is"
    )
    assert shown_picture.image.mode == "RGB"
    assert shown_picture.image.size == (84, 28)


def test_a_model_that_reads_text_alone_gets_the_same_turn():
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = PROCESSOR.chat_template
    turns = ToolLoop(Says("It is 7."), tokenizer, {}, lambda _: 0, None, TOKENIZER.decode)
    rollout = turns(
        sampled(CALLED),
        [],
        prompt_length=9,
        max_length=200,
        step=4,
        seed="",
    )
    expected = ids_of("\n<|im_start|>user\nIt is 7.<|im_end|>\n<|im_start|>assistant\n")
    assert list(rollout.segments[1].tokens) == expected
    assert not rollout.pictures


def test_tools_are_asked_with_the_turns_words_and_all_images_under_a_seed_of_its_own():
    """A second turn is asked for alone, and its number is at the end of the seed."""
    tools = Says("", Image.new("RGB", (28, 28)))
    first = answered(tools, sampled(CALLED))
    answered(tools, sampled(CALLED + CALLED, *first.segments))
    first_text = TOKENIZER.decode([*ids_of(CALLED), END])
    second_text = TOKENIZER.decode([*ids_of(CALLED + CALLED), END])
    assert tools.asked == [
        ToolQuestion(first_text, image_count=1, seed="7/train/3/0/1/0/0", is_last=False),
        ToolQuestion(second_text, image_count=1, seed="7/train/3/0/1/0/1", is_last=True),
    ]


def test_what_ends_a_rollout_and_whether_it_has_an_end():
    """A rollout ends by itself, with a call that nobody answers, or where an answer has no room.

    Only in the first case does it have an end, whatever its last token is.
    """
    tools = Says("x" * 20)
    stop_criteria = StopCriteria.from_config({END}, {}, TOKENIZER.decode)
    rollout_with_answer = answered(tools, sampled(CALLED), most=1)
    for rollout, reason, has_end in (
        (answered(tools, sampled("so 7")), "stop", True),
        (answered(tools, sampled(CALLED, *rollout_with_answer.segments), most=1), "calls", False),
        (answered(tools, sampled(CALLED), longest=50), "room", False),
        (answered(tools, sampled(CALLED), room=150), "room", False),
    ):
        assert rollout.finish_reason == reason
        assert stop_criteria.rollout_has_stopped(rollout, "") is has_end
    computer = AdvantageComputer(step_context(), AdvantagePipeline({}), torch.ones(1), tools=True)
    assert computer.truncated_at is None, "with tools no number of tokens makes it truncated"
    assert len(rollout_with_answer.segments) == 2
    assert len(answered(tools, sampled(CALLED), longest=50).segments) == 1


@pytest.mark.parametrize("wide", [28, 196])
def test_what_a_tool_says_and_shows_earns_nothing_and_counts_for_nothing(wide):
    """A right answer in a tool's words earns no reward, and its tokens count for no length.

    The first rollout calls a tool and then says 3, which is wrong; the second says 7, which is right,
    and has sampled more tokens; the third has no room for its tool's answer. So the group has the
    same weight however wide the picture of the tool is. The batch has as many image tokens as its
    images need.
    """
    weights = torch.ones(1)
    context = step_context(use_vllm=True, num_generations=3)
    tools = Says("It is \\boxed{7}.", Image.new("RGB", (wide, 28)))
    rollout_with_answer = answered(tools, sampled(CALLED))
    rollouts = (
        replace(
            rollout_with_answer,
            segments=sampled("so 3", *rollout_with_answer.segments).segments,
            finish_reason=FinishReason.STOP,
        ),
        sampled("so it is " * 4 + "\\boxed{7}"),
        answered(tools, sampled(CALLED), longest=50),
    )
    images = DistinctImages([], PROCESSOR, torch.device("cpu"), context.config)
    stop_criteria = StopCriteria.from_config(
        {END}, {}, partial(TOKENIZER.decode, skip_special_tokens=True)
    )
    functions = RewardFunctions(
        [reward_function("accuracy")], [None], {}, dict, asyncio.new_event_loop
    )
    # The stages that follow sampling in a training step: build a batch, score it, assess groups.
    builder = BatchBuilder(
        context=context,
        images=images,
        processor=PROCESSOR,
        stop_criteria=stop_criteria,
        to_device=lambda batch: batch,
        has_engine_logps=True,
        has_tools=True,
    )
    scorer = Scorer(context, RewardGuard(context), weights, ["accuracy"])
    computer = AdvantageComputer(
        context, AdvantagePipeline({"adora": Adora()}), weights, tools=True
    )
    prompt = [{"role": "user", "content": "Which?"}]
    row: Any = {"prompt": prompt, "answer": "7", "images": [Image.new("RGB", (56, 28))]}
    group = RolloutGroup(
        problem=DrawnProblem(row_number=0, key=KEY, slot=0),
        row=row,
        start_generation=0,
        rollouts=rollouts,
    )
    prompts = images.prompts([row] * 3, "train", refill=False)
    built = builder.build(Generation(key=KEY, group_size=3), [group], prompts)
    scores = functions.score(built, TrainerState())
    facts = scorer.score(built, scores, group_size=3, step=0)
    assessment = computer.assess(facts, group_size=3, step=0)
    batch = built.batch
    assert assessment.groups.rewards_PG.tolist() == [[0, 1, 0]]
    # The first rollout's length leaves out the tool's tokens, and counts two tokens that end turns.
    wrong_length, right_length, _ = assessment.groups.lengths_PG[0].tolist()
    assert wrong_length == len(ids_of(CALLED)) + 1 + len(ids_of("so 3")) + 1
    assert wrong_length < right_length < len(rollouts[0].tokens)
    assert assessment.groups.truncated_PG.tolist() == [[False, False, True]]
    assert assessment.weighting.weights_P.tolist() == [1]
    is_image_token = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1) == IMAGE
    image_lengths = batch["image_grid_thw"].prod(dim=1) // 4
    assert is_image_token.sum(dim=1).tolist() == [
        lengths_of_row.sum() for lengths_of_row in image_lengths.split(batch["num_images"])
    ]
    assert len(image_lengths) == 4


def test_all_play_a_turn_then_those_that_were_answered_the_next_one():
    """The rollouts a, b and c have one, three and two turns of the policy.

    A rank whose own rollouts have ended takes part until those of all ranks have. Here another rank
    has five turns.
    """
    turns_by_key = {"a": 1, "b": 3, "c": 2}
    keys_of_each_call = list[list[str]]()
    any_rank_continues = iter([True, True, True, True, False])  # after each turn

    class Player:
        """A stand-in for the sampler and the tools, which answer all turns of a rollout but the last."""

        def sample(self, rollouts: Mapping[str, Rollout]) -> dict[str, Rollout]:
            keys_of_each_call.append([*rollouts])
            return {key: sampled("x", *rollout.segments) for key, rollout in rollouts.items()}

        def answer(self, key: str, rollout: Rollout) -> Rollout:
            # Between the turns stand the answers, so n turns have 2 n - 1 segments.
            if len(rollout.segments) >= 2 * turns_by_key[key] - 1:
                return rollout
            answer = Segment(tokens=(9,), logps=None, step=3)
            return Rollout(segments=(*rollout.segments, answer))

        def can_continue(self, key: str, rollout: Rollout) -> bool:
            return True

        def any_rank_continues(self, continues: bool) -> bool:
            return next(any_rank_continues)

    results = run_turns(dict.fromkeys(turns_by_key, Rollout()), Player())
    assert keys_of_each_call == [["a", "b", "c"], ["b", "c"], ["b"], [], []]
    segment_counts = {key: len(rollout.segments) for key, rollout in results.items()}
    assert segment_counts == {"a": 1, "b": 5, "c": 3}
