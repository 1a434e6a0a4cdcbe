"""Data of the user's own in a training config: columns, several data sets, prompts; and that a
resume sees the same.
"""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.builtin.builtin_data import data_folders
from adora_vl.checkpoint.fingerprint import compute_fingerprint, fingerprint_differences
from adora_vl.conversion import convert as convert_module
from adora_vl.conversion.convert import ensure_converted
from adora_vl.conversion.tables import open_local
from adora_vl.data.dataset import load_split, read_manifest, row_count, write_split
from adora_vl.data.loading import draw_mixture, load_rows
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT, SYSTEM_PROMPTS
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.engines import build_settings
from adora_vl.evaluation import load_evaluation_plan
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.record.card import model_card
from adora_vl.record.manifest import TrainingData, describe_run, run_manifest
from adora_vl.synthetic.generate import generate
from adora_vl.train import main as train
from adora_vl.utils.errors import UserError
from eval.command import parse_command as parse_evaluation
from eval.geometry3k import BENCHMARK
from tests.support.commands import parse
from tests.support.row_order import row_ids_of_epochs
from tests.support.user_tables import rows_with_images, run_convert, write_user_jsonl

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
COLUMNS = ("problem=q", "answer=a")


@pytest.fixture(scope="module")
def large_and_small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two prepared folders, `large` and `small`, with 24 and 5 training rows.

    They were made of 30 rows with the further column `tip`, and of 6; a fifth is the test split.
    """
    root = tmp_path_factory.mktemp("sets")
    large_rows = [{"q": f"large {number}?", "a": number, "tip": "think"} for number in range(30)]
    small_rows = [{"q": f"small {number}?", "a": number} for number in range(6)]
    for name, rows, columns in (
        ("large", large_rows, (*COLUMNS, "tip=tip")),
        ("small", small_rows, COLUMNS),
    ):
        source = write_user_jsonl(root / f"in-{name}", rows)
        options = ("--name", name, "--test-share", "0.2")
        assert run_convert(source, root / name, *options, columns=columns) == 0
    return [root / "large", root / "small"]


def script_arguments(*arguments: object) -> Any:
    """Return the script arguments of a training command with these words."""
    return parse([*CPU, *map(str, arguments)])[0]


def test_every_share_is_kept_and_every_row_comes() -> None:
    """A mixture has every row at least once and each data set's share; its seed decides the order.

    300 and 50 rows give a list of row numbers, in which rows 300 to 349 repeat.
    """
    rows = draw_mixture([300, 50], [0.7, 0.3], seed=1)

    assert set(rows) == set(range(300 + 50))
    rows_of_second = sum(row >= 300 for row in rows)
    assert rows_of_second / len(rows) == pytest.approx(0.3, abs=0.06)
    assert rows == draw_mixture([300, 50], [0.7, 0.3], seed=1)
    assert rows != draw_mixture([300, 50], [0.7, 0.3], seed=2)


def test_a_mixture_goes_on_where_it_was_interrupted(large_and_small: list[Path]) -> None:
    """A run that resumes in its second epoch draws the rows that it would have drawn uninterrupted.

    The epochs drawn are three, and the last two alone.
    """

    def order(epochs: range) -> list[str]:
        script = script_arguments("--dataset_name", *large_and_small, "--adora_mixture", 0.6, 0.4)
        rows = load_rows(script, data_folders(script), seed=3)
        return row_ids_of_epochs(rows, epochs)

    uninterrupted = order(range(3))
    resumed = order(range(1, 3))
    assert uninterrupted[-len(resumed) :] == resumed
    assert len(resumed) == 2 * len(uninterrupted) // 3
    names = Counter(name.split("/")[0] for name in uninterrupted)
    assert names["small"] > 0.2 * len(uninterrupted), "5 rows of 29 would be less"


def test_several_data_sets_are_one_with_the_columns_of_all(large_and_small: list[Path]) -> None:
    """Several data sets become one with the columns of all; a row is null where its set has none.

    `small` lacks the column `tip`.
    """
    script = script_arguments("--dataset_name", *large_and_small)
    rows = load_rows(script, data_folders(script), seed=0)
    assert Counter(row["id"].split("/")[0] for row in rows) == {"large": 24, "small": 5}
    assert {row["tip"] for row in rows} == {"think", None}
    assert rows[0]["prompt"][0]["content"] == SYSTEM_PROMPT
    assert rows[0]["prompt"][1]["content"] == rows[0]["problem"]


def test_a_resume_sees_another_data_set_share_prompt_or_order(
    large_and_small: list[Path], tmp_path: Path
) -> None:
    """Another mixture, order of data sets or prompt changes the fingerprint under its own key.

    A system prompt that is read from a file counts by its text.
    """

    def run_fingerprint(*words: object) -> dict[str, str]:
        """Return the fingerprint of a training with these arguments."""
        script = script_arguments(*words)
        return compute_fingerprint(
            script,
            data=data_folders(script),
            model="m",
            revision="r",
            processes=1,
        )

    system = tmp_path / "system.txt"
    system.write_text("Be brief.\n")
    mixed = ("--dataset_name", *large_and_small, "--adora_mixture", 0.6, 0.4)
    fingerprint_before = run_fingerprint(*mixed)
    assert fingerprint_differences(fingerprint_before, run_fingerprint(*mixed)) == []
    for key, words in {
        "adora_mixture": ("--dataset_name", *large_and_small, "--adora_mixture", 0.5, 0.5),
        "dataset": ("--dataset_name", *large_and_small[::-1], "--adora_mixture", 0.6, 0.4),
        "adora_prompt": (*mixed, "--adora_prompt", "{problem}!"),
        "adora_system_prompt": (*mixed, "--adora_system_prompt", system),
    }.items():
        (difference,) = fingerprint_differences(fingerprint_before, run_fingerprint(*words))
        assert difference.startswith(f"{key}: ")
    system.write_text("Be very brief.\n")
    with_other_text = run_fingerprint(*mixed, "--adora_system_prompt", system)
    assert "very brief" in with_other_text["adora_system_prompt"]


def test_a_table_is_named_with_its_columns_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that `adora_columns` describes is converted once, and again when its content changes.

    That is also when a picture changes, but not when only its time does. The converted table is
    kept in a cache.
    """
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    rows = rows_with_images([f"pics/{n}.png" for n in range(4)])
    source = write_user_jsonl(tmp_path / "in", rows)
    columns = {"problem": "question", "answer": "label", "images": "image", "choices": "options"}
    arguments = ("--dataset_name", source, "--adora_columns", json.dumps(columns))
    config = tmp_path / "c.yaml"
    config.write_text(
        "adora_columns: {problem: question, answer: label, images: image, choices: options}\n"
    )
    script = script_arguments(*arguments)
    script_of_file = script_arguments("--dataset_name", source, "--config", config)
    assert script_of_file.adora_columns == script.adora_columns == columns
    (folder,) = data_folders(script)
    with pytest.raises(
        UserError, match=r"has its columns already; leave adora_columns out, or name the table$"
    ):
        data_folders(
            script_arguments("--dataset_name", folder, "--adora_columns", json.dumps(columns))
        )

    converted_at = Path(folder, "manifest.json").stat().st_mtime_ns
    assert data_folders(script) == [folder]
    assert Path(folder, "manifest.json").stat().st_mtime_ns == converted_at
    loaded = load_rows(script, [folder], seed=0)
    kinds = [[part["type"] for part in row["prompt"][1]["content"]] for row in loaded]
    assert kinds == [
        ["image", "text"],
        ["text", "image", "text", "image", "text"],
        ["image", "text"],
    ]
    assert [len(row["images"]) for row in loaded] == [1, 2, 1]

    picture = tmp_path / "in" / "pics" / "0.png"
    os.utime(picture, ns=(1, 1))  # of a picture only the time has changed
    assert data_folders(script) == [folder]
    assert Path(folder, "manifest.json").stat().st_mtime_ns == converted_at
    picture.write_bytes(picture.read_bytes() + b"\0")  # now the picture
    assert data_folders(script) == [folder]
    assert Path(folder, "manifest.json").stat().st_mtime_ns != converted_at

    write_user_jsonl(tmp_path / "in", rows[1:])
    data_folders(script)
    manifest = read_manifest(Path(folder))
    assert manifest is not None
    assert manifest["counts"] == {"train": 2}
    write_user_jsonl(tmp_path / "in", rows)
    picture.unlink()
    with pytest.raises(
        UserError, match=r"^dataset_name: .*mine.jsonl' with adora_columns: input: 1 of 3 row"
    ) as error:
        data_folders(script)
    # how many rows, what is wrong with them, and where they are
    assert len(str(error.value).splitlines()) == 3


