"""What stays of a run: its manifest, the card of every saved model, and the commands to go on with."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from datasets import Image as ImageFeature
from datasets import load_dataset

from adora_vl.assets import MERGED
from adora_vl.checkpoint.store import problem_of
from adora_vl.config import AdoraGRPOConfig
from adora_vl.export import main as export
from adora_vl.report.__main__ import main as view
from adora_vl.report.card import model_card
from adora_vl.report.commands import as_called, evaluate_command, interpreter, launch_command, view_command
from adora_vl.report.manifest import end_manifest, facts_of_run, failure_noted, read_manifest, write_manifest
from adora_vl.report.summary import summary_lines
from tests.tiny_run import STEPS, arguments

START = as_called(str(Path(sys.executable).with_name("accelerate")))
LAUNCH = ["/venv/bin/accelerate", "launch", "--config_file", "c.yaml", "-m", "adora_vl.train", "--config", "y y.yaml"]


@pytest.mark.parametrize(
    ("started", "command"),
    [
        (["/venv/bin/python", *LAUNCH], "accelerate launch --config_file c.yaml -m adora_vl.train --config 'y y.yaml'"),
        (["python", "-m", "accelerate.commands.launch", "-m", "adora_vl.train"], f"{START} launch -m adora_vl.train"),
        (["python", *LAUNCH[:4], "my_script.py"], f"{interpreter()} -m adora_vl.train --seed 1"),
        (["bash"], f"{interpreter()} -m adora_vl.train --seed 1"),
        (["python", *LAUNCH[:6], "--hub_token", "hf_x", "--api_secret=s", "--seed", "1"],
         "accelerate launch --config_file c.yaml -m adora_vl.train --hub_token ... --api_secret=... --seed 1"),
    ],
)  # fmt: skip
def test_the_command_that_started_a_run(tmp_path, started, command):
    (tmp_path / "cmdline").write_bytes("\0".join(started).encode() + b"\0")
    assert launch_command(["--seed", "1"], tmp_path / "cmdline") == command
    assert launch_command(["--seed", "1"], tmp_path / "no") == f"{interpreter()} -m adora_vl.train --seed 1"


def test_the_commands_after_a_run(tmp_path):
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), 40) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test-00000-of-00001.parquet").touch()
    words = f"{interpreter()} -m eval.geometry3k run --model m --data {tmp_path} --output o --max-tokens 40"
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), 40) == words
    (tmp_path / "manifest.json").write_text('{"source": "knights"}')
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), 40) == words.replace("geometry3k", "knights")
    assert view_command(Path("a b"), Path("c")) == f"{interpreter()} -m adora_vl.report 'a b' c"


def test_an_adapter_alone_is_to_be_merged_before_it_is_evaluated(tmp_path):
    """As a run with LoRA leaves it under ZeRO-3. Elsewhere training merges it."""
    config = AdoraGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=10)
    (tmp_path / "adapter_config.json").touch()
    *_, merge, evaluate = summary_lines([], config, tmp_path, 1)
    assert merge == f"Merge it      {interpreter()} -m adora_vl.export {tmp_path} {tmp_path / MERGED}"
    assert evaluate.startswith("Evaluate it") and f"--model {tmp_path} " in evaluate
    (tmp_path / "config.json").touch()
    assert not any(line.startswith("Merge it") for line in summary_lines([], config, tmp_path, 1))


@pytest.mark.parametrize(
    ("schedule", "saved", "line"),
    [("constant", True, "Train longer  CMD --max_steps 20"), ("linear", True, None), ("constant", False, None)],
)
def test_training_longer_is_offered_where_it_is_a_continuation(tmp_path, schedule, saved, line):
    config = AdoraGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=10, lr_scheduler_type=schedule
    )
    if saved:
        (tmp_path / "checkpoint-10").mkdir()
    lines = summary_lines([{"step": 10, "reward": 1.0}], config, tmp_path, 1, command="CMD")
    assert (line in lines) if line else not any(one.startswith("Train longer") for one in lines)


def test_the_manifest_of_a_real_run(adora_run):
    manifest = read_manifest(adora_run)
    assert manifest["status"] == "finished" and manifest["steps"] == STEPS and manifest["finished"]
    assert manifest["config"]["adora_mode"] == "attenuation" and manifest["config"]["learning_rate"] == 1e-3
    assert manifest["data"]["rows"] == 32 and len(manifest["data"]["fingerprint"]) == 16
    assert manifest["data"]["source"] == "synthetic" and {"torch", "trl", "python"} <= manifest["versions"].keys()
    assert manifest["command"].startswith(f"{interpreter()} -m adora_vl.train --config ")
    assert not [key for key in manifest["config"] if key.endswith("token")]
    assert len(manifest["starts"]) == 1 and manifest["starts"][0]["checkpoint"] is None
    facts = facts_of_run(manifest)
    assert facts["recipe"] == "ADORA attenuation, factor 0.1" and facts["status"] == f"finished at step {STEPS}"


def test_a_run_that_went_on_says_when_it_started_and_started_again(resumed_run):
    starts = read_manifest(resumed_run.folder)["starts"]
    assert [start["checkpoint"] for start in starts] == [None, str(resumed_run.folder / "checkpoint-2")]


def test_a_manifest_of_somebody_else_is_not_read(tmp_path):
    (tmp_path / "manifest.json").write_text('{"made_by": "data_prep"}')
    assert read_manifest(tmp_path) == {} and facts_of_run({}) == {}
    manifest = {"made_by": "adora_vl.train", "status": "running", "starts": [{"time": "t", "checkpoint": "c"}]}
    write_manifest(manifest, tmp_path)
    end_manifest(manifest, tmp_path, "stopped", 3)
    assert read_manifest(tmp_path)["starts"] == [{"time": "t", "checkpoint": "c"}]


def test_a_run_that_fails_says_so(tmp_path):
    manifest = {"made_by": "adora_vl.train", "status": "running", "starts": [{"time": "t", "checkpoint": None}]}
    with pytest.raises(ValueError), failure_noted(manifest, tmp_path, lambda: 7, is_main=True):
        raise ValueError("the cause\nand more")
    found = read_manifest(tmp_path)
    assert (found["status"], found["steps"], found["error"]) == ("failed", 7, "ValueError: the cause")
    with pytest.raises(ValueError), failure_noted(manifest, tmp_path / "other", lambda: 7, is_main=False):
        raise ValueError
    assert not (tmp_path / "other").exists()


def test_every_saved_model_has_its_card_and_stays_whole(adora_run, tmp_path):
    """Also the exported one. The figures of a checkpoint's card are those up to its step."""
    final, early = ((adora_run / name / "README.md").read_text() for name in ("", "checkpoint-2"))
    assert (
        "# tiny/pretrained, 4 steps of ADORA attenuation, factor 0.1" in final
        and "# tiny/pretrained, 2 steps of" in early
    )
    assert problem_of(adora_run / "checkpoint-2") is None
    assert "| adora_factor | 0.1 |" in final and "| learning_rate | 0.001 |" in final
    assert f"| fingerprint | {read_manifest(adora_run)['data']['fingerprint']} |" in final
    assert re.search(r"\| pass rate \| [\d.]+ \| [\d.]+ \|", final) and "| trl | 1." in final
    assert str(adora_run.parent) not in final, "a path of this machine"
    assert export([str(adora_run / "checkpoint-2"), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "README.md").read_text() == early


def test_the_code_of_the_card_runs(adora_run, monkeypatch, capsys, tmp_path):
    """As a stranger would: copied out of the card, in the model's folder, with a picture of theirs."""
    out = shutil.copytree(adora_run, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*", "rollouts"))
    row = load_dataset("parquet", data_files=f"{read_manifest(adora_run)['data']['folder']}/data/train-*.parquet")[
        "train"
    ]
    row.cast_column("images", [ImageFeature()])[0]["images"][0].save(out / "diagram.png")
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    monkeypatch.chdir(out)
    (tmp_path / "card.py").write_text(code)
    runpy.run_path(str(tmp_path / "card.py"))
    assert r"\boxed" in capsys.readouterr().out


def test_a_card_without_facts_and_one_of_an_adapter():
    card = model_card({}, [], 0)
    assert "Nothing was logged before this was saved." in card and "Not recorded." in card and "base_model" not in card
    config = {"adora_mode": "off", "adora_reward": ["a|b"], "use_peft": True}
    model, data = {"name": "Qwen/Qwen2.5-VL-7B-Instruct"}, {"folder": "data/geometry3k", "input": "/home/me/raw"}
    card = model_card({"model": model, "config": config, "data": data}, [], 7)
    assert 'base_model: "Qwen/Qwen2.5-VL-7B-Instruct"' in card and "python -m adora_vl.export" in card
    assert "7 steps of GRPO\n" in card and '| adora_reward | ["a\\|b"] |' in card and "```python" in card
    assert "| dataset | data/geometry3k |" in card and "| input | raw |" in card and "/home" not in card


def test_the_card_of_a_text_only_policy_asks_for_no_image():
    card = model_card({"model": {"sees_images": False}}, [], 1)
    assert "AutoModelForCausalLM" in card and "pipeline_tag: text-generation" in card
    assert "image" not in card and "diagram" not in card


def test_the_summary_of_a_real_run_names_files_and_commands_that_exist(resumed_run, tmp_path):
    """Its own words are taken as they are: the viewer's command writes the page."""
    words = dict(
        re.findall(r"^(Model|Metrics|Rollouts|View it|Evaluate it|Train longer) +(.*)$", resumed_run.printed, re.M)
    )
    for name in ("Model", "Metrics", "Rollouts"):
        assert Path(words[name].split("  (")[0]).exists(), name
    assert view([*words["View it"].split()[3:], "--output", str(tmp_path / "page.html")]) == 0
    folder = re.search(r"--data (\S+)", words["Evaluate it"])
    assert folder and json.loads((Path(folder[1]) / "manifest.json").read_text())["made_by"] == "data_prep"
    expected = " ".join(arguments(resumed_run.folder)) + f" --max_steps {2 * STEPS}"
    assert words["Train longer"] == f"{interpreter()} -m adora_vl.train {expected}"
