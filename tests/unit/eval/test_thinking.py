"""An evaluation reads the answer behind a block of thinking, by all rules, and says how many there
were.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adora_vl.evals.benchmark import BENCHMARK_NAMES, find_benchmark
from adora_vl.evals.inference.local import ConversationEngine
from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.evals.records import ScoredBenchmark
from adora_vl.evals.scoring.judge import read_answer_tags
from adora_vl.evals.scoring.score import score_predictions
from adora_vl.evals.scoring.table import format_score
from adora_vl.rollout.rollouts import FinishReason, SamplingResult
from data_prep.filter import count_right_answers
from eval.mathvista import BENCHMARK as MATHVISTA
from tests.support import benchmark_data
from tests.support.endpoint_server import completion_reply

ANGLE_CHOICES = ["30", "45", "60", "90"]


def free_form_prediction(pid: str, response: str, **fields: Any) -> dict[str, Any]:
    """Return a row of predictions on a free-form question, whose answer is 15."""
    row = {
        "pid": pid,
        "question": "How many?",
        "question_type": "free_form",
        "answer_type": "integer",
        "precision": None,
        "choices": None,
        "answer": "15",
        "unit": None,
        "metadata": {},
        "response": response,
        "finish_reason": "stop",
    }
    return row | fields


def choice_prediction(pid: str, response: str, **fields: Any) -> dict[str, Any]:
    """Return a row of a multiple-choice question, whose right answer is A."""
    return free_form_prediction(
        pid,
        response,
        question_type="multi_choice",
        answer_type="text",
        choices=ANGLE_CHOICES,
        answer="30",
        **fields,
    )


def score_as_mathvista(rows: list[dict[str, Any]], **options: Any) -> ScoredBenchmark:
    """Return the score of predictions by MathVista's rules, with these options."""
    return score_predictions(MATHVISTA, rows, MATHVISTA.score_options(**options))


@pytest.mark.parametrize("rules", ["official", "vlmevalkit"])
def test_all_rules_read_the_answer_behind_the_thinking(rules: str) -> None:
    """A draft in the block is no answer by any rules; what stands behind the block is.

    The pid says what each response is: "cut" ends within its block, "plain" has none.
    """
    rows = [
        choice_prediction("right", "<think>The answer is B. Wait.</think>\n\n**A**"),
        choice_prediction("exact", "<think>The answer is B.</think>\n\n30"),
        choice_prediction("wrong", "<think>The answer is A. Wait.</think>\n\n**C**"),
        choice_prediction("cut", r"<think>Suppose it is \boxed{A}. Let me", finish_reason="length"),
        choice_prediction("nothing", "<think>The answer is A.</think>\n"),
        free_form_prediction("number", "<think>The answer is 12.</think>\n\n15"),
        free_form_prediction("draft", "<think>The answer is 15, but let me verify by"),
        free_form_prediction("plain", "15"),
    ]
    result = score_as_mathvista(rows, rules=rules)
    items = result.score["items"]
    right_pids = [item["pid"] for item in items if item["correct"]]
    assert right_pids == ["right", "exact", "number", "plain"]
    assert result.score["thinking"] == {"set_aside": 7, "without_answer": 3}
    line = (
        "thinking set aside: in 7 answers, of which 3 have no answer behind it and count as wrong"
    )
    assert line in format_score(result)
    assert result.score["empty_responses"] == 0
    method_by_pid = {item["pid"]: item["how"] for item in items}
    assert method_by_pid["cut"] == "thinking_without_answer"
    plain_result = score_as_mathvista([free_form_prediction("plain", "15")])
    assert "thinking set aside" not in format_score(plain_result)


def test_a_prompt_that_opens_the_block_is_known_by_the_row_or_by_the_other_answers() -> None:
    """A response to such a prompt has no `<think>`, so a draft looks like an answer."""
    cut_row = choice_prediction("cut", "The answer is A, but", finish_reason="length")
    whole_row = choice_prediction("whole", "The answer is A.")
    rows = [cut_row, whole_row]
    assert score_as_mathvista(rows).score["correct"] == 2
    cut_row["thinking_opened"] = True
    assert score_as_mathvista(rows).score["correct"] == 1
    # "one" and "two" close a block that they do not open, so the prompts of this run open it
    served = [
        choice_prediction("one", "Perhaps B.</think>A"),
        choice_prediction("two", "Perhaps C.</think>A"),
        choice_prediction("cut", "The answer is A, but", finish_reason="length"),
    ]
    score = score_as_mathvista(served).score
    assert score["correct"] == 2
    assert score["thinking"] == {"set_aside": 3, "without_answer": 1}