def test_a_table_that_is_saved_again_while_it_is_converted_is_converted_at_the_next_start(
    tmp_path, monkeypatch
):
    """A table that changes while it is converted is converted again at the next start.

    It has five rows, and seven by the time that its conversion ends.
    """
    table = tmp_path / "t.jsonl"
    convert_table = convert_module.convert

    def write_table(rows: int) -> None:
        lines = [json.dumps({"q": f"What is {n} + {rows}?", "a": n + rows}) for n in range(rows)]
        table.write_text("\n".join(lines) + "\n")

    def convert_while_it_is_saved(*args: Any, **kwargs: Any) -> Any:
        converted = convert_table(*args, **kwargs)
        write_table(7)
        return converted

    write_table(5)
    monkeypatch.setattr(convert_module, "convert", convert_while_it_is_saved)
    for rows in (5, 7):
        folder = ensure_converted(str(table), {"problem": "q", "answer": "a"}, tmp_path / "home")
        assert row_count(folder, "train") == rows


def test_another_data_set_at_the_same_path_with_the_same_times_is_what_is_read(
    tmp_path, monkeypatch
):
    """Other data at the same path with the same times are read, and not those in a cache.

    `datasets` knows a file by path, size and time, and would take the old one from its cache.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for seed in (1, 2):
        rows = list(generate(3, split="train", seed=seed))
        write_split(rows, tmp_path / "data", "train")
        for path in (tmp_path / "data").rglob("*"):
            os.utime(path, (1, 1))  # as tar and rsync put them back
        assert load_split(tmp_path / "data", "train")["problem"][:] == [
            row["problem"] for row in rows
        ]


def test_a_split_of_which_files_are_missing_is_refused(tmp_path: Path) -> None:
    """A split with fewer or more files than their names say is refused.

    A name such as train-00000-of-00002.parquet says how many there are.
    """
    data = tmp_path / "data"
    write_split(list(generate(3, split="train")), tmp_path, "train")
    (file,) = data.iterdir()
    table = pq.read_table(file)
    file.unlink()
    # a download of two files, then with one of them missing
    for number in (0, 1):
        part = table.slice(number, 1)
        pq.write_table(part, data / f"train-0000{number}-of-00002.parquet")
    assert row_count(tmp_path, "train") == 2
    (data / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"has 1 of the 2 files data/train-\*-of-00002.parquet"):
        load_split(tmp_path, "train")
    # Two downloads of one folder, whose files have hashes in their names.
    for suffix in ("1a2b", "3c4d", "5e6f"):
        pq.write_table(table, data / f"train-00000-of-00002-{suffix}.parquet")
    with pytest.raises(UserError, match=r"has 4 files .*, which are 2 by their names; remove"):
        load_split(tmp_path, "train")


PICTURE_BYTES = {"bytes": b"\x89PNG", "path": "a.png"}


@pytest.mark.parametrize(
    ("column", "line"),
    [
        ({"images": [["a.png"], []]}, "the column 'images' of .* is 'list<item: string>', not a"),
        ({"images": [[PICTURE_BYTES], []]}, "is 'list<item: struct<bytes: binary, path: string>>'"),
        ({"images": [[], []], "prompt": ["a", "b"]}, "has a column 'prompt', which is the name of"),
        ({"images": [[], []]}, ""),
    ],
    ids=["paths", "bytes", "prompt", "no pictures"],
)
def test_a_file_of_another_program_that_a_step_could_not_read_is_refused(
    tmp_path: Path, column: dict[str, Any], line: str
) -> None:
    """A Parquet file whose rows a training step could not read is refused with the column.

    Bytes that are not marked as pictures would not be decoded, and `prompt` is what a training
    makes of a row. `line`: a part of the error, empty if the file is taken.
    """
    table = pa.table({"id": ["a", "b"], "problem": ["x", "y"], "answer": ["1", "2"], **column})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "train-00000-of-00001.parquet")
    script = script_arguments("--dataset_name", tmp_path)
    if not line:
        assert load_rows(script, script.dataset_name, seed=0)["id"] == ["a", "b"]
        return
    with pytest.raises(UserError, match=line):
        load_rows(script, script.dataset_name, seed=0)


@pytest.mark.parametrize("name", ["run*", "run?", "run[12]", "run [a] ü", "run{1,2}"])
def test_a_folder_is_read_by_its_name_and_no_neighbour_with_it(tmp_path: Path, name: str) -> None:
    """A folder whose name is a pattern such as `run*` is read alone, without its neighbours.

    `datasets` would take its path as a pattern, which may fit other folders too, or none.
    """
    ids = {}
    for number, folder_name in enumerate((name, "run1", "run2", "runs")):
        rows = list(generate(3, seed=number))
        write_split(rows, tmp_path / folder_name, "train")
        ids[folder_name] = [row["id"] for row in rows]
    folder = tmp_path / name
    assert load_split(folder, "train")["id"] == ids[name]
    script = script_arguments("--dataset_name", f"[{str(folder)!r}]")
    assert load_rows(script, script.dataset_name, seed=0)["id"] == ids[name]


def test_a_table_that_is_put_beside_the_others_is_read_too(tmp_path: Path) -> None:
    """A folder of tables is converted again after another table is put into it."""
    (tmp_path / "in").mkdir()

    def converted_counts(**tables: int) -> Any:
        """The rows by split of the converted folder, after these tables were written into it."""
        for split, rows in tables.items():
            lines = [
                json.dumps({"q": f"How long is side {number} of {split}?", "a": number})
                for number in range(rows)
            ]
            (tmp_path / "in" / f"{split}.jsonl").write_text("\n".join(lines))
        folder = ensure_converted(
            str(tmp_path / "in"), {"problem": "q", "answer": "a"}, tmp_path / "home"
        )
        manifest = read_manifest(folder)
        assert manifest is not None
        return manifest["counts"]

    assert converted_counts(train=3) == {"train": 3}
    assert converted_counts(test=2) == {"train": 3, "test": 2}


def test_a_template_makes_the_prompts_of_training_and_evaluation(
    large_and_small: list[Path],
) -> None:
    """A template with a column of the user's own makes the prompts of training and evaluation."""
    script = script_arguments(
        "--dataset_name", large_and_small[0], "--adora_prompt", "{tip}: {problem}"
    )
    (row, *_) = load_rows(script, data_folders(script), seed=0)
    assert row["prompt"][1]["content"] == f"think: {row['problem']}"
    assert row["problem"].startswith("large ")
    arguments = [
        "infer",
        "--model",
        "m",
        "--data",
        str(large_and_small[0]),
        "--output",
        "o",
        "--prompt",
        "{tip}: {problem}",
    ]
    options = parse_evaluation(arguments, BENCHMARK).ask_options.data
    problems = BENCHMARK.load(options).problems
    assert all(problem.prompt == f"think: {problem.fields['question']}" for problem in problems)
    assert problems


