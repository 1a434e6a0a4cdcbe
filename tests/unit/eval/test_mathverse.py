"""MathVerse by our rules: options, free answers, its six versions, and the judge."""

from functools import partial
from typing import Any

import datasets

from eval.command import parse
from eval.mathverse import (
    BENCHMARK,
    TEXT_ONLY,
    VERSIONS,
    choices_of,
    extract_by_rules,
    reference_letter,
    same_answer,
)
from tests.support import benchmark_data
from tests.support.benchmark_data import MATHVERSE, mathverse_rows, write_mathverse
from tests.support.endpoint_server import Reply, completion

scored = partial(benchmark_data.scored, BENCHMARK)
QUESTION = "Find CED ()\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°"


def row(
    number: int, response: str, answer: str, version: str = "Text Lite", **fields: Any
) -> dict[str, Any]:
    choice = len(answer) == 1 and answer.isalpha()
    row_fields: dict[str, Any] = {
        "sample_index": number,
        "problem_index": "1",
        "problem_version": version,
    }
    row_fields |= {
        "question": QUESTION if choice else "Find the area.",
        "answer": answer,
        "response": response,
    }
    row_fields |= {
        "question_type": "multi-choice" if choice else "free-form",
        "metadata": {"subject": "Plane Geometry"},
    }
    return row_fields | fields


def test_free_answers_are_compared_by_their_values():
    """The reference answers are as the data write them."""
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
        assert [pair for pair in pairs if same_answer(*pair)[0] is not expected] == []


def test_an_answer_is_found_in_a_response():
    answers = {
        r"So the area is 4 and hence \boxed{9\pi}.": (r"9\pi", "box"),
        "The radius is 3.\nThe answer is 28.3 cm. Done.": ("28.3 cm", "stated"),
        r"\frac{\sqrt{30}}{2}": (r"\frac{\sqrt{30}}{2}", "whole"),
        "First we halve 8.\nTherefore the side is 4.": ("4", "conclusion"),
    }
    for response, expected in answers.items():
        assert tuple(extract_by_rules(row(1, response, "5.0"))) == expected


def test_options_and_the_right_one_are_read_as_the_data_write_them():
    problem = row(1, "", "D")
    assert choices_of(problem) == ["40°", "60°", "120°", "140°"]
    assert choices_of({**problem, "question": "Is it?\nChoice:\nA. True\nB. False"}) == [
        "True",
        "False",
    ]
    assert choices_of({**problem, "question": ""}) == []
    assert choices_of({**problem, "question": "", "question_for_eval": QUESTION})[3] == "140°"
    for answer, letter in {"D": "D", "(C)": "C", "140": "D", "A\nC": None}.items():
        assert reference_letter({**problem, "answer": answer}, choices_of(problem)) == letter


def test_scores_by_version_type_and_subject_and_overall_without_text_only(tmp_path, capsys):
    rows = [
        row(1, r"\boxed{D}", "D", "Text Dominant"),
        row(2, "The answer is 140°.", "D", "Text Lite"),
        row(3, "The answer is 60°.", "D", "Vision Intensive"),
        row(4, "D", "D", "Vision Only", question=""),
        row(5, r"\boxed{113.10}", r"Area $=113.1 \mathrm{~cm}^{2}$", "Vision Dominant"),
        row(6, r"\boxed{1}", "5.5", TEXT_ONLY),
        row(7, r"\boxed{A}", "D", TEXT_ONLY) | {"answer": "A\nC"},
    ]
    result = scored(tmp_path, rows)
    assert [item["verdict"] == "correct" for item in result["items"]] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert result["correct"] == 4
    assert result["total"] == 7
    overall = result["overall"]["five_versions"]
    assert overall["correct"] == 4
    assert overall["total"] == 5
    versions = {
        name: (cell["correct"], cell["total"]) for name, cell in result["groups"]["version"].items()
    }
    assert versions[TEXT_ONLY] == (0, 2)
    assert versions["Vision Only"] == (1, 1)
    assert versions.keys() == set(VERSIONS)
    assert result["groups"]["subject"]["Plane Geometry"]["total"] == 7
    output = capsys.readouterr().out
    assert "rules ours, in place of the official judge" in output
    assert "not the official score" in output
    assert "warning: 1 reference answer with several letters" in output


