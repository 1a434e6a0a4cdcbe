"""A problem with choices is asked with them: in training, by the evaluator, and where a person
looks at the data.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from adora_vl.builtin.builtin_data import data_folders
from adora_vl.checkpoint.fingerprint import (
    Fingerprint,
    compute_fingerprint,
    fingerprint_differences,
)
from adora_vl.data.dataset import load_split, split_files
from adora_vl.data.loading import load_rows, script_arguments_for_fingerprint
from adora_vl.data.prompts import DEFAULT_PROMPT, with_letters
from adora_vl.evaluation import load_evaluation_plan
from adora_vl.record.card import model_card
from adora_vl.record.manifest import TrainingData, run_manifest
from adora_vl.train import main as train
from adora_vl.utils.errors import UserError
from data_prep.cli import main as data_prep
from data_prep.survey import survey_dataset, whole_prompt_lines
from eval.command import parse_command as parse_evaluation
from eval.compare import main as compare
from eval.geometry3k import BENCHMARK
from tests.support.checkpoints import start_of_run, write_checkpoint
from tests.support.commands import parse
from tests.support.user_tables import run_convert, write_user_jsonl

CPU = [
    "--use_cpu",
    "true",
    "--bf16",
    "false",
    "--model_name_or_path",
    "tiny",
    "--output_dir",
    "nowhere",
]
ROWS: list[dict[str, Any]] = [
    {"q": "Who?", "a": "Ada", "c": None, "i": "pics/0.png"},
    {"q": "How long is AB?", "a": "B", "c": ["3", r"4 \sqrt { 2 }", "5"], "i": "pics/1.png"},
    {"q": "How long is BC?", "a": "3", "c": [], "i": "pics/2.png"},
]
# what the default template makes of `ROWS`
ASKED_TEXTS = [
    "Who?",
    "How long is AB?\nChoices:\n(A) 3\n(B) 4 \\sqrt { 2 }\n(C) 5\n"
    "Answer with the letter of the right choice.",
    "How long is BC?",
]
# the prompt of the second row, with the default system prompt
LINES_OF_WHOLE_PROMPT = [
    "[system]",
    r"Please reason step by step, and put your final answer within \boxed{}.",
    "[user]",
    *("<image>" + ASKED_TEXTS[1]).splitlines(),
]


@pytest.fixture(scope="module")
def data_with_choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with `ROWS` as training split and as test split; one of three rows has choices.

    The questions of the test split have "Again." behind them, since equal ones would be leaks.
    """
    root = tmp_path_factory.mktemp("choices")
    source = write_user_jsonl(root / "in", ROWS)
    (root / "both").mkdir()
    (root / "both" / "pics").mkdir()
    for number in range(3):
        picture = (root / "in" / "pics" / f"{number}.png").read_bytes()
        # one for the training row, and one for the test row
        (root / "both" / "pics" / f"{number}.png").write_bytes(picture)
        (root / "both" / "pics" / f"{number}t.png").write_bytes(picture)
    (root / "both" / "train.jsonl").write_bytes(source.read_bytes())
    tests = [{**row, "q": f"{row['q']} Again.", "i": row["i"].replace(".", "t.")} for row in ROWS]
    (root / "both" / "test.jsonl").write_text("\n".join(map(json.dumps, tests)))
    columns = ("problem=q", "answer=a", "choices=c", "images=i")
    assert run_convert(root / "both", root / "data", "--name", "mine", columns=columns) == 0
    return root / "data"


@pytest.fixture(scope="module")
def drawn_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data set of drawn problems."""
    folder = tmp_path_factory.mktemp("drawn") / "synthetic"
    assert (
        data_prep(["synthetic", "--output", str(folder), "--rows", "40", "--test-rows", "10"]) == 0
    )
    return folder


def script_arguments(*arguments: object) -> Any:
    """Return the script arguments of a training command with these words."""
    return parse([*CPU, *map(str, arguments)])[0]


def training_prompts(folder: Path, *words: str) -> list[str]:
    """Return the text of each row's last message."""
    script = script_arguments("--dataset_name", folder, *words)
    rows = load_rows(script, data_folders(script), seed=0)
    return [row["prompt"][-1]["content"] for row in rows]


def evaluation_options(folder: Path, *words: str) -> Any:
    """Return the options that name the data of an evaluation with these words."""
    arguments = ["infer", "--model", "tiny", "--data", str(folder), "--output", "o", *words]
    return parse_evaluation(arguments, BENCHMARK).ask_options.data


def evaluation_prompts(folder: Path, *words: str) -> list[str]:
    """Return the prompt of each problem of an evaluation."""
    problems = BENCHMARK.load(evaluation_options(folder, *words)).problems
    return [problem.prompt for problem in problems]


def fingerprint_of(folder: Path, *words: str) -> Fingerprint:
    """Return the fingerprint of a training on `folder`, by which a checkpoint is known to fit."""
    script = script_arguments("--dataset_name", folder, *words)
    settings = script_arguments_for_fingerprint(
        script, load_rows(script, [str(folder)], seed=0).data.table
    )
    return compute_fingerprint(
        settings,
        data=[folder],
        model="m",
        revision="r",
        processes=1,
    )