def test_a_template_that_does_not_fit_the_rows_is_one_line(
    large_and_small: list[Path], subtests: pytest.Subtests
) -> None:
    """Each case: words of the command, and a pattern for the error."""
    for words, message in [
        (["--adora_prompt", "{hnt} {problem}"], "adora_prompt: 'hnt' is no column of .*large"),
        (
            ["--adora_prompt", "{problem} {id} <image>"],
            "adora_prompt: row large/train/0.* 1 <image> with 0 images",
        ),
        (
            ["--adora_prompt", "<|im_end|>{problem}"],
            "adora_prompt: row large/train/0.*model's own token",
        ),
    ]:
        with subtests.test(f"{words!r:.80}"):
            script = script_arguments("--dataset_name", large_and_small[0], *words)
            with pytest.raises(UserError, match=message) as error:
                load_rows(script, data_folders(script), seed=0)
            assert "\n" not in str(error.value)


def test_keys_that_do_not_fit_are_one_line(subtests: pytest.Subtests) -> None:
    """Each case: words of the command, and a pattern for the error."""
    cases = [
        (
            ["--adora_mixture", "0.5", "0.5"],
            "adora_mixture: .* has 2 values for the 1 of dataset_name",
        ),
        (["--dataset_name", "a", "b", "--adora_mixture", "0.5", "0.6"], "sum to 1.1"),
        (["--dataset_name", "a", "b", "--adora_mixture", "0.5", "x"], "adora_mixture: "),
        (["--dataset_name", "a", "a"], "dataset_name: 'a' is given twice"),
        (["--adora_columns", "[1]"], "adora_columns: "),
        (["--dataset_name", __file__], "test_loading.py' is a file; say which of its columns"),
        (
            ["--adora_system_prompt", "thnk"],
            "adora_system_prompt: 'thnk' is not one of .*did you mean 'think'",
        ),
        (["--adora_prompt", "{problem.x}"], "adora_prompt: .*plain name"),
        (["--adora_system_prompt", "nowhere.txt"], "'nowhere.txt' is not one .*No such file"),
    ]
    for words, message in cases:
        with subtests.test(f"{words!r:.80}"):
            with pytest.raises(UserError, match=message) as error:
                data_folders(script_arguments(*words))
            assert "\n" not in str(error.value)


