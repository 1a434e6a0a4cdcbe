"""MathVerse by our rules: options, free answers, its six versions, and the judge."""

from functools import partial
from typing import Any

import datasets

from eval.command import parse_command
from eval.mathverse import (
    BENCHMARK,
    PROBLEM_VERSIONS,
    TEXT_ONLY,
    extract_by_rules,
    find_reference_letter,
    is_same_answer,
    read_choices,
)
from tests.support import benchmark_data
from tests.support.benchmark_data import MATHVERSE_FEATURES, mathverse_rows, write_mathverse
from tests.support.endpoint_server import Reply, completion_reply

score_as_command = partial(benchmark_data.score_predictions, BENCHMARK)
CHOICE_QUESTION = "Find CED ()\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°"


def prediction(
    number: int, response: str, answer: str, version: str = "Text Lite", **fields: Any
) -> dict[str, Any]:
    """A prediction: a multiple-choice question if `answer` is a letter, else a free-form one."""
    is_choice = len(answer) == 1 and answer.isalpha()
    return {
        "sample_index": number,
        "problem_index": "1",
        "problem_version": version,
        "question": CHOICE_QUESTION if is_choice else "Find the area.",
        "answer": answer,
        "response": response,
        "question_type": "multi-choice" if is_choice else "free-form",
        "metadata": {"subject": "Plane Geometry"},
        **fields,
    }


def test_free_answers_are_compared_by_their_values():
    """A free answer is the same as a reference answer, as the data write it, if its value is."""
    same = [
        ("113.1", r"Area $=113.1 \mathrm{~cm}^{2}$"),
        ("113.097", r"Area $=113.1 \mathrm{~cm}^{2}$"),  # rounded to it
        (r"36\pi", "113.1"),
        (r"9\pi \text{ cm}^2", r"Area $=9 \pi \mathrm{cm}^{2}$"),
        ("r = 5", "$r=5$"),
        ("2191.7 m", "2191.7 metres"),
        ("270°", r"270 ^\circ T"),
        ("y = 5 - 2x", "y=-2 x+5"),
        ("x^2 + y^2 - 49 = 0", "$x^{2}+y^{2}=49$"),
        ("(4/2, -2)", "(2,-2)"),
        (r"(-\infty, 4]", r"(-\infty, 4]"),
        ("Bugs Bunny", "Bugs Bunny"),
    ]
    different = [
        ("113", "113.1"),
        ("13", "14"),
        ("x^2 + y^2 = 7", "$x^{2}+y^{2}=49$"),
        ("[2,-2)", "(2,-2)"),
        ("(2,2)", "(2,-2)"),
        ("increasing", "even"),
        ("", "5"),
    ]
    for pairs, expected in ((same, True), (different, False)):
        for answer, reference in pairs:
            is_same, _ = is_same_answer(answer, reference)
            assert is_same is expected, (answer, reference)


def test_an_answer_is_found_in_a_response():
    """An answer is read from a box, behind `the answer is`, as a whole, or from a conclusion."""
    extraction_by_response = {
        r"So the area is 4 and hence \boxed{9\pi}.": (r"9\pi", "box"),
        "The radius is 3.\nThe answer is 28.3 cm. Done.": ("28.3 cm", "stated"),
        r"\frac{\sqrt{30}}{2}": (r"\frac{\sqrt{30}}{2}", "whole"),
        "First we halve 8.\nTherefore the side is 4.": ("4", "conclusion"),
    }
    for response, extraction in extraction_by_response.items():
        assert extract_by_rules(prediction(1, response, "5.0")) == extraction


def test_options_and_the_right_one_are_read_as_the_data_write_them():
    """Options stand in the question, with a colon or a full stop behind their letters.

    A reference answer is a letter, also in brackets, or the text of an option.
    """
    problem = prediction(1, "", "D")
    assert read_choices(problem) == ["40°", "60°", "120°", "140°"]
    true_or_false = {**problem, "question": "Is it?\nChoice:\nA. True\nB. False"}
    assert read_choices(true_or_false) == ["True", "False"]
    without_options = {**problem, "question": ""}
    assert read_choices(without_options) == []
    assert read_choices({**without_options, "question_for_eval": CHOICE_QUESTION})[3] == "140°"
    letter_by_reference = {"D": "D", "(C)": "C", "140": "D", "A\nC": None}
    for reference, letter in letter_by_reference.items():
        problem = {**problem, "answer": reference}
        assert find_reference_letter(problem, read_choices(problem)) == letter


