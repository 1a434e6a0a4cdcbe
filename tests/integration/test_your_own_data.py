"""A user's own data set, from the page's commands to a training with two images a row."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from adora_vl.report.__main__ import main as report
from adora_vl.rewards.explain import main as explain
from adora_vl.synthetic.generate import generate
from adora_vl.train import main as train
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.problems import BENCHMARK
from tests.support.launch import cli_arguments, run_command
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.slow
YOUR_OWN_DATA_SECTION = (
    (REPOSITORY / "docs" / "data.md")
    .read_text()
    .partition("\n## Your own data\n")[2]
    .partition("\n## ")[0]
)
MAIN_BY_MODULE: dict[str, Callable[[list[str]], int | None]] = {
    "data_prep": data_prep,
    "adora_vl.rewards.explain": explain,
    "adora_vl.train": train,
    "adora_vl.report": report,
    "eval.problems": lambda argv: evaluate(BENCHMARK, argv),
}


def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    """The page's commands run in their order, in this process, with 2 steps in place of 20."""
    monkeypatch.chdir(tmp_path)
    files = re.findall(
        r"Save\s+this\s+as `(\w+\.(?:py|yaml))`.*?```(?:python|yaml)\n(.*?)```",
        YOUR_OWN_DATA_SECTION,
        re.DOTALL,
    )
    assert [name for name, _ in files] == ["make_rows.py", "my_rewards.py", "mine.yaml"]
    for name, content in files:
        Path(name).write_text(content)
    ran = []
    for block in re.findall(r"```bash\n(.*?)```", YOUR_OWN_DATA_SECTION, re.DOTALL):
        for line in block.strip().splitlines():
            argv = shlex.split(line)
            assert argv[0] == "python"
            if argv[1] != "-m":
                runpy.run_path(argv[1])
                continue
            options = ["--max_steps", "2"] if argv[2] == "adora_vl.train" else []
            ran.append(argv[2])
            assert not MAIN_BY_MODULE[argv[2]]([*argv[3:], *options]), (
                f"{line}\n{capsys.readouterr().err}"
            )
    assert ran == [
        *["data_prep"] * 2,
        "adora_vl.rewards.explain",
        *["adora_vl.train"] * 2,
        "adora_vl.report",
        "eval.problems",
    ]
    printed = capsys.readouterr().out
    assert "train 8 rows, test 2 rows" in printed
    assert "reward     my_rewards.py:short 1\n" in printed
    assert len(list(Path("runs/mine").glob("*.html"))) == 1
    assert Path("data/mine.html").is_file()
    assert json.loads(Path("runs/mine/eval/score.json").read_text())["total"] == 2
    manifest = json.loads(Path("runs/mine/manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["data"]["source"] == "own/jsonl"
    assert pd.read_parquet("runs/mine/rollouts")["reward/short"].between(0, 1).all()


def write_rows_with_two_images(folder: Path) -> None:
    """Write a table of training rows and one of test rows, each with two drawn pictures.

    The question says where each picture stands, but for the first row, whose pictures come first.
    """
    (folder / "pics").mkdir(parents=True)
    for split, count in (("train", 8), ("test", 4)):
        lines = []
        for number, row in enumerate(generate(count, split=split, seed=5, size=56, families=())):
            row["images"][0].save(folder / "pics" / f"{split}{number}.png")
            names = [f"pics/{split}{number}.png", f"pics/{split}{(number + 1) % count}.png"]
            question = f"First <image>, then <image>. {row['problem']}"
            lines.append({"q": question, "a": row["answer"], "i": names, "t": "x"})
        lines[0]["q"] = lines[0]["q"].replace("<image>", "that")
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_images_at_their_places_are_the_same_for_engine_and_trainer(tmp_path):
    """A run trains two steps with an engine on a table with two images a row.

    It is evaluated on the table's test rows.
    """
    folder = tmp_path / "in"
    write_rows_with_two_images(folder)
    output_dir = tmp_path / "out"
    columns = json.dumps({"problem": "q", "answer": "a", "images": "i", "t": "t"})
    keys = {
        "dataset_name": folder,
        "adora_columns": columns,
        "adora_prompt": "{problem}\nLook: {t}",
        "output_dir": output_dir,
        "adora_system_prompt": "think_answer",
        "adora_reward": "accuracy,think_answer_format",
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_completion_length": 16,
        "vllm_max_model_length": 512,
        "entropy_coef": 1.0,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    argv = cli_arguments(**keys)
    command = [
        sys.executable,
        "-m",
        "adora_vl.train",
        "--config",
        "configs/train/smoke_cpu.yaml",
        *argv,
    ]
    run_command(command, environment={"ADORA_VL_HOME": str(tmp_path / "home")})
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "reward" in entry and "loss" in entry]

    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["adora/drift"] < 1e-3 for step in steps), "engine and trainer saw other prompts"
    assert [
        entry["eval_problems_accuracy"] >= 0 for entry in log if "eval_problems_accuracy" in entry
    ] == [True]
    rows = pd.read_parquet(output_dir / "rollouts")
    assert rows["id"].str.startswith("in/train/").all()
    assert rows["problem"].str.contains("<image>").any()
    assert {"reward/accuracy_reward", "reward/think_answer_format_reward"} <= set(rows.columns)
    assert rows.groupby("id")["images"].first().map(len).eq(2).all()
    card = (output_dir / "README.md").read_text()
    assert "<think> reasoning process here" in card
    assert "{problem} Look: {t}" in card