def test_training_and_evaluations_ask_in_the_same_words(
    data_with_choices: Path, subtests: pytest.Subtests
) -> None:
    """A problem is asked alike in training, in evaluations during it, and by `eval.problems`.

    The test split, which is evaluated, has the questions of the training with "Again." behind.
    """
    alone = [row["q"] for row in ROWS]
    cases: list[tuple[str | None, list[str], list[str], list[str]]] = [
        (DEFAULT_PROMPT, [], [], ASKED_TEXTS),
        (None, ["--adora_prompt", "null"], ["--prompt", "none"], alone),
    ]
    for prompt, train_words, evaluation_words, texts in cases:
        with subtests.test(f"{prompt}"):
            evaluated_texts = [text.replace("?", "? Again.", 1) for text in texts]
            assert training_prompts(data_with_choices, *train_words) == texts
            assert evaluation_prompts(data_with_choices, *evaluation_words) == evaluated_texts
            config = parse(
                [*CPU, "--eval_strategy", "steps", "--eval_steps", "1", "--use_vllm", "true"]
            )[1]
            plan = load_evaluation_plan(config, [str(data_with_choices)], prompt)
            assert plan is not None
            during = [problem.prompt for problem in plan.tasks[0].problems]
            assert during == evaluation_prompts(data_with_choices, *evaluation_words)


def test_letters_that_choices_carry_are_not_shown_twice() -> None:
    """A choice that only looks like a letter stays as it is."""
    assert with_letters(["A. 3", "(B) 4"]) == with_letters(["3", "4"]) == ["(A) 3", "(B) 4"]
    for choices in (["(a)", "(b)"], ["A. 3"], ["B. 3", "A. 4"], ["A. 3", "4"], ["A", "B"]):
        texts_behind_letters = [line[4:] for line in with_letters(choices)]
        assert texts_behind_letters == choices


def test_drawn_problems_are_asked_as_before(drawn_data: Path) -> None:
    """The tiny model has learned those words, and the figures of the demo depend on them."""
    assert training_prompts(drawn_data) == list(load_split(drawn_data, "train")["problem"])
    assert evaluation_prompts(drawn_data) == list(load_split(drawn_data, "test")["problem"])


def test_a_data_set_without_the_column_is_read(drawn_data: Path, tmp_path: Path) -> None:
    """Prepared data without the column `choices` are asked as those in which it is null.

    Data that was prepared before there were choices lacks the column.
    """
    (stored,) = split_files(drawn_data)["train"]
    (tmp_path / "data").mkdir()
    pq.write_table(pq.read_table(stored).drop_columns(["choices"]), tmp_path / "data" / stored.name)
    assert training_prompts(tmp_path) == training_prompts(drawn_data)
    assert evaluation_prompts(tmp_path, "--split", "train") == training_prompts(drawn_data)
    assert survey_dataset(tmp_path).example is not None


def test_a_run_of_before_goes_on_with_its_prompt_or_is_refused(
    data_with_choices: Path, drawn_data: Path, tmp_path: Path
) -> None:
    """A run from before the default template goes on with `adora_prompt: null`, or without choices.

    The fingerprint of such a run says null for the key, as that of a run without a template does.
    With choices the default template would show them, so it is another run.
    """
    fingerprint_before = {
        folder: {**fingerprint_of(folder), "adora_prompt": "null"}
        for folder in (data_with_choices, drawn_data)
    }
    for folder, prompt_words in (
        (drawn_data, ()),
        (data_with_choices, ("--adora_prompt", "null")),
        (data_with_choices, ("--adora_prompt", "{problem}")),
    ):
        fingerprint_now = fingerprint_of(folder, *prompt_words)
        assert fingerprint_differences(fingerprint_before[folder], fingerprint_now) == []
    checkpoint = write_checkpoint(tmp_path, 10, fingerprint_before[data_with_choices])
    with pytest.raises(
        UserError, match=r"of another run: adora_prompt: null -> \"{problem}\\n.*; set it back"
    ):
        start_of_run(tmp_path, fingerprint=fingerprint_of(data_with_choices))
    started = start_of_run(
        tmp_path, fingerprint=fingerprint_of(data_with_choices, "--adora_prompt", "null")
    )
    assert started.checkpoint == str(checkpoint)


def test_answers_of_before_count_for_the_same_questions_alone(
    data_with_choices: Path, drawn_data: Path
) -> None:
    """The fingerprint of an evaluation has the prompt template only if it changes a question.

    So stored answers without a template count for data without choices alone.
    """
    for folder, asked_with in ((drawn_data, None), (data_with_choices, DEFAULT_PROMPT)):
        options = evaluation_options(folder)
        unused = BENCHMARK.load(options).unused_options
        prompt = None if "prompt" in unused else options.prompt
        assert prompt == asked_with  # goes into the fingerprint, where it was null


