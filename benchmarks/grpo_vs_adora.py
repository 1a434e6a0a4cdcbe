"""GRPO against ADORA over several seeds: `python benchmarks/grpo_vs_adora.py --seeds 3 [--config FILE.yaml]`.

Trains every (method, seed) from the same start with the given config (the demo's by default), evaluates on the same
held-out problems, and says whether ADORA helped (`python -m adora_vl.report --compare`). On drawn problems it also
prints the accuracy by kind of problem, and how often the criterion marked each. A finished run is not repeated. A run
of the demo's config takes about four minutes on two CPU cores. `--store FILE` keeps GRPO's first score for `make demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from adora_vl.config.command_line import read_yaml
from adora_vl.report.comparison import comparison_lines

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))  # started as a file, and from anywhere
from benchmarks.by_kind import accuracy_table, attenuated_table, store  # noqa: E402

DEMO = REPOSITORY / "configs" / "train" / "smoke_cpu.yaml"


def methods(config: dict[str, Any]) -> dict[str, list[str]]:
    """The options of both sides: the config's own kind of ADORA, or attenuation where it has none, and none of it."""
    method, mode = str(config.get("adora_method", "adora")), config.get("adora_mode", "attenuation")
    if "adora" not in method.split("+"):
        return {"grpo": [], "adora": ["--adora_method", "adora" if method == "grpo" else f"{method}+adora"]}
    own = "attenuation" if mode in (False, "off") else str(mode)
    return {"grpo": ["--adora_mode", "off"], "adora": ["--adora_mode", own]}


def command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr[-2000:]}")


def within(path: Path) -> Path:
    """The path as the commands get it, which run in the repository: so what is stored names no folder of a machine."""
    return path.resolve().relative_to(REPOSITORY) if path.resolve().is_relative_to(REPOSITORY) else path.resolve()


def evaluate(model: Path | str, output: Path, options: argparse.Namespace, data: Path, tokens: int) -> None:
    """Evaluate unless it is done."""
    if not (REPOSITORY / output / "score.json").is_file():
        where = ["--model", model, "--data", data, "--output", output, "--max-tokens", str(tokens)]
        command(sys.executable, "-m", f"eval.{options.benchmark}", "run", *where)


def one_run(folder: Path, words: list[str], options: argparse.Namespace, data: Path, tokens: int) -> None:
    """Train and evaluate, each unless it is done."""
    manifest = REPOSITORY / folder / "manifest.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["status"] != "finished":
        accelerate = Path(sys.executable).parent / "accelerate"
        launch = ["--config_file", str(options.accelerate), "-m", "adora_vl.train", "--config", str(options.config)]
        run = ["--dataset_name", str(data), "--output_dir", str(folder), *words, *options.extra]
        command(accelerate, "launch", *launch, *run)
    model = folder / "merged" if (REPOSITORY / folder / "merged").is_dir() else folder  # with LoRA
    evaluate(model, folder / "eval", options, data, tokens)


def by_kind(out: Path, data: Path, folders: dict[str, list[Path]]) -> list[str]:
    """The tables by kind, for problems that have kinds."""
    scores = {name: [_score(folder / "eval") for folder in found] for name, found in folders.items()}
    before = _score(out / "before")
    if "kind" not in before["groups"]:
        return []
    return ["", *accuracy_table(before, scores), "", *attenuated_table(data, folders)]


def _score(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "score.json").read_text())
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=DEMO, help="training config; default: the demo's")
    parser.add_argument("--accelerate", type=Path, default=REPOSITORY / "configs" / "accelerate" / "cpu.yaml")
    parser.add_argument("--data", type=Path, help="prepared data with a test split; default: 4096 drawn problems")
    parser.add_argument("--benchmark", default="geometry3k", help="how the held-out split is scored")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "grpo_vs_adora")
    parser.add_argument("--max-tokens", type=int, help="of a held-out answer; default: max_completion_length")
    parser.add_argument("--store", type=Path, metavar="FILE", help="write the score of GRPO's first seed there")
    parser.add_argument("extra", nargs="*", help="further training options, after --")
    return parser.parse_args()


def main() -> None:
    options = parse()
    config, out = read_yaml(options.config), within(options.output)
    options.config, options.accelerate = within(options.config), within(options.accelerate)
    data = within(options.data) if options.data else out / "data"
    tokens = options.max_tokens or int(config.get("max_completion_length", 256))
    if not (REPOSITORY / data).is_dir():
        command(
            sys.executable, "-m", "data_prep", "synthetic", "--output", data, "--rows", "4096", "--test-rows", "600"
        )
    evaluate(str(config["model_name_or_path"]), out / "before", options, data, tokens)
    folders: dict[str, list[Path]] = {}
    for seed in range(options.seeds):
        for method, words in methods(config).items():
            folder = out / f"{method}-{seed}"
            one_run(folder, [*words, "--seed", str(seed), "--save_strategy", "no"], options, data, tokens)
            folders.setdefault(method, []).append(REPOSITORY / folder)
            print(f"{folder.name} done", flush=True)
    print("\n".join(comparison_lines(folders["grpo"], folders["adora"])))
    print("\n".join(by_kind(REPOSITORY / out, REPOSITORY / data, folders)))
    if options.store:
        store(folders["grpo"][0], options.store)


if __name__ == "__main__":
    main()
