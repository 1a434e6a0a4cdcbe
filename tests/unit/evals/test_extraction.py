"""Answers read out of responses: by rules, and by a judge that is never trusted with a failure."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.scoring.choice import extract_choice
from adora_vl.evals.scoring.judge import (
    Question,
    build_extraction_messages,
    extract_by_rules,
)
from adora_vl.evals.scoring.number import extract_list, extract_number
from adora_vl.rewards.judge import KEY_VARIABLE
from eval.command import main
from eval.mathvista import BENCHMARK, build_question
from tests.support import benchmark_data
from tests.support.cases import CaseFolder
from tests.support.endpoint_server import EndpointServer, Reply, ReplyFunction, completion_reply

FRUIT_CHOICES = ["apple", "pear", "plum tree", "fig"]


def test_an_answer_is_found_in_a_response() -> None:
    """Each row of `cases/extraction.jsonl` has a response and the answer `found` in it.

    To add a case, add a line.
    """
    failing = []
    for line in (
        (Path(__file__).parent / "cases" / "extraction.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ):
        row = json.loads(line)
        if row["kind"] == "choice":
            extraction = extract_choice(row["response"], row["choices"])
        elif row["kind"] == "number":
            extraction = extract_number(row["response"], row.get("question", ""))
        else:
            extraction = extract_by_rules(Question(row["kind"], "", (), row["response"]))
        if extraction.text != row["found"]:
            failing.append((extraction.text, row))
    assert failing == []


@pytest.mark.slow
def test_no_response_takes_long(subtests: pytest.Subtests) -> None:
    """A response that repeats a piece is read in less than 5 seconds.

    A pattern might try each repeated piece again and again.
    """
    cases = [
        "(" * 200_000,
        "the answer is " * 20_000,
        "1," * 100_000,
        "1 " * 100_000,
        r"\boxed{" * 50_000,
        "answer to " + "a" * 100_000,
        "a " * 60_000,
        "[" * 100_000,
        " \n" * 100_000,
        "\x00\u202e" * 50_000,
        "**" * 100_000,
        "not " * 50_000,
        "-" * 200_000,
        "[" + "1" * 100_000,
        "answer" + " " * 100_000 + "x",
        "the answer is" + "\n " * 50_000 + "x",
        "x" + " \n" * 100_000 + "x",
        "is " * 50_000 + "5",
        "7 " * 12_500 + "=" * 25_000,
        "A, " * 80_000,
        "(A) " * 60_000,
        "option A or " * 20_000,
        "not a square (B) " * 15_000,
        '{"answer": "' + "\\" * 100_000 + '"}',
        '{"answer": ' * 20_000 + "}",
        "the third option " * 15_000,
        "15 since " * 25_000,
        "(" + "15 (" * 50_000,
        "### Answer\n" * 20_000,
        "A: " * 60_000,
        "3/4" * 60_000,
    ]
    for response in cases:
        with subtests.test(f"{response!r:.80}"):
            start = time.process_time()
            extract_choice(response, FRUIT_CHOICES)
            extract_number(response, "How many?")
            extract_list(response)
            assert time.process_time() - start < 5  # quadratic ones take ten seconds, or minutes


def prediction(pid: str, response: str, **fields: Any) -> dict[str, Any]:
    """Return a row of predictions on a free-form question, whose answer is 5."""
    row_fields: dict[str, Any] = {
        "pid": pid,
        "question": f"How many {pid}?",
        "question_type": "free_form",
        "answer_type": "integer",
    }
    row_fields |= {
        "precision": None,
        "choices": None,
        "answer": "5",
        "metadata": {},
        "response": response,
    }
    return row_fields | fields


YES_NO_FIELDS = {
    "question_type": "multi_choice",
    "answer_type": "text",
    "choices": ["Yes", "No"],
    "answer": "No",
}
PREDICTIONS = [
    prediction("1", "5"),
    prediction("2", "I count five."),
    prediction("3", "It does not.", **YES_NO_FIELDS),
    prediction("4", ""),
]


def score_with_judge(
    tmp_path: Path, url: str, *words: str, rows: list[dict[str, Any]] = PREDICTIONS
) -> dict[str, Any]:
    """Return the scores of predictions whose answers the judge at `url` extracts."""
    judge = ["--extraction", "judge", "--judge-url", url, "--judge-model", "j"]
    return benchmark_data.score_predictions(BENCHMARK, tmp_path, rows, *judge, *words)


def judge_reply(body: dict[str, Any], _: int) -> Reply:
    """Return the reply of a judge that extracts 5 from a response with the word "five", else B."""
    reply = body["messages"][1]["content"]
    return completion_reply(
        "<answer>5</answer>" if "five" in reply else "The reply says no.\n<answer>B</answer>"
    )


def test_the_judge_is_asked_only_where_the_official_code_asks_one(tmp_path, start_server):
    """`5` is read without a judge, and nothing out of an empty response: two of four are asked."""
    server = start_server(judge_reply)
    result = score_with_judge(tmp_path, server.url)
    assert [item["verdict"] for item in result["items"]] == [
        "correct",
        "correct",
        "correct",
        "wrong",
    ]
    assert result["extraction_mix"] == {"judge": 2, "exact": 1, "empty": 1}
    assert result["rules"]["judge"] == "j"
    assert len(server.requests) == 2
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}
    assert {(request["model"], request["temperature"]) for request in server.requests} == {("j", 0)}


def test_a_second_score_asks_nothing(
    tmp_path: Path, start_server: Callable[[ReplyFunction], EndpointServer]
) -> None:
    """A second score takes the judge's answers from the first one, and asks only for new responses.

    They are kept in a file beside the score.
    """
    server = start_server(judge_reply)
    first = score_with_judge(tmp_path, server.url)
    second = score_with_judge(tmp_path, server.url)
    assert len(server.requests) == 2
    assert second["extraction_mix"]["judge_cached"] == 2
    assert second["correct"] == first["correct"]
    # Another answer to the same problem is another question.
    changed_predictions = [
        *PREDICTIONS[:1],
        prediction("2", "I count five, no, six."),
        *PREDICTIONS[2:],
    ]
    score_with_judge(tmp_path, server.url, rows=changed_predictions)
    assert len(server.requests) == 3


def test_the_gold_is_not_told(tmp_path: Path) -> None:
    """The messages to a judge do not have the reference answer.

    A judge that knows the right answer might read it into a response.
    """
    question = build_question(prediction("1", "I count five.", answer="gold-value"))
    messages = build_extraction_messages(question)
    assert "gold-value" not in json.dumps(messages)


def test_a_failed_judge_is_a_recorded_failure_and_never_an_answer(
    case_folder, start_server, capsys
):
    """Whatever goes wrong at the judge's server, the row counts as failed, and is asked again.

    Neither the score nor the cache has an answer for it.
    """
    # (how the server answers, how often it is called for one response)
    cases = [
        (lambda body, call: None, 2),
        (lambda body, call: (429, b"slow down"), 2),
        (lambda body, call: (500, b""), 2),
        (lambda body, call: (400, b"no"), 1),  # asking again would not help
        (lambda body, call: (200, b"rubbish"), 2),
        (lambda body, call: (200, b'{"choices": []}'), 2),
        (lambda body, call: completion_reply("It is B, I guess."), 2),
        (lambda body, call: completion_reply("<answer>" + "B " * 300 + "</answer>"), 2),
        (
            lambda body, call: (
                200,
                json.dumps({"choices": [{"message": {"content": None}}]}).encode(),
            ),
            2,
        ),
    ]
    for answer, calls in cases:
        with case_folder(answer) as folder:
            server = start_server(answer)
            # The right choice is `No`. An empty extraction is closest to it by edit distance, and
            # would count as right if the failure were stored as an empty answer.
            rows = [prediction("3", "It does not.", **YES_NO_FIELDS)]
            options = ["--judge-timeout", "0.3", "--judge-attempts", "2", "--judge-wait", "0.01"]
            result = score_with_judge(folder, server.url, *options, rows=rows)
            assert result["correct"] == 0
            assert result["extraction_failed"] == 1
            assert result["verdicts"] == {"failed": 1}
            assert result["items"][0]["how"] == "judge_failed"
            assert len(server.requests) == calls
            assert "the judge failed on 1 answer" in (printed := capsys.readouterr()).out
            assert "the judge failed on 1 row, the first time: " in printed.err
            assert not (folder / "judge_cache.jsonl").exists()
            # With the judge well again the same command gives the answer.
            assert (
                score_with_judge(folder, start_server(judge_reply).url, rows=rows)["correct"] == 1
            )


def test_a_refused_key_ends_the_score_and_the_same_command_goes_on_with_a_right_one(
    tmp_path, start_server, capsys
):
    """A key that the server refuses after three answers ends the score; the earlier score stays.

    Otherwise 17 of 20 rows would count as failed. The same command with a server that answers asks
    for the 17 alone.
    """
    server = start_server(
        lambda body, call: judge_reply(body, call) if call <= 3 else (401, b"ended")
    )
    rows = [prediction(str(number), "I count five.") for number in range(20)]
    score_file = tmp_path / "s.json"
    benchmark_data.score_predictions(BENCHMARK, tmp_path, rows)  # by rules
    earlier_score = score_file.read_bytes()
    judge = ["--extraction", "judge", "--judge-url", server.url, "--judge-model", "j"]
    assert main(BENCHMARK, benchmark_data.score_arguments(tmp_path, rows, *judge)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: judge_url: {server.url} refuses the key in {KEY_VARIABLE} for the model 'j' "
        f"(HTTP 401: ended (attempt 1)); set {KEY_VARIABLE} to one that it takes"
    )
    # The judge is asked in up to 8 calls at once.
    assert len(server.requests) <= 3 + 8, "none but the calls under way"
    assert score_file.read_bytes() == earlier_score
    well_server = start_server(judge_reply)
    result = score_with_judge(tmp_path, well_server.url, rows=rows)
    assert result["correct"] == 20
    assert result["extraction_mix"] == {"judge": 17, "judge_cached": 3}
    assert len(well_server.requests) == 17


def test_a_judge_that_is_not_there_ends_the_score_and_one_that_was_there_does_not(
    tmp_path, start_server, capsys
):
    """A judge that never answers ends the score; one that is gone after three answers does not.

    With a wrong address, or a wrong name of the model, each row would count as failed.
    """
    rows = [prediction(str(number), "I count five.") for number in range(20)]
    waits = ["--judge-attempts", "2", "--judge-wait", "0.001"]
    unknown = start_server(lambda body, call: (404, b"no model j"))
    for url, reason in (
        ("http://127.0.0.1:1/v1", "ConnectError: .*; is a server there\\?"),
        (unknown.url, "HTTP 404 at .*: no model j .*; look at the address and at the name of the"),
    ):
        judge = ["--extraction", "judge", "--judge-url", url, "--judge-model", "j", *waits]
        assert main(BENCHMARK, benchmark_data.score_arguments(tmp_path, rows, *judge)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.search(
            f"error: judge_url: {url} with the model 'j' gave no answer: {reason}", line
        )
        assert not (tmp_path / "s.json").exists()
    assert len(unknown.requests) <= 8, "none but the calls under way"

    def answer_and_go(body: dict[str, Any], call: int) -> Reply:
        """Answer three calls, and be gone behind them."""
        if call <= 3:
            return judge_reply(body, call)
        time.sleep(0.3)  # until the answers are read
        return 404, b"gone"

    restarted = start_server(answer_and_go)
    result = score_with_judge(tmp_path, restarted.url, rows=rows)
    assert result["extraction_failed"] == 17


def test_a_report_of_no_answer_is_none(tmp_path, start_server):
    """A judge says NONE where a response has no answer: that is a wrong answer, and no failure."""
    server = start_server(lambda body, call: completion_reply("<answer>NONE</answer>"))
    result = score_with_judge(tmp_path, server.url, rows=PREDICTIONS[1:2])
    assert result["extraction_failed"] == 0
    assert result["items"][0]["extraction"] == ""
    assert result["correct"] == 0


def test_a_judge_that_is_not_named_is_the_users_mistake(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score by a judge without an HTTP address or a model is refused, and the option named."""
    for words, message in [
        ([], "--judge-url is missing"),
        (["--judge-url", "http://localhost:1"], "--judge-model is missing"),
        (["--judge-url", "file:///etc/passwd", "--judge-model", "j"], "is no http address"),
    ]:
        with case_folder(words) as folder:
            command = benchmark_data.score_arguments(
                folder, PREDICTIONS[1:2], "--extraction", "judge", *words
            )
            assert main(BENCHMARK, command) == 2
            assert message in capsys.readouterr().err