def test_scores_by_version_type_and_subject_and_overall_without_text_only(tmp_path, capsys):
    """Each answer counts for its version and subject; the overall one is without `TEXT_ONLY`."""
    # Each row with whether its answer is right.
    cases = [
        (prediction(1, r"\boxed{D}", "D", "Text Dominant"), True),
        (prediction(2, "The answer is 140°.", "D", "Text Lite"), True),
        (prediction(3, "The answer is 60°.", "D", "Vision Intensive"), False),
        (prediction(4, "D", "D", "Vision Only", question=""), True),
        (
            prediction(5, r"\boxed{113.10}", r"Area $=113.1 \mathrm{~cm}^{2}$", "Vision Dominant"),
            True,
        ),
        (prediction(6, r"\boxed{1}", "5.5", TEXT_ONLY), False),
        (prediction(7, r"\boxed{A}", "D", TEXT_ONLY) | {"answer": "A\nC"}, False),
    ]
    result = score_as_command(tmp_path, [prediction for prediction, _ in cases])
    are_right = [item["verdict"] == "correct" for item in result["items"]]
    assert are_right == [is_right for _, is_right in cases]
    assert result["correct"] == 4
    assert result["total"] == 7
    overall = result["overall"]["five_versions"]
    assert overall["correct"] == 4
    assert overall["total"] == 5
    cell_by_version = result["groups"]["version"]
    assert cell_by_version.keys() == set(PROBLEM_VERSIONS)
    assert cell_by_version[TEXT_ONLY]["correct"] == 0
    assert cell_by_version[TEXT_ONLY]["total"] == 2
    assert cell_by_version["Vision Only"]["correct"] == 1
    assert cell_by_version["Vision Only"]["total"] == 1
    assert result["groups"]["subject"]["Plane Geometry"]["total"] == 7
    output = capsys.readouterr().out
    assert "rules ours, in place of the official judge" in output
    assert "not the official score" in output
    assert "warning: 1 reference answer with several letters" in output


def test_a_judge_reads_the_answer_where_it_is_given(tmp_path, start_server):
    """With a judge, answers are right that our rules cannot read out of the response."""

    def extract(body: dict[str, Any], _: int) -> Reply:
        """Reply as a judge that reads D, or an area where no options are listed."""
        question = body["messages"][1]["content"]
        answer = "D" if "140°" in question else "113.1 cm²"
        return completion_reply(f"<answer>{answer}</answer>")

    server = start_server(extract)
    rows = [
        prediction(1, "It is the last of them.", "D"),
        prediction(2, "Pi times the square of six, in words.", r"Area $=113.1 \mathrm{~cm}^{2}$"),
        prediction(3, "By rule it would be no letter.", "D"),
    ]
    arguments = ["--extraction", "judge", "--judge-url", server.url, "--judge-model", "j"]
    result = score_as_command(tmp_path, rows, *arguments)
    assert result["correct"] == 3
    assert result["extraction_mix"] == {"judge": 3}
    assert result["rules"]["judge"] == "j"
    assert score_as_command(tmp_path, rows)["correct"] < 3


