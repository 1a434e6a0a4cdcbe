"""Knights and knaves, drawn or the reference's: one solution each, splits do not meet, strict
rewards.
"""

import hashlib
import re
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.data.dataset import load_split, read_manifest
from adora_vl.evals.options import DataOptions, ScoreOptions
from adora_vl.evals.scoring.score import score_predictions
from adora_vl.rewards.knights import knights_verdict
from adora_vl.synthetic.knights import PEOPLE_NAMES, claim_holds, find_solutions, generate
from data_prep.cli import main
from eval.knights import BENCHMARK


def people_and_statements(problem: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The people, and pairs of a speaker and a sentence, from the words of a puzzle alone."""
    people = re.search(r"You meet (.*?)\. ", problem).group(1).replace(" and ", ", ").split(", ")
    return people, re.findall(r"(\w+) says: (.*?)\.", problem)


def sentence_holds(words: str, knight: dict[str, bool]) -> bool:
    """Tell whether a sentence is true, read as English and not by the generator's tables.

    `knight`: by name, whether a person is a knight.
    """
    names = re.findall(r"[A-Z]\w+", words)
    first = knight[names[0]]
    last = knight[names[-1]]
    if words.endswith("are both knights"):
        return first and last
    if words.endswith("are both knaves"):
        return not first and not last
    if words.endswith("are of the same kind"):
        return first == last
    if words.startswith("exactly one of"):
        return first != last
    if words.startswith("if "):
        return not first or not last
    if " or " in words:
        return first or not last
    return first if words.endswith("knight") else not first


def test_a_puzzle_read_as_english_has_exactly_the_golds_solution(subtests):
    """A puzzle's text has one solution, the gold, among all 2ⁿ assignments of its n people.

    The sentences are read as English, and not by the generator's tables.
    """
    for people in range(2, 9):
        with subtests.test(f"{people}"):
            for row in generate(12, people=(people, people), seed=people):
                names, statements = people_and_statements(row["problem"])
                assert len(names) == len(statements) == people
                assert set(names) <= set(PEOPLE_NAMES)
                solutions = []
                for kinds in product((True, False), repeat=people):
                    is_knight = dict(zip(names, kinds, strict=True))
                    # a knight's sentences are true, and a knave's are false
                    fits = [
                        sentence_holds(words, is_knight) == is_knight[speaker]
                        for speaker, words in statements
                    ]
                    if all(fits):
                        roles = [
                            f"{name} is a {'knight' if is_knight[name] else 'knave'}"
                            for name in names
                        ]
                        solutions.append(", ".join(roles))
                assert solutions == [row["answer"]]
                assert knights_verdict(row["meta"]["solution"], row["answer"])[0] == "correct"
                assert knights_verdict(row["meta"]["slip"], row["answer"])[0] == "wrong"


def test_equal_arguments_give_equal_rows_and_splits_share_no_puzzle():
    """Equal arguments give equal puzzles, and no puzzle is in both splits.

    A hash of the text decides the split: a quarter of all texts are of the test split.
    """
    assert list(generate(30, seed=4)) == list(generate(30, seed=4))
    train = {row["problem"] for row in generate(200, split="train", people=(3, 4))}
    test = {row["problem"] for row in generate(200, split="test", people=(3, 4))}
    assert len(train) == len(test) == 200
    assert not train & test
    # the text alone decides the split, whatever the seed: a quarter of all hashes are of `test`
    texts_by_hash = {
        text
        for text in train | test
        if int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) < 2**32 / 4
    }
    assert texts_by_hash == test
    assert {row["meta"]["family"] for row in generate(14)} == {
        f"{count} people" for count in range(2, 9)
    }


def test_the_benchmark_scores_by_number_of_people(tmp_path):
    """The benchmark has a score of its own for each number of people, here three and four.

    Of four answers the second one is no solution.
    """
    main(
        [
            "knights",
            "--output",
            str(tmp_path / "d"),
            "--rows",
            "2",
            "--test-rows",
            "4",
            "--people",
            "3-4",
        ]
    )
    options = DataOptions(data=str(tmp_path / "d"), split="test")
    problems = BENCHMARK.load(options).problems
    assert len(problems) == 4
    assert not any(problem.n_images for problem in problems)
    gold = [problem.fields["answer"] for problem in problems]
    responses = [rf"\boxed{{{gold[0]}}}", "?", rf"\boxed{{{gold[2]}}}", rf"\boxed{{{gold[3]}}}"]
    rows = [
        {**problem.fields, "response": text}
        for problem, text in zip(problems, responses, strict=True)
    ]
    result = score_predictions(BENCHMARK, rows, ScoreOptions()).score
    assert result["correct"] == 3
    assert result["total"] == 4
    # the second puzzle, which is not solved, is one of two with four people
    assert result["groups"]["people"]["4 people"]["accuracy"] == 1 / 2
    assert result["groups"]["half"]["2 to 5 people (ID)"]["total"] == 4
    assert [item["verdict"] for item in result["items"]] == [
        "correct",
        "unparseable",
        "correct",
        "correct",
    ]


PUBLISHED_PUZZLES_FOLDER = Path(__file__).parents[4] / "shared" / "data" / "kk"
KNIGHT_CLAIM = ("telling-truth", 0)
KNAVE_CLAIM = ("lying", 1)


def test_a_claim_is_true_of_exactly_these(subtests):
    """A claim about two people holds for exactly those of their kinds that its words say.

    Each case: the claim, and the kinds of the two (knight: True) for which it holds.
    """
    cases = [
        (KNIGHT_CLAIM, {(True, False), (True, True)}),
        (KNAVE_CLAIM, {(True, False), (False, False)}),
        (("not", KNIGHT_CLAIM), {(False, False), (False, True)}),
        (("and", KNIGHT_CLAIM, KNAVE_CLAIM), {(True, False)}),
        (("or", KNIGHT_CLAIM, KNAVE_CLAIM), {(True, False), (True, True), (False, False)}),
        (("->", KNIGHT_CLAIM, KNAVE_CLAIM), {(True, False), (False, False), (False, True)}),
        (("<=>", KNIGHT_CLAIM, KNAVE_CLAIM), {(True, False), (False, True)}),
    ]
    for claim, true_for in cases:
        with subtests.test(f"{claim!r:.80}"):
            assert {
                kinds for kinds in product((True, False), repeat=2) if claim_holds(claim, kinds)
            } == true_for


def test_another_claim_is_refused(subtests):
    for claim in [("xor", KNIGHT_CLAIM, KNAVE_CLAIM), ("telling-truth", 2), ("and",), "lying", 3]:
        with subtests.test(f"{claim!r:.80}"), pytest.raises(ValueError, match="is no claim"):
            claim_holds(claim, (True, False))


def test_people_who_vouch_for_each_other_fit_twice():
    """Both are knights, or both are knaves, so such a puzzle would have two solutions."""
    assert find_solutions((("telling-truth", 1), ("telling-truth", 0))) == [
        (True, True),
        (False, False),
    ]


def puzzle_record(**changed: Any) -> dict[str, Any]:
    """A puzzle as its published file has it. Ada: Ben lies. Ben: Ada and I are both knights."""
    return {
        "quiz": "You meet 2 inhabitants: Ada, and Ben. Ada says that Ben lies. So who is who?",
        "names": ["Ada", "Ben"],
        "solution": [True, False],
        "statements": "(('lying', 1), ('and', ('telling-truth', 0), ('telling-truth', 1)))",
        "extra_info": {"split": "train", "index": 0},
        **changed,
    }


def prepare_puzzles(tmp_path: Path, *records: dict[str, Any], words: tuple[str, ...] = ()) -> int:
    """Write records into a Parquet file and prepare it; return the exit code."""
    pq.write_table(pa.Table.from_pylist(list(records)), tmp_path / "kk.parquet")
    source = ["--source", "parquet", "--input", str(tmp_path / "kk.parquet")]
    return main(["knights", *source, "--output", str(tmp_path / "out"), *words])


def test_rows_become_problems_that_ask_for_a_box_or_for_nothing(tmp_path):
    """A published puzzle gets a sentence that asks for a box, or none with `--question plain`."""
    assert prepare_puzzles(tmp_path, puzzle_record()) == 0
    (row,) = load_split(str(tmp_path / "out"), "train")
    assert row["answer"] == "Ada is a knight, Ben is a knave"
    assert row["images"] == []
    assert (
        row["problem"]
        == puzzle_record()["quiz"] + " Put the answer in a box, like \\boxed{Ada is a knight, ...}."
    )
    assert (
        prepare_puzzles(tmp_path, puzzle_record(), words=("--question", "plain", "--overwrite"))
        == 0
    )
    assert load_split(str(tmp_path / "out"), "train")[0]["problem"] == puzzle_record()["quiz"]
    assert read_manifest(tmp_path / "out")["source"] == "knights"


BROKEN_RECORD_AND_REASON: dict[str, tuple[dict[str, Any], str]] = {
    "another solution": ({"solution": [False, False]}, "is not the only one that fits"),
    "no claim": ({"statements": "(('lying', 1), ('maybe', 0))"}, "is no claim about"),
    "code": ({"statements": "__import__('os').getcwd()"}, "ValueError: malformed node"),
    "no Python": ({"statements": "((("}, "SyntaxError"),
    "too few people": ({"names": ["Ada"]}, "2 to 8 words"),
    "names alike": ({"names": ["Ada", "Ada"]}, "for 1 people"),
    "another split": ({"extra_info": {"split": "dev", "index": 0}}, "split is 'dev'"),
    "no split": ({"extra_info": None}, "TypeError"),
}


def test_a_row_that_does_not_hold_is_named_and_nothing_is_written(capsys, case_folder):
    """A faulty puzzle is refused with its row and its fault, and nothing is written.

    It is the second of two rows, with each fault of `BROKEN_RECORD_AND_REASON` in turn.
    """
    for kind in BROKEN_RECORD_AND_REASON:
        with case_folder(kind) as folder:
            changed_fields, words_of_error = BROKEN_RECORD_AND_REASON[kind]
            broken_record = puzzle_record(quiz="Another?", **changed_fields)
            assert prepare_puzzles(folder, puzzle_record(), broken_record) == 2
            stderr = capsys.readouterr().err
            assert stderr.strip().count("\n") == 0
            assert "row 1 of" in stderr
            assert words_of_error in stderr
            assert not (folder / "out").exists()


def test_the_same_puzzle_twice_and_other_files_are_refused(tmp_path, capsys):
    """A puzzle that comes twice is refused, and so are other columns and what is no table."""
    assert prepare_puzzles(tmp_path, puzzle_record(), puzzle_record()) == 2
    assert "row 1 of" in (stderr := capsys.readouterr().err)
    assert "the same puzzle as row 0" in stderr
    assert prepare_puzzles(tmp_path, {"problem": "1 + 1", "answer": "2"}) == 2
    assert "has no column 'quiz'" in capsys.readouterr().err
    (tmp_path / "kk.parquet").write_bytes(b"no Parquet")
    arguments = ["knights", "--source", "parquet", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--input", str(tmp_path / "kk.parquet")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([*arguments, "--input", str(tmp_path / "empty")]) == 2
    assert "has no Parquet file" in capsys.readouterr().err


def test_options_of_the_other_source_are_refused(capsys, case_folder):
    """An option that belongs to the other source of puzzles is refused.

    Puzzles are drawn, or read from Parquet, and each source has options of its own.
    """
    cases = [
        (["--source", "parquet"], "input: --source parquet needs it"),
        (
            ["--source", "parquet", "--input", "x", "--rows", "5"],
            "rows: 5 does not go with --source parquet",
        ),
        (
            ["--source", "parquet", "--input", "x", "--seed", "0"],
            "seed: 0 does not go with --source parquet",
        ),
        ([], "rows: --source drawn needs it"),
        (
            ["--rows", "5", "--people", "1-9"],
            "argument --people: '1' is not a whole number from 2 to 8",
        ),
        (["--rows", "5", "--people", "5-3"], "'5-3' has the larger number first; write 3-5"),
        (["--rows", "5", "--question", "plain"], "question: plain does not go with --source drawn"),
    ]
    for arguments, message in cases:
        with case_folder(f"{arguments!r:.80}") as folder:
            assert main(["knights", "--output", str(folder / "out"), *arguments]) == 2
            assert message in capsys.readouterr().err


@pytest.mark.skipif(
    not PUBLISHED_PUZZLES_FOLDER.is_dir(),
    reason="ADORA's own puzzles are not beside this checkout (kk in ../shared/data)",
)
def test_adoras_own_puzzles_are_read(tmp_path):
    """ADORA's published puzzles are read, 100 of three people and 100 of seven, and all verify."""
    arguments = [
        "knights",
        "--source",
        "parquet",
        "--input",
        str(PUBLISHED_PUZZLES_FOLDER),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 0
    rows = load_split(str(tmp_path / "out"), "test")
    assert [row["meta"]["family"] for row in rows] == ["3 people"] * 100 + ["7 people"] * 100
    assert all(
        knights_verdict(row["meta"]["solution"], row["answer"])[0] == "correct" for row in rows
    )