def test_one_whole_prompt_is_shown_where_a_person_looks(
    data_with_choices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` prints one whole prompt with choices, and its page shows it once."""
    assert data_prep(["inspect", str(data_with_choices)]) == 0
    output = capsys.readouterr().out
    assert "\n".join(f"  {line}" for line in LINES_OF_WHOLE_PROMPT) in output
    assert "of mine/train/1, as a training" in output
    page = data_with_choices.with_name("data.html").read_text()
    assert (
        page.count(
            "\n".join(
                f"  {line.replace('<image>', '&lt;image&gt;')}" for line in LINES_OF_WHOLE_PROMPT
            )
        )
        == 1
    )


def test_convert_shows_it_too_without_letting_the_row_command_the_terminal(tmp_path, capsys):
    """`convert` prints one whole prompt without the control characters that a row may have.

    The row has an escape code that sets a terminal's title, and a mark that turns text round.
    """
    source = write_user_jsonl(
        tmp_path / "in", [{"q": "Which\x1b]0;owned\x07?", "a": "A", "c": ["1\u202e", "2"]}]
    )
    assert (
        run_convert(source, tmp_path / "out", columns=("problem=q", "answer=a", "choices=c")) == 0
    )
    output = capsys.readouterr().out
    assert "  [user]\n  Which ]0;owned ?\n  Choices:\n  (A) 1 \n  (B) 2\n" in output
    assert "\x1b" not in output


def test_a_prompt_that_cannot_be_made_is_one_line() -> None:
    row = {"id": "mine/1", "problem": "Which?", "choices": ["<image>", "2"], "images": []}
    assert whole_prompt_lines(row) == [
        "the prompt of mine/1 cannot be made: its text has 1 <image> with 0 images; give one for "
        "each image, or none to have them before the text"
    ]


@pytest.mark.slow
def test_the_dry_run_shows_it_in_the_words_of_the_models_template(
    data_with_choices, tmp_path, capsys
):
    """A dry run prints one whole prompt with the tokens of the model's chat template, here Qwen's.

    With both prompts null there are no choices in it, and a written config keeps the nulls.
    """
    arguments = [
        "--num_generations",
        "2",
        "--per_device_train_batch_size",
        "2",
        "--dry-run",
        "--dataset_name",
        str(data_with_choices),
    ]
    file = tmp_path / "written.yaml"
    assert train([*CPU, *arguments]) in (0, 1)
    output = capsys.readouterr().out.split("One whole prompt, of mine/train/1\n")[1]
    start = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    assert (
        f"{LINES_OF_WHOLE_PROMPT[1]}<|im_end|>\n{start}{ASKED_TEXTS[1]}<|im_end|>\n<|im_start|>assistant\n"
        in output
    )
    alone = ["--adora_prompt", "null", "--adora_system_prompt", "null", "--write-config", str(file)]
    assert train([*CPU, *arguments, *alone]) in (0, 1)
    assert "Choices:" not in capsys.readouterr().out
    script = parse(["--config", str(file)])[0]
    assert script.adora_prompt is script.adora_system_prompt is None, "null is written down too"


def test_the_card_of_a_model_shows_how_choices_were_asked(
    data_with_choices: Path, drawn_data: Path
) -> None:
    """The model card has the lines of the choices only for data with choices."""

    def card(folder: Path) -> str:
        """Return the model card of a training on this data set."""
        script, config, model = parse([*CPU, "--dataset_name", str(folder)])
        manifest = run_manifest(
            script,
            config,
            model,
            arguments=[],
            data=TrainingData(folders=[str(folder)], row_count=3),
            fingerprint=fingerprint_of(folder),
            batch_plan="",
            processes=1,
            checkpoint=None,
        )
        assert manifest["config"]["adora_prompt"] == DEFAULT_PROMPT, (
            "an evaluation on other data asks with it"
        )
        return model_card(manifest, [], 1)

    assert (
        "Find x.\nChoices:\n(A) 12\n(B) 13\nAnswer with the letter of the right choice.\n"
        in card(data_with_choices)
    )
    assert "Choices" not in card(drawn_data)


def test_quoted_figures_of_open_questions_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison notes that published figures are of open questions if this one showed choices.

    Published figures of Geometry3K are of questions without their choices. The prompt None shows
    none.
    """
    for prompt, is_noted in ((None, False), (DEFAULT_PROMPT, True)):
        items = [{"pid": "1", "verdict": "correct"}]
        score = {
            "benchmark": "geometry3k",
            "accuracy": 1.0,
            "total": 1,
            "interval_95": [0.2, 1.0],
            "groups": {},
            "items": items,
            "rules": {},
            "data_set": {"sources": ["geometry3k"], "splits": ["test"], "problems": 601},
            "fingerprint": {"fields": {"prompt": prompt}},
        }
        (tmp_path / "score.json").write_text(json.dumps(score))
        assert compare([str(tmp_path / "score.json")]) == 0
        assert ("the quoted rows are of open questions" in capsys.readouterr().out) == is_noted
        assert compare([str(tmp_path / "score.json"), "--no-published"]) == 0
        assert "open questions" not in capsys.readouterr().out