def test_a_data_set_of_the_hub_is_streamed_again_only_for_another_commit(tmp_path, monkeypatch):
    """A data set of the hub is converted once per commit; without a network the last one is used.

    The hub is replaced. The last entry of `commits` is its newest commit, and without one it cannot
    be reached.
    """
    commits = ["1" * 40]
    revisions = []

    def open_as_hub(name: str, columns: Any, revision: str | None, **_: Any) -> Any:
        revisions.append(revision)
        local = open_local(write_user_jsonl(tmp_path / "in", [{"q": "?", "a": 1}]), columns)
        return replace(local, format="hub", revision=commits[-1])

    def commit_of(name: str, revision: str | None) -> str:
        if not commits:
            raise ConnectionError
        return commits[-1]

    monkeypatch.setattr("adora_vl.conversion.convert.open_hub", open_as_hub)
    monkeypatch.setattr("adora_vl.conversion.convert.commit_of", commit_of)

    def folder() -> Path:
        return ensure_converted(
            "someone/theirs", {"problem": "q", "answer": "a"}, tmp_path / "home"
        )

    assert folder() == folder(), "every process would stream it once more"
    assert len(revisions) == 1, "every process would stream it once more"
    commits.append("2" * 40)
    manifest = read_manifest(folder())
    assert manifest is not None
    assert manifest["revision"] == "2" * 40
    assert len(revisions) == 2
    commits.clear()  # no network
    assert folder().is_dir()
    assert len(revisions) == 2


