"""Rollouts of several turns, in which the policy calls tools.

A turn is what the policy says until it ends or calls a tool. A rollout is a list of segments: turns
of the policy, and between them the answers of tools. The tests look at what stands between turns,
what is graded, when a rollout ends, and that all ranks make the same calls.
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
from datasets import Dataset
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
from adora_vl.training.advantages import AdvantageComputer, GroupAssessment
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.generation import Generation
from adora_vl.training.guards import RewardGuard
from adora_vl.training.scoring import RewardFunctions, Scorer
from adora_vl.types import Batch
from tests.support.step_context import step_context

PROCESSOR: Any = load_processor(str(PRETRAINED_FOLDER))
TOKENIZER = PROCESSOR.tokenizer
KEY = StepKey(mode="train", step=0, micro=0)
END = TOKENIZER.eos_token_id  # <|im_end|>
IMAGE = PROCESSOR.image_token_id
TURN_WITH_CALL = f"{CALL_TAG} 7"  # a turn that calls a tool: `FakeTools` look at no more of it


def token_ids(text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def rollout_with_turn(text: str, *before: Segment, end: Sequence[int] = (END,)) -> Rollout:
    """Return a rollout whose last turn is this text, with a log-probability of -0.5 for each token.

    `before`: the segments before it. `end`: the tokens behind the text.
    """
    ids = (*token_ids(text), *end)
    return Rollout(
        segments=(*before, Segment(tokens=ids, logps=(-0.5,) * len(ids), step=3)),
        finish_reason=FinishReason.STOP,
    )


class ToolRequest(NamedTuple):
    """What `FakeTools` got for a turn that called them."""

    text: str  # of the turn
    image_sizes: list[tuple[int, int]]  # width and height
    seed: str
    last: bool  # whether no further turn of the rollout is answered


class FakeTools:
    """Tools that answer each turn with the same texts and pictures, and record requests."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.requests = list[ToolRequest]()

    def answer(
        self, text: str, images: Sequence[Image.Image], *, seed: str, last: bool, **_: Any
    ) -> Any:
        """Record the request, and return the texts and pictures with a call of `zoom`."""
        image_sizes = [image.size for image in images]
        self.requests.append(ToolRequest(text, image_sizes, seed, last))
        return SimpleNamespace(
            parts=self.parts,
            calls=(Call(name="zoom", arguments="{}", text="", seconds=0.1, failed=False),),
        )


def answer_last_turn(
    tools: FakeTools,
    rollout: Rollout,
    *,
    max_turns: int = 2,
    context_length: int | None = None,
    max_length: int = 200,
) -> Rollout:
    """Return a rollout with the tools' answer to its last turn appended as a segment.

    Its prompt has 100 tokens and an image, and a picture has one image token for 28 pixels of
    width.

    Args:
        tools: the tools.
        rollout: the rollout.
        max_turns: how many of its turns are answered.
        context_length: the length of the engine's context; None: it does not limit the rollout.
        max_length: the most tokens of a completion.
    """
    answer_calls = ToolLoop(
        tools=tools,
        processor=PROCESSOR,
        chat_template_kwargs={},
        count_image_tokens=lambda image: image.width // 28,
        max_answers=max_turns,
        decode=TOKENIZER.decode,
        context_length=context_length,
    )
    return answer_calls(
        rollout,
        [Image.new("RGB", (28, 28))],
        prompt_length=100,
        max_length=max_length,
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
        SamplingRequest(prompt_ids=[7] * 10, images=[], merge_key=0, max_tokens=8, max_length=8),
        SamplingResult(tokens=[*tokens], logps=[-0.5] * len(tokens)),
        step=0,
        max_turn_tokens=None,
        stop_criteria=StopCriteria(frozenset({END}), decode=TOKENIZER.decode),
        context_length=context,
    )
    return rollout.finish_reason