def test_a_judge_reads_and_is_read_behind_the_thinking(tmp_path: Path, start_server: Any) -> None:
    """A judge gets what stands behind the thinking, and its own thinking is set aside.

    A response without an answer is not sent to it.
    """
    server = start_server(
        lambda body, call: completion_reply("<think><answer>12</answer></think><answer>15</answer>")
    )
    options = {"extraction": "judge", "judge_url": server.url, "judge_model": "j"}
    rows = [
        free_form_prediction("1", "<think>a draft</think>It is 15."),
        free_form_prediction("2", "<think>a draft of 15", finish_reason="length"),
    ]
    score = score_as_mathvista(rows, output=tmp_path, **options).score
    assert score["correct"] == 1
    assert len(server.requests) == 1
    assert "draft" not in server.requests[0]["messages"][1]["content"]
    with pytest.raises(Exception, match="no <answer>"):
        read_answer_tags("<think><answer>15</answer></think>")


@pytest.mark.parametrize("name", BENCHMARK_NAMES)
def test_a_draft_is_wrong_in_every_benchmark(name: str) -> None:
    """The right answer is right behind the block of thinking, and wrong inside, closed or not."""
    make_row_by_benchmark: dict[str, Any] = {
        "geometry3k": lambda: {"answer": "15"},
        "mathvista": lambda: free_form_prediction("1", ""),
        "mathvision": lambda: benchmark_data.mathvision_rows(1)[0],
        "mmstar": lambda: benchmark_data.mmstar_rows(1)[0],
        "wemath": lambda: benchmark_data.wemath_rows(1)[0],
        "mathverse": lambda: benchmark_data.mathverse_rows(1)[0],
        "mmmu_pro": lambda: benchmark_data.MMMU_PRO_ROW,
        "logicvista": lambda: benchmark_data.LOGICVISTA_ROW,
        "dynamath": lambda: benchmark_data.DYNAMATH_ROW,
        "knights": lambda: {"answer": "Ada is a knight"},
        "problems": lambda: {"answer": "15"},
    }
    # How a benchmark wants the answer to be written, where it is not boxed.
    answer_templates = {
        "mmmu_pro": "Answer: {}",
        "dynamath": '{{"short answer": "{}"}}',
    }
    fields = {
        key: value for key, value in make_row_by_benchmark[name]().items() if "image" not in key
    }
    answer = str(fields.get("answer", fields.get("ground_truth")))
    level = str(fields.get("knowledge_level", fields.get("level")))
    final_answer = answer_templates.get(name, r"\boxed{{{}}}").format(answer)
    benchmark = find_benchmark(name)
    options = benchmark.score_options()

    def count_correct(response: str) -> int:
        """Score one row with this response: 1 if it is right, else 0."""
        row = {
            **fields,
            "answer": answer,
            "level": level,
            "pid": "1",
            "response": response,
            "finish_reason": "stop",
        }
        correct: int = score_predictions(benchmark, [row], options).score["correct"]
        return correct

    assert count_correct(f"<think>Hm.</think>\n\n{final_answer}") == 1
    assert count_correct(f"<think>{final_answer}</think>") == 0
    assert count_correct(f"<think>{final_answer}") == 0


def test_pass_rates_of_a_filter_count_no_drafts() -> None:
    """A box in the thinking alone counts as wrong, so one of two responses is right."""
    row = {"pid": "1", "answer": "15", "choices": None}
    draft_row = {**row, "response": r"<think>\boxed{15}</think> Hm."}
    answer_row = {**row, "response": r"<think>Hm.</think>\boxed{15}"}
    tally = count_right_answers([draft_row, answer_row])["1"]
    assert tally.rate == 0.5


@pytest.mark.parametrize(("prompt", "opened"), [("Find x. <think>\n", True), ("Find x.", False)])
def test_an_engine_in_this_process_says_whether_the_prompt_opens_the_block(
    prompt: str, opened: bool
) -> None:
    """A reply has `thinking_opened` if its prompt ends in `<think>`.

    A character is a token of this chat processor, and every answer is "5".
    """
    chat: Any = SimpleNamespace(
        context_length=100,
        prompt_ids=lambda messages, images: [ord(character) for character in prompt],
        why_too_long=lambda ids, context: None,
        decode=lambda ids: "".join(map(chr, ids)),
    )
    answer = SamplingResult(tokens=[ord("5")], logps=[None], finish_reason=FinishReason.STOP)
    engine = ConversationEngine(
        chat, lambda asks: [answer for _ in asks], max_length=10, batch_size=4
    )
    (reply,) = engine.generate([AnswerRequest([], [])])
    assert not isinstance(reply, tuple)
    assert reply.text == "5"
    assert reply.thinking_opened is opened
