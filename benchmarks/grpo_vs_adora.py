"""GRPO against ADORA over several seeds: `python benchmarks/grpo_vs_adora.py --seeds 3 [--config FILE.yaml]`.

Trains every (method, seed) from the same start with the given config (the demo's by default), evaluates on the same
held-out problems, and says whether ADORA helped (`python -m adora_vl.report --compare`). A finished run is not
repeated. A run of the demo's config takes about four minutes on two CPU cores.
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


def one_run(folder: Path, words: list[str], options: argparse.Namespace, data: Path, tokens: int) -> None:
    """Train and evaluate, each unless it is done."""
    manifest = folder / "manifest.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["status"] != "finished":
        accelerate = Path(sys.executable).parent / "accelerate"
        launch = ["--config_file", str(options.accelerate), "-m", "adora_vl.train", "--config", str(options.config)]
        run = ["--dataset_name", str(data), "--output_dir", str(folder), *words, *options.extra]
        command(accelerate, "launch", *launch, *run)
    if not (folder / "eval" / "score.json").is_file():
        model = folder / "merged" if (folder / "merged").is_dir() else folder  # with LoRA
        where = ["--model", str(model), "--data", str(data), "--output", str(folder / "eval")]
        command(sys.executable, "-m", f"eval.{options.benchmark}", "run", *where, "--max-tokens", str(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=DEMO, help="training config; default: the demo's")
    parser.add_argument("--accelerate", type=Path, default=REPOSITORY / "configs" / "accelerate" / "cpu.yaml")
    parser.add_argument("--data", type=Path, help="prepared data with a test split; default: 4096 drawn problems")
    parser.add_argument("--benchmark", default="geometry3k", help="how the held-out split is scored")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "grpo_vs_adora")
    parser.add_argument("extra", nargs="*", help="further training options, after --")
    options = parser.parse_args()
    options.config, options.accelerate = options.config.resolve(), options.accelerate.resolve()
    config, out = read_yaml(options.config), options.output.resolve()
    data = options.data.resolve() if options.data else out / "data"
    if not data.is_dir():
        command(
            sys.executable, "-m", "data_prep", "synthetic", "--output", data, "--rows", "4096", "--test-rows", "600"
        )
    folders: dict[str, list[Path]] = {}
    for seed in range(options.seeds):
        for method, words in methods(config).items():
            folder = out / f"{method}-{seed}"
            one_run(
                folder, [*words, "--seed", str(seed), "--save_strategy", "no"], options, data,
                int(config.get("max_completion_length", 256)),
            )  # fmt: skip
            folders.setdefault(method, []).append(folder)
            print(f"{folder.name} done", flush=True)
    print("\n".join(comparison_lines(folders["grpo"], folders["adora"])))


if __name__ == "__main__":
    main()