def test_a_judge_reads_the_answer_where_it_is_given(tmp_path, serve):
    def reads(body: dict[str, Any], _: int) -> Reply:
        question = body["messages"][1]["content"]
        return completion(
            "<answer>D</answer>" if "140°" in question else "<answer>113.1 cm²</answer>"
        )

    server = serve(reads)
    rows = [
        row(1, "It is the last of them.", "D"),
        row(2, "Pi times the square of six, in words.", r"Area $=113.1 \mathrm{~cm}^{2}$"),
        row(3, "By rule it would be no letter.", "D"),
    ]
    words = ["--extraction", "judge", "--judge-url", server.url, "--judge-model", "j"]
    result = scored(tmp_path, rows, *words)
    assert result["correct"] == 3
    assert result["extraction_mix"] == {"judge": 3}
    assert result["rules"]["judge"] == "j"
    assert scored(tmp_path, rows)["correct"] < 3


def test_a_judge_decides_on_free_answers_that_our_rules_do_not_find_right(tmp_path, serve, capsys):
    questions: list[str] = []

    def judges(body: dict[str, Any], _: int) -> Reply:
        content = body["messages"][1]["content"]
        if "<reply>" in content:
            return completion(
                f"<answer>{content.split('<reply>')[1].split('</reply>')[0].strip()}</answer>"
            )
        questions.append(content)
        return completion(
            "<answer>maybe</answer>"
            if "a guess" in content
            else f"<answer>{int('50 cm' in content)}</answer>"
        )

    server = serve(judges)
    rows = [
        row(1, "50 cm", "0.5 m"),
        row(2, "60 cm", "0.5 m"),
        row(3, "0.5 m", "0.5 m"),  # by our rules, so not asked
        row(4, "B", "D"),  # options are compared by their letters
        row(5, "a guess", "0.5 m"),
        row(6, "NONE", "0.5 m"),
    ]
    words = ["--extraction", "judge", "--judge-url", server.url, "--judge-model", "j"]
    result = scored(tmp_path, rows, *words, "--judge-attempts", "2", "--judge-wait", "0.001")
    verdicts = [item["verdict"] for item in result["items"]]
    assert verdicts == ["correct", "wrong", "correct", "wrong", "failed", "wrong"]
    assert len(questions) == 4
    assert all("<reference>\n0.5 m\n</reference>" in question for question in questions)
    assert result["extraction_failed"] == 1
    assert "judge" in result["rules"]["rules"]
    printed = capsys.readouterr()
    assert "note: j was the judge" in printed.out
    assert "the judge failed on 1 row" in printed.err
    assert scored(tmp_path, rows)["correct"] == 1


def test_the_six_versions_are_asked_from_the_files_of_the_hub(tmp_path):
    rows = mathverse_rows(5) + mathverse_rows(2, versions=[TEXT_ONLY])
    folder = write_mathverse(tmp_path / "d", rows)

    def load(*words: str) -> list[Any]:
        command = ["infer", "--model", "m", "--data", str(folder), "--output", "o", *words]
        return BENCHMARK.load(parse(command, BENCHMARK).ask.data).problems

    assert [problem.fields["problem_version"] for problem in load()] == list(VERSIONS[:5])
    only = load("--split", "testmini_text_only")
    assert [(problem.pid, problem.n_images, problem.images()) for problem in only] == [
        ("text_only_1", 0, []),
        ("text_only_2", 0, []),
    ]
    every = load("--split", "all", "--query", "wo")
    assert len({problem.pid for problem in every}) == 7
    assert every[0].images()[0].size == (56, 56)
    assert every[0].prompt.startswith("Please directly answer")
    assert load()[0].prompt.startswith("Please first conduct reasoning")


def test_the_hub_is_asked_for_the_part_of_each_split(monkeypatch):
    requests: list[tuple[str, str | None, str]] = []

    def hub(name: str, config: str | None, split: str, revision: str | None) -> datasets.Dataset:
        requests.append((name, config, split))
        versions = [TEXT_ONLY] if split == "testmini_text_only" else VERSIONS[:5]
        return datasets.Dataset.from_list(mathverse_rows(2, versions=versions), features=MATHVERSE)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    words = [
        "infer",
        "--model",
        "m",
        "--data",
        "AI4Math/MathVerse",
        "--output",
        "o",
        "--split",
        "all",
    ]
    assert len(BENCHMARK.load(parse(words, BENCHMARK).ask.data).problems) == 4
    assert requests == [
        ("AI4Math/MathVerse", split, split) for split in ("testmini", "testmini_text_only")
    ]
