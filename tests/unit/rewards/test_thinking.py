"""A block of thinking is no answer, whoever opens it and whoever reads the response."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerState

from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rewards import choose_rewards, explain, grade
from adora_vl.rewards.judge import parse_score
from adora_vl.rewards.knights import knights_verdict
from adora_vl.rewards.thinking import is_blank, opens_thinking, text_after_thinking
from adora_vl.rollout.rollouts import FinishReason, Rollout, Segment
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.scoring import RewardFunctions
from adora_vl.utils.openai_client import EndpointError
from tests.support.endpoint_server import completion_reply

RESPONSES_WITHOUT_ANSWER = [  # a response, and whether its prompt ended in `<think>`
    (r"<think>\boxed{35}</think> I do not know.", False),
    (r"<think>\boxed{35}</think> The answer is 40.", False),
    (r"<think>\boxed{35}</think> <answer>40</answer>", False),
    (r"<think> \boxed{35} but", False),
    (r"<thinking>\boxed{35}</thinking> It is 40.", False),
    (r"◁think▷\boxed{35}◁/think▷ It is 40.", False),
    (r"<THINK>\boxed{35}</THINK> It is 40.", False),
    (r"[THINK]\boxed{35}[/THINK] It is 40.", False),
    (r"<seed:think>\boxed{35}</seed:think> It is 40.", False),
    (r"<think><|begin_of_box|>35<|end_of_box|></think> It is 40.", False),
    (r"<|begin_of_box|>35", False),
    (r"\boxed{35}? Yes.</think> It is 40.", False),
    (r"\boxed{35} <think> or is it", False),
    (r"so \boxed{35} but", True),
    (r"so <answer>\boxed{35}</answer> but", True),
    (r"so \boxed{35}</think> It is 40.", True),
]
RESPONSES_WITH_ANSWER = [
    (r"<think>\boxed{12}? no</think>\boxed{35}", False),
    (r"12? no</think> \boxed{35}", True),
    (r"<think>a</think><think>b</think>\boxed{35}", False),
    (r"So \boxed{35}", False),
    (r"[THINK]\boxed{12}[/THINK]\boxed{35}", False),
    (r"<think>12</think>It is <|begin_of_box|>35<|end_of_box|>", False),
]
PRESET_NAMES = ["boxed_accuracy", "easyr1", "accuracy", "format"]


@pytest.mark.parametrize(("response", "thinking_opened"), RESPONSES_WITHOUT_ANSWER)
def test_a_draft_earns_nothing(response: str, thinking_opened: bool) -> None:
    """A box is a draft while the block of thinking is open, whichever preset grades it."""
    for answer_tags in (False, True):
        graded = grade(response, "35", answer_tags=answer_tags, thinking_opened=thinking_opened)
        assert graded.verdict != "correct"
    for function in choose_rewards(PRESET_NAMES).functions:
        for text in (response, [{"role": "assistant", "content": response}]):
            rewards = function(completions=[text], answer=["35"], thinking_opened=[thinking_opened])
            assert rewards == [0.0]


@pytest.mark.parametrize(("response", "thinking_opened"), RESPONSES_WITH_ANSWER)
def test_the_answer_behind_the_thinking_is_paid(response: str, thinking_opened: bool) -> None:
    for function in choose_rewards(PRESET_NAMES).functions:
        rewards = function(completions=[response], answer=["35"], thinking_opened=[thinking_opened])
        assert rewards == [1.0]


def test_the_final_part_of_a_final_part_is_itself() -> None:
    for response, _ in [*RESPONSES_WITHOUT_ANSWER, *RESPONSES_WITH_ANSWER]:
        part = text_after_thinking(response)
        assert text_after_thinking(part) == part
    assert text_after_thinking("5 </think") == "5 </think"


def test_reasoning_that_the_tokenizer_has_parsed_out_is_no_answer_and_counts_as_thinking() -> None:
    message = {"role": "assistant", "reasoning_content": r"\boxed{12}", "content": r"\boxed{35}"}
    accuracy, thought = choose_rewards(["accuracy", "think_format"]).functions
    columns: dict[str, Any] = {"completions": [[message]], "answer": ["35"]}
    assert accuracy(**columns) == thought(**columns) == [1.0]
    assert accuracy(**{**columns, "answer": ["12"]}) == [0.0]


# A response, whether its prompt ended in `<think>`, think_format, think_answer_format.
THINKING_FORMS = [
    ("a</think>5", True, 1.0, 0.0),
    ("\na\n</think>\n\n<answer>5</answer>", True, 0.0, 1.0),
    ("<think>a</think>5", True, 1.0, 0.0),
    ("a</think>5", False, 0.0, 0.0),
    ("</think>5", True, 0.0, 0.0),
    ("a", True, 0.0, 0.0),
    ("a</think>b</think>5", True, 0.0, 0.0),
    ("<think>\u200b</think>5", False, 0.0, 0.0),
    ("<think>\u3164\u2800 \u00ad</think>5", False, 0.0, 0.0),
    ("<think>a</think>\u200b", False, 0.0, 0.0),
    ("<think>a</think><answer>\u200b</answer>", False, 0.0, 0.0),
]


@pytest.mark.parametrize(("response", "thinking_opened", "think", "think_answer"), THINKING_FORMS)
def test_the_form_of_thinking_is_that_of_prompt_and_response(
    response: str, thinking_opened: bool, think: float, think_answer: float
) -> None:
    """Both rewards of form take the opening tag from the prompt where it has one."""
    functions = choose_rewards(["think_format", "think_answer_format"]).functions
    rewards = [
        function(completions=[response], thinking_opened=[thinking_opened])
        for function in functions
    ]
    assert rewards == [[think], [think_answer]]


@pytest.mark.parametrize(
    "response", [r"\boxed{}", r"\boxed{ \text{} }", "\\boxed{\u200b}", "<answer></answer>"]
)
def test_an_empty_box_is_no_box(response: str) -> None:
    for function in choose_rewards(PRESET_NAMES, answer_tags=True).functions:
        assert function(completions=[response], answer=["35"]) == [0.0]


def test_what_shows_nothing_is_blank() -> None:
    assert is_blank("")
    assert is_blank(" \n\u200b\u2060\ufe0f\u115f")
    assert not is_blank("\u200b.")
    assert not is_blank("想")


def test_puzzles_are_read_behind_the_thinking() -> None:
    """An answer to a puzzle is read behind the thinking, which the prompt may have opened.

    `knights_logic_rl` gives 3 for the right answer, and -3 for a response without its `<think>`.
    """
    gold = "Ada is a knight"
    assert knights_verdict(rf"<think>\boxed{{{gold}}}</think> Hm.", gold)[0] == "unparseable"
    assert knights_verdict(rf"<think>so</think>\boxed{{{gold}}}", gold)[0] == "correct"
    (form,) = choose_rewards(["knights_logic_rl"]).functions
    opened = f"so</think><answer>{gold}</answer>"
    assert form(completions=[opened], answer=[gold], thinking_opened=[True]) == [3.0]
    assert form(completions=[opened], answer=[gold]) == [-3.0]


def test_the_judge_reads_and_is_read_behind_the_thinking(tmp_path, start_server) -> None:
    """The judge sees the text behind the thinking, and its own thinking is skipped too."""
    server = start_server(lambda body, call: completion_reply("<think>0?</think><score>1</score>"))
    options = {"judge": {"base_url": server.url, "model": "j", "concurrency": 1}}
    (judge,) = choose_rewards([options], output_dir=tmp_path).functions
    replies = ["<think>a draft</think>It is 5.", "a draft", "a draft", "<think>a draft"]
    rewards = judge(
        completions=replies,
        problem=["2 + 3?"] * 4,
        answer=["5"] * 4,
        thinking_opened=[False, False, True, False],
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    questions = [request["messages"][1]["content"] for request in server.requests]
    assert len(questions) == 2, "the last two replies have no answer, so nobody is asked"
    assert "draft" not in questions[0]
    assert "It is 5." in questions[0]
    for reply in ("<think><score>1</score></think> I cannot say.", "<think><score>1</score>"):
        with pytest.raises(EndpointError, match="no <score>"):
            parse_score(reply)


def test_a_training_knows_which_prompts_open_the_block() -> None:
    """The block is open before an answer if the text before its last turn ends in `<think>`.

    That text is the prompt, or what follows a tool's answer.
    """
    tokenizer: Any = load_processor(str(PRETRAINED_FOLDER)).tokenizer
    decode = partial(tokenizer.decode, skip_special_tokens=True)

    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def sampled(*texts: str) -> Rollout:
        """The policy's turns, between them a tool's, whose tokens have no log-probability."""
        segments: list[Segment] = []
        for number, text in enumerate(texts):
            ids = ids_of(text)
            logps = None if number % 2 else (-0.5,) * len(ids)
            segments.append(Segment(tokens=ids, logps=logps, step=0))
        return Rollout(segments=tuple(segments), finish_reason=FinishReason.STOP)

    # the prompt, the rollout, its text as a reward gets it, whether the block was open before it
    cases = [
        ("Find x. <think> is a tag.", sampled("x"), "x", False),
        ("Find x. <think>\n", sampled("x"), "x", True),
        ("Find x. <think>\n\n</think>\n\n", sampled("x"), "x", False),
        ("Find x. <think>\n", sampled("call", "tool says <think>\n", "x"), "x", True),
        ("Find x. <think>\n", sampled("call", "tool says: ", "x"), "x", False),
        # The tokenizer has parsed the block out of the message, so the text begins behind it.
        ("Find x. <think>\n", sampled("a</think>x"), "x", False),
        ("Find x. <think>\n", sampled("a</think>x"), "a</think>x", True),
    ]
    prompts: Any = SimpleNamespace(ids=[list(ids_of(prompt)) for prompt, *_ in cases])
    builder = cast("BatchBuilder", SimpleNamespace(stop_criteria=SimpleNamespace(decode=decode)))
    rollouts = [rollout for _, rollout, *_ in cases]
    texts = [text for _, _, text, _ in cases]
    expected = [is_open for *_, is_open in cases]

    assert BatchBuilder.thinking_opened(builder, prompts, rollouts, texts) == expected
    assert not opens_thinking([], decode)


def test_every_reward_function_is_given_which_prompts_open_the_block() -> None:
    """The column `thinking_opened` reaches a reward of the user's as well."""

    def opened_as_reward(
        completions: list[Any], thinking_opened: list[bool], **columns: Any
    ) -> list[float]:
        return [float(opened) for opened in thinking_opened]

    def no_loop() -> Any:
        raise AssertionError("no reward function is a coroutine")

    functions = RewardFunctions([opened_as_reward], [None], {}, lambda value: value, no_loop)
    unscored_groups: Any = SimpleNamespace(
        rows=[{"prompt": "p"}, {"prompt": "p"}],
        rollouts=[Rollout(), Rollout()],
        prompts=SimpleNamespace(messages=["p", "p"]),
        completions=["c", "c"],
        thinking_opened=[True, False],
    )
    grades = functions.score(unscored_groups, TrainerState())
    assert grades.rewards_BF.tolist() == [[1.0], [0.0]]


def test_an_explanation_says_that_thinking_was_set_aside(capsys) -> None:
    """With `--thinking-opened` all 13 characters are thinking, and no box is left to grade."""
    arguments = ["--gold", "35", "--response", r"so \boxed{35}"]
    assert explain.main(arguments) == 0
    assert "thinking" not in capsys.readouterr().out
    assert explain.main([*arguments, "--thinking-opened", "--reward", "accuracy"]) == 0
    printed = capsys.readouterr().out
    assert "thinking   13 characters set aside" in printed
    assert "(no complete box)" in printed
    assert "boxed_accuracy 0," in printed
    assert "reward     accuracy 0" in printed