def test_a_server_that_stops_at_its_context_has_not_ended_the_answer():
    """A completion without an end that fills a server's context counts as cut off there.

    A server does not say why it stops, so it is concluded from the numbers of tokens. In the first
    case the prompt of 10 and three tokens fill the context of 13. In the second there is room for
    one more, so the server has stopped for another reason.
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
    """Whatever a turn says, the tools' answers or errors are appended, and nothing raises.

    300 turns of random pieces are answered by two tools of ours, and by a user's broken one.
    """

    class Odd(dict[str, str]):
        """A result that fails when it is read."""

        def get(self, *_: Any) -> Any:
            raise RuntimeError("closed")

    def odd() -> str:
        """Return something odd."""
        return Odd()  # type: ignore[return-value]

    view = View(low=784, high=3136, unit=28)
    tokens_of_picture = 4
    answer_calls = ToolLoop(
        tools=Toolbox(choose_tools(["line", "mark", odd]), ToolOptions(), view),
        processor=PROCESSOR,
        chat_template_kwargs={},
        count_image_tokens=lambda image: tokens_of_picture,
        max_answers=None,
        decode=TOKENIZER.decode,
    )
    draw = random.Random(0)
    rollouts_with_calls = 0
    for number in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 8)))
        before = rollout_with_turn(text)
        after = answer_calls(
            before,
            [Image.new("RGB", (56, 56))],
            prompt_length=100,
            max_length=10_000,
            step=4,
            seed=f"7/{number}",
        )
        # It goes on with an answer (""), or has no room for one, or has called no tool.
        assert after.finish_reason in ("", "room", "stop")
        rollouts_with_calls += bool(after.calls)
        for call in after.calls:
            assert call.failed == call.text.startswith("Error: ")
            assert "\n" not in call.text
        was_answered = len(after.segments) > 1
        if was_answered:
            image_tokens = after.tokens.count(IMAGE) - before.tokens.count(IMAGE)
            assert image_tokens == tokens_of_picture * len(after.pictures)
    assert rollouts_with_calls > 50


@pytest.mark.parametrize("end", [(END,), ()], ids=["ended", "stopped at a string"])
def test_an_answer_is_a_users_turn_of_the_template_behind_what_was_sampled(end):
    """A tool's answer is appended as the chat template writes a turn of the user.

    `end`: the tokens behind the policy's turn. One that a stop string ended has no end token, so
    the answer begins with it. Control tokens in the text of a tool are broken up by a space, so
    that they begin no turn and no image. Step 4 is that of `answer_last_turn`.
    """
    picture = Image.new("L", (84, 28), 50)
    before = rollout_with_turn(TURN_WITH_CALL, end=end)
    after = answer_last_turn(
        FakeTools("Picture 2: ", picture, " of <|image_pad|> and<|im_end|>"), before
    )

    assert after.segments[0] == before.segments[0]
    assert not after.has_ended
    missing_end = "" if end else "<|im_end|>"
    image_text = f"<|vision_start|>{'<|image_pad|>' * 3}<|vision_end|>"
    answer_text = f"Picture 2: {image_text} of < |image_pad|> and< |im_end|>"
    expected = token_ids(
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
    """A tokenizer in place of a processor writes the same turn, without images."""
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = PROCESSOR.chat_template
    answer_calls = ToolLoop(
        tools=FakeTools("It is 7."),
        processor=tokenizer,
        chat_template_kwargs={},
        count_image_tokens=lambda _: 0,
        max_answers=None,
        decode=TOKENIZER.decode,
    )
    rollout = answer_calls(
        rollout_with_turn(TURN_WITH_CALL),
        [],
        prompt_length=9,
        max_length=200,
        step=4,
        seed="",
    )
    expected = token_ids("\n<|im_start|>user\nIt is 7.<|im_end|>\n<|im_start|>assistant\n")
    assert list(rollout.segments[1].tokens) == expected
    assert not rollout.pictures


def test_tools_get_the_text_of_the_turn_all_images_and_a_seed_of_its_own():
    """A request to tools has the text of the last turn alone, and a seed with the turn's number.

    It has the prompt's image, of 28 x 28 pixels, and then the pictures of earlier answers, here one
    of 56 x 28. At most two turns are answered, so the second request is the last one.
    """
    tools = FakeTools("", Image.new("RGB", (56, 28)))
    answered = answer_last_turn(tools, rollout_with_turn(TURN_WITH_CALL))
    second_turn = rollout_with_turn(TURN_WITH_CALL + TURN_WITH_CALL, *answered.segments)
    answer_last_turn(tools, replace(second_turn, pictures=answered.pictures))
    first_text = TOKENIZER.decode([*token_ids(TURN_WITH_CALL), END])
    second_text = TOKENIZER.decode([*token_ids(TURN_WITH_CALL + TURN_WITH_CALL), END])
    assert tools.requests == [
        ToolRequest(text=first_text, image_sizes=[(28, 28)], seed="7/train/3/0/1/0/0", last=False),
        ToolRequest(
            text=second_text,
            image_sizes=[(28, 28), (56, 28)],
            seed="7/train/3/0/1/0/1",
            last=True,
        ),
    ]


def test_what_ends_a_rollout_and_whether_it_has_an_end():
    """A rollout has an end only if it ends by itself, whatever its last token is.

    It also ends with a call beyond the last turn that is answered, or where an answer has no room
    in `max_length` or in the engine's context.
    """
    tools = FakeTools("x" * 20)
    stop_criteria = StopCriteria.from_config({END}, {}, TOKENIZER.decode)
    turn_with_call = rollout_with_turn(TURN_WITH_CALL)
    answered_rollout = answer_last_turn(tools, turn_with_call, max_turns=1)
    second_turn_with_call = rollout_with_turn(TURN_WITH_CALL, *answered_rollout.segments)
    # (the rollout after its last turn, why it has ended, whether it has an end)
    cases = [
        (answer_last_turn(tools, rollout_with_turn("so 7")), "stop", True),
        (answer_last_turn(tools, second_turn_with_call, max_turns=1), "calls", False),
        (answer_last_turn(tools, turn_with_call, max_length=50), "room", False),
        (answer_last_turn(tools, turn_with_call, context_length=150), "room", False),
    ]

    for rollout, reason, has_end in cases:
        assert rollout.finish_reason == reason
        assert stop_criteria.rollout_has_stopped(rollout, "") is has_end
    computer = AdvantageComputer(
        step_context(), AdvantagePipeline({}), torch.ones(1), has_tools=True
    )
    assert computer.truncated_at is None, "with tools no number of tokens makes it truncated"
    assert len(answered_rollout.segments) == 2
    assert (
        len(answer_last_turn(tools, rollout_with_turn(TURN_WITH_CALL), max_length=50).segments) == 1
    )


class GradedGroup(NamedTuple):
    """A group after the stages of a training step that follow sampling."""

    batch: Batch
    assessment: GroupAssessment  # its rewards, lengths and weight


def grade_group(rollouts: Sequence[Rollout], *, answer: str) -> GradedGroup:
    """Build a batch of a group of rollouts, score it, and assess the group by ADORA.

    `answer`: the reference answer. Each prompt has an image of 56 x 28 pixels.
    """
    weights_F = torch.ones(1)
    group_size = len(rollouts)
    context = step_context(use_vllm=True, num_generations=group_size)
    images = DistinctImages(
        [], PROCESSOR, torch.device("cpu"), context.config, Dataset.from_dict({})
    )
    stop_criteria = StopCriteria.from_config(
        {END}, {}, partial(TOKENIZER.decode, skip_special_tokens=True)
    )
    functions = RewardFunctions(
        [reward_function("accuracy")], [None], {}, dict, asyncio.new_event_loop
    )
    builder = BatchBuilder(
        context=context,
        images=images,
        processor=PROCESSOR,
        stop_criteria=stop_criteria,
        to_device=lambda batch: batch,
        has_engine_logps=True,
        pad_to_multiple_of=None,
        has_tools=True,
        allows_stale_rollouts=False,
        shows_other_images=False,
    )
    scorer = Scorer(context, RewardGuard(context), weights_F, ["accuracy"])
    computer = AdvantageComputer(
        context, AdvantagePipeline({"adora": Adora()}), weights_F, has_tools=True
    )
    prompt = [{"role": "user", "content": "Which?"}]
    row: Any = {"prompt": prompt, "answer": answer, "images": [Image.new("RGB", (56, 28))]}
    group = RolloutGroup(
        problem=DrawnProblem(row_number=0, key=KEY, group_number=0),
        row=row,
        start_generation=0,
        rollouts=tuple(rollouts),
    )
    prompts = images.prompts([row] * group_size, "train", refill=False)
    built = builder.build(Generation(key=KEY, group_size=group_size), [group], prompts)
    scores = functions.score(built, TrainerState())
    facts = scorer.score(built, scores, group_size=group_size, step=0)
    assessment = computer.assess(facts, group_size=group_size, step=0)
    return GradedGroup(batch=built.batch, assessment=assessment)


@pytest.mark.parametrize("picture_width", [28, 196])
def test_what_a_tool_says_and_shows_earns_nothing_and_counts_for_nothing(picture_width):
    """A right answer in a tool's words earns no reward, and its tokens count for no length.

    The first rollout calls a tool and then says 3, which is wrong; the second says 7, which is
    right, and has sampled more tokens; the third has no room for its tool's answer. So the group
    has the same weight however wide the picture of the tool is. The batch has as many image tokens
    as its images need.
    """
    tools = FakeTools("It is \\boxed{7}.", Image.new("RGB", (picture_width, 28)))
    answered_rollout = answer_last_turn(tools, rollout_with_turn(TURN_WITH_CALL))
    wrong_rollout = rollout_with_turn("so 3", *answered_rollout.segments)
    wrong_rollout = replace(
        answered_rollout, segments=wrong_rollout.segments, finish_reason=FinishReason.STOP
    )
    right_rollout = rollout_with_turn("so it is " * 4 + "\\boxed{7}")
    truncated_rollout = answer_last_turn(tools, rollout_with_turn(TURN_WITH_CALL), max_length=50)

    graded = grade_group([wrong_rollout, right_rollout, truncated_rollout], answer="7")

    groups = graded.assessment.groups
    assert groups.rewards_PG.tolist() == [[0, 1, 0]]
    # The first rollout's length leaves out the tool's tokens, and counts two tokens that end turns.
    wrong_length, right_length, _ = groups.lengths_PG[0].tolist()
    assert wrong_length == len(token_ids(TURN_WITH_CALL)) + 1 + len(token_ids("so 3")) + 1
    assert wrong_length < right_length < len(wrong_rollout.tokens)
    assert groups.truncated_PG.tolist() == [[False, False, True]]
    assert graded.assessment.weighting.weights_P.tolist() == [1]
    batch = graded.batch
    is_image_token = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1) == IMAGE
    image_lengths = batch["image_grid_thw"].prod(dim=1) // 4
    assert is_image_token.sum(dim=1).tolist() == [
        lengths_of_row.sum() for lengths_of_row in image_lengths.split(batch["num_images"])
    ]
    assert len(image_lengths) == 4, "those of the three prompts, and the tool's"


def test_all_rollouts_sample_a_turn_then_those_with_an_answer_the_next_one():
    """Each call samples the next turn of the rollouts that the tools have just answered.

    The rollouts a, b and c have one, three and two turns of the policy. A rank whose own rollouts
    have ended takes part until those of all ranks have, with no request. Here another rank has five
    turns.
    """
    turns_by_key = {"a": 1, "b": 3, "c": 2}
    keys_of_each_call = list[list[str]]()
    any_rank_continues = iter([True, True, True, True, False])  # after each turn

    class FakePlayer:
        """A fake of the sampler and the tools, which answer all turns of a rollout but the last."""

        def sample(self, rollouts: Mapping[str, Rollout]) -> dict[str, Rollout]:
            keys_of_each_call.append([*rollouts])
            return {
                key: rollout_with_turn("x", *rollout.segments) for key, rollout in rollouts.items()
            }

        def answer(self, key: str, rollout: Rollout) -> Rollout:
            # Between the turns stand the answers, so n turns have 2 n - 1 segments.
            if len(rollout.segments) >= 2 * turns_by_key[key] - 1:
                return rollout
            answer = Segment(tokens=(9,), logps=None, step=3)
            return Rollout(segments=(*rollout.segments, answer))

        def can_continue(self, key: str, rollout: Rollout) -> bool:
            return True

    results = run_turns(
        dict.fromkeys(turns_by_key, Rollout()),
        FakePlayer(),
        lambda continues: next(any_rank_continues),
    )
    assert keys_of_each_call == [["a", "b", "c"], ["b", "c"], ["b"], [], []]
    segment_counts = {key: len(rollout.segments) for key, rollout in results.items()}
    assert segment_counts == {"a": 1, "b": 5, "c": 3}