def test_a_judge_decides_on_free_answers_that_our_rules_do_not_find_right(
    tmp_path, start_server, capsys
):
    """A judge compares a free answer with the reference where our rules do not find it right.

    Each case: a prediction, and its verdict.
    """
    comparisons: list[str] = []

    def judge(body: dict[str, Any], _: int) -> Reply:
        """Extract the whole response, or say whether two answers mean the same."""
        content = body["messages"][1]["content"]
        if "<reply>" in content:
            _, _, behind_tag = content.partition("<reply>")
            response, _, _ = behind_tag.partition("</reply>")
            return completion_reply(f"<answer>{response.strip()}</answer>")
        comparisons.append(content)
        report = "1" if "50 cm" in content else "0"
        if "a guess" in content:
            report = "maybe"  # it is neither 1 nor 0
        return completion_reply(f"<answer>{report}</answer>")

    server = start_server(judge)
    cases = [
        (prediction(1, "50 cm", "0.5 m"), "correct"),
        (prediction(2, "60 cm", "0.5 m"), "wrong"),
        (prediction(3, "0.5 m", "0.5 m"), "correct"),  # by our rules, so that no judge is asked
        (prediction(4, "B", "D"), "wrong"),  # options are compared by their letters
        (prediction(5, "a guess", "0.5 m"), "failed"),
        (prediction(6, "NONE", "0.5 m"), "wrong"),
    ]
    rows = [prediction for prediction, _ in cases]
    arguments = ["--extraction", "judge", "--judge-url", server.url, "--judge-model", "j"]
    result = score_as_command(
        tmp_path, rows, *arguments, "--judge-attempts", "2", "--judge-wait", "0.001"
    )
    assert [item["verdict"] for item in result["items"]] == [verdict for _, verdict in cases]
    # about 50 cm and 60 cm once, and about the guess twice
    assert len(comparisons) == 2 + 2
    for comparison in comparisons:
        assert "<reference>\n0.5 m\n</reference>" in comparison
    assert result["extraction_failed"] == 1
    assert "judge" in result["rules"]["rules"]
    printed = capsys.readouterr()
    assert "note: j was the judge" in printed.out
    assert "the judge failed on 1 row" in printed.err
    assert score_as_command(tmp_path, rows)["correct"] == 1


def test_the_six_versions_are_asked_from_the_files_of_the_hub(tmp_path):
    """Five versions have pictures and are asked by default; the sixth is a split of its own."""
    rows = mathverse_rows(5) + mathverse_rows(2, versions=[TEXT_ONLY])
    folder = write_mathverse(tmp_path / "d", rows)

    def load(*words: str) -> list[Any]:
        command = ["infer", "--model", "m", "--data", str(folder), "--output", "o", *words]
        return BENCHMARK.load(parse_command(command, BENCHMARK).ask_options.data).problems

    assert [problem.fields["problem_version"] for problem in load()] == list(PROBLEM_VERSIONS[:5])
    text_only_problems = load("--split", "testmini_text_only")
    assert [
        (problem.pid, problem.n_images, problem.images()) for problem in text_only_problems
    ] == [
        ("text_only_1", 0, []),
        ("text_only_2", 0, []),
    ]
    all_problems = load("--split", "all", "--query", "wo")
    assert len({problem.pid for problem in all_problems}) == 7
    assert all_problems[0].images()[0].size == (56, 56)
    assert all_problems[0].prompt.startswith("Please directly answer")
    assert load()[0].prompt.startswith("Please first conduct reasoning")


def test_the_hub_is_asked_for_the_part_of_each_split(monkeypatch):
    """The split `all` asks the hub for both configurations, each for the split of its name."""
    requests: list[tuple[str, str | None, str]] = []

    def load_dataset(
        name: str, config: str | None, split: str, revision: str | None
    ) -> datasets.Dataset:
        """Return two problems of the split, as the hub would."""
        requests.append((name, config, split))
        versions = [TEXT_ONLY] if split == "testmini_text_only" else PROBLEM_VERSIONS[:5]
        return datasets.Dataset.from_list(
            mathverse_rows(2, versions=versions), features=MATHVERSE_FEATURES
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub_id = "AI4Math/MathVerse"
    arguments = ["infer", "--model", "m", "--data", hub_id, "--output", "o", "--split", "all"]
    problems = BENCHMARK.load(parse_command(arguments, BENCHMARK).ask_options.data).problems
    assert len(problems) == 4
    assert requests == [
        (hub_id, "testmini", "testmini"),
        (hub_id, "testmini_text_only", "testmini_text_only"),
    ]