def test_two_data_sets_with_one_id_are_told_apart_by_name(
    large_and_small: list[Path], tmp_path: Path
) -> None:
    """Two data sets that share the id of a row are refused, with the names of their folders."""
    source = write_user_jsonl(tmp_path / "in", [{"q": "Again?", "a": 1}])
    assert run_convert(source, tmp_path / "again", "--name", "large", columns=COLUMNS) == 0
    script = script_arguments("--dataset_name", large_and_small[0], tmp_path / "again")
    with pytest.raises(UserError, match="large and again both have a row 'large/train/0'"):
        load_rows(script, data_folders(script), seed=0)


def test_the_system_prompt_is_of_a_file_or_of_the_format(tmp_path: Path) -> None:
    """`adora_system_prompt` takes the path of a text, the name of a format, or the text itself.

    A byte order mark and the last line break of a file are left out.
    """
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfThink of {braces}.\n")
    assert (
        script_arguments("--adora_system_prompt", file).adora_system_prompt == "Think of {braces}."
    )
    assert (
        script_arguments("--adora_system_prompt", "think").adora_system_prompt
        == SYSTEM_PROMPTS["think"]
    )
    assert (
        script_arguments("--adora_system_prompt", "It is mine.").adora_system_prompt
        == "It is mine."
    )
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="nor a UTF-8 text that can be read"):
        script_arguments("--adora_system_prompt", file)


def test_manifest_page_and_card_name_every_data_set(large_and_small: list[Path]) -> None:
    """A mixture of two sets is shown with both names and their shares."""
    script, config, model = parse(
        [*CPU, "--dataset_name", *map(str, large_and_small), "--adora_mixture", "0.7", "0.3"]
    )
    manifest = run_manifest(
        script,
        config,
        model,
        arguments=[],
        data=TrainingData(folders=[str(folder) for folder in large_and_small], row_count=29),
        fingerprint={"dataset": "a+b"},
        batch_plan="",
        processes=1,
        checkpoint=None,
    )
    assert [data_set["share"] for data_set in manifest["data"]["sets"]] == [0.7, 0.3]
    assert describe_run(manifest)["data"] == "large, small, 29 rows"
    card = model_card(manifest, [], 1)
    assert "| large | share 0.7, own/jsonl, " in card
    assert "| dataset | large, small |" in card
    assert str(large_and_small[0].parent) not in card, "a path of this machine"


def test_a_dry_run_names_every_data_set(
    large_and_small: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run names each data set of a mixture with its rows and share.

    24 and 5 are the training rows; 42 is the default seed.
    """
    arguments = [
        "--num_generations",
        "2",
        "--per_device_train_batch_size",
        "2",
        "--adora_prompt",
        "{problem} Go.",
    ]
    arguments += [
        "--dataset_name",
        *map(str, large_and_small),
        "--adora_mixture",
        "0.6",
        "0.4",
        "--dry-run",
    ]
    assert train([*CPU, *arguments]) in (0, 1)
    output = capsys.readouterr().out
    rows = len(draw_mixture([24, 5], [0.6, 0.4], seed=42))
    assert (
        f"2 data sets are mixed into {rows} rows per epoch: large 24 rows at 60%, small 5 rows at "
        "40%" in output
    )
    assert f"{rows} rows make" in output


def test_each_held_out_split_is_evaluated_under_its_own_name(large_and_small: list[Path]) -> None:
    """Evaluations during training ask the test split of each data set, under a name of its own."""
    config = parse([*CPU, "--eval_strategy", "steps", "--eval_steps", "1", "--use_vllm", "true"])[1]
    plan = load_evaluation_plan(
        config, [str(folder) for folder in large_and_small], "{problem} Go."
    )
    assert plan is not None
    assert [task.benchmark.name for task in plan.tasks] == [
        "problems_large",
        "problems_small",
    ]
    assert all(task.problems[0].prompt.endswith(" Go.") for task in plan.tasks)


def test_a_model_is_asked_in_the_words_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation asks a trained model with the prompts of its training, unless told otherwise.

    They are in the manifest of the run. A model without one is asked with the defaults.
    """
    config = {"adora_system_prompt": "Be brief.", "adora_prompt": "{problem}!"}
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "run" / "manifest.json").write_text(
        json.dumps({"made_by": "adora_vl.train", "config": config})
    )

    def prompts(model: object, *words: str) -> tuple[Any, Any]:
        arguments = ["infer", "--model", str(model), "--data", "d", "--output", "o", *words]
        options: Any = parse_evaluation(arguments, BENCHMARK).ask_options
        return options.system_prompt, options.data.prompt

    for model in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert prompts(model) == ("Be brief.", "{problem}!")
    assert "Be brief." in capsys.readouterr().err
    assert prompts(tmp_path / "run", "--system-prompt", "none", "--prompt", "{id}") == (
        None,
        "{id}",
    )
    assert prompts("tiny") == (SYSTEM_PROMPT, DEFAULT_PROMPT)
    assert capsys.readouterr().err == ""
    assert prompts("tiny", "--prompt", "none") == (SYSTEM_PROMPT, None)
    without_choices = {"adora_system_prompt": SYSTEM_PROMPT, "adora_prompt": None}
    (tmp_path / "run" / "manifest.json").write_text(
        json.dumps({"made_by": "adora_vl.train", "config": without_choices})
    )
    assert prompts(tmp_path / "run") == (SYSTEM_PROMPT, None)
    assert capsys.readouterr().err == "prompt: that of the model's training, none\n"


def test_the_chat_template_gets_the_arguments_that_it_had_in_the_training(tmp_path: Path) -> None:
    """An evaluation renders the chat template with the `chat_template_kwargs` of the training.

    They are in the manifest of the run; a manifest that another program has written is not read.
    """
    run = shutil.copytree(PRETRAINED_FOLDER, tmp_path / "run")
    (run / "chat_template.jinja").write_text("{{ 'brief' if brief else 'long' }}")
    config = {"chat_template_kwargs": {"brief": True}}
    for made_by, rendered in (
        ("adora_vl.train", "brief"),
        ("another", "long"),
    ):
        (run / "manifest.json").write_text(json.dumps({"made_by": made_by, "config": config}))
        arguments = ["infer", "--model", str(run), "--data", "d", "--output", "o"]
        settings = build_settings(parse_evaluation(arguments, BENCHMARK).ask_options)
        assert (
            ChatProcessor.from_settings(settings).render([{"role": "user", "content": "x"}])
            == rendered
        )
        assert settings.fingerprint_fields == (config if rendered == "brief" else {}), (
            "answers of both do not mix"
        )
