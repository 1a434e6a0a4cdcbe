"""GRPO against ADORA over several seeds: `python -m benchmarks.grpo_vs_adora --seeds 3 [--config
FILE.yaml]`.

Trains every (method, seed) from the same start with the given config (the demo's by default),
evaluates on the same held-out problems, and says whether ADORA helped (`python -m adora_vl.report
--compare`). On drawn problems it also prints the accuracy by kind of problem, the share of answers
with a working, and how often the criterion marked each kind, and draws the curves. A finished run
is not repeated. `--key KEY=VALUE` compares the config as it is with itself and this key, in the
place of GRPO and ADORA.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from adora_vl.config.reading import read_file
from adora_vl.data.dataset import stored_rows
from adora_vl.models.load import local_model
from adora_vl.record.metrics import METRICS, read_metrics
from adora_vl.report.compare import comparison_lines

REPOSITORY = Path(__file__).parents[1]
DEMO = REPOSITORY / "configs" / "train" / "demo_cpu.yaml"
DEMO_DATA = ("--families", "perimeter", "--rows", "2000", "--test-rows", "400")
Score = dict[str, Any]


def methods(config: dict[str, Any]) -> dict[str, list[str]]:
    """The options of both sides: the config's methods without ADORA, and with it (as it is there,
    or by default).
    """
    own = config.get("adora_method", "adora")
    own = dict.fromkeys(own.split("+")) if isinstance(own, str) else dict(own)
    without = {name: options for name, options in own.items() if name != "adora"} or {"grpo": None}
    adora = dict(own.get("adora") or {})
    if adora.get("mode") in (False, "off"):
        del adora["mode"]
    both = {**({} if [*without] == ["grpo"] else without), "adora": adora}
    return {
        name: ["--adora_method", json.dumps(asked)]
        for name, asked in (("grpo", without), ("adora", both))
    }


def sides_of(config: dict[str, Any], key: str | None) -> dict[str, list[str]]:
    """The name of each side and its options.

    `key`: `KEY=VALUE`, which the second one has in addition.
    """
    if key is None:
        return methods(config)
    name, _, value = key.partition("=")
    return {"without": [], "with": [f"--{name}", value]}


def command(*words: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in words], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr[-2000:]}")


def within(path: Path) -> Path:
    """The path relative to the repository, where commands run: stored results name no folder of a
    machine.
    """
    return (
        path.resolve().relative_to(REPOSITORY)
        if path.resolve().is_relative_to(REPOSITORY)
        else path.resolve()
    )


def evaluate(
    model: Path | str, output: Path, options: argparse.Namespace, data: Path, tokens: int
) -> None:
    """Evaluate unless it is done."""
    if not (REPOSITORY / output / "score.json").is_file():
        where = ["--model", model, "--data", data, "--output", output, "--max-tokens", str(tokens)]
        command(sys.executable, "-m", f"eval.{options.benchmark}", "run", *where)


def one_run(
    folder: Path, words: list[str], options: argparse.Namespace, data: Path, tokens: int
) -> None:
    """Train and evaluate, each unless it is done."""
    manifest = REPOSITORY / folder / "manifest.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["status"] != "finished":
        accelerate = Path(sys.executable).with_name("accelerate")
        launch = [
            "--config_file",
            str(options.accelerate),
            "-m",
            "adora_vl.train",
            "--config",
            str(options.config),
        ]
        run = ["--dataset_name", str(data), "--output_dir", str(folder), *words, *options.extra]
        command(accelerate, "launch", *launch, *run)
    model = folder / "merged" if (REPOSITORY / folder / "merged").is_dir() else folder  # with LoRA
    evaluate(model, folder / "eval", options, data, tokens)


def by_kind(out: Path, data: Path, folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """The tables by kind, for problems that have kinds."""
    before = _score(out / "before")
    if "kind" not in before["groups"]:
        return []
    scores = {
        name: [_score(folder / "eval") for folder in found] for name, found in folders.items()
    }
    return [
        "",
        *accuracy_table(before, scores),
        worked_line(folders),
        "",
        *attenuated_table(data, folders),
    ]


def _score(folder: Path) -> Score:
    found: Score = json.loads((folder / "score.json").read_text())
    return found


def learned_lines(sides: Mapping[str, Sequence[Path]]) -> list[str]:
    """What each side has learned from, by its record: with `adora_rollouts.budget` early
    generations are smaller.
    """
    rows, shares = [], []
    for runs in sides.values():
        parts = [
            pq.read_table(part, columns=["segments"])
            for run in runs
            for part in run.glob("rollouts/*.parquet")
        ]
        segments = [number or 1 for part in parts for number in part["segments"].to_pylist()]
        rows.append(f"{len(segments) / len(runs):<24,.0f}")
        shares.append(f"{sum(number > 1 for number in segments) / len(segments):<24.2f}")
    names = "".join(f"{name:<24}" for name in sides)
    cells = (
        ("", names),
        ("rollouts learned from", "".join(rows)),
        ("in several segments", "".join(shares)),
    )
    return [f"{title:<28}{row}".rstrip() for title, row in cells]


def accuracy_table(before: Score, sides: Mapping[str, Sequence[Score]]) -> list[str]:
    """Mean accuracy in percent, with the lowest and the highest seed, for all problems, each family
    and each kind.
    """
    lines = [
        f"{'accuracy in %':<28}{'N':>5}  {'before':>6}  " + "".join(f"{name:<24}" for name in sides)
    ]
    names = [
        ("", "all"),
        *((key, name) for key in ("family", "kind") for name in before["groups"].get(key, {})),
    ]
    for key, name in names:
        first, *others = (
            [score["groups"][key][name] if key else score for score in scores]
            for scores in ([before], *sides.values())
        )
        accuracies = [[100 * cell["accuracy"] for cell in cells] for cells in others]
        shown = (
            f"{fmean(values):5.1f} ({min(values):.1f} to {max(values):.1f})"
            for values in accuracies
        )
        row = "".join(f"{text:<24}" for text in shown)
        lines.append(
            f"{name:<28}{first[0]['total']:>5}  {100 * first[0]['accuracy']:6.1f}  {row}".rstrip()
        )
    return lines


WORKED = "grading/worked"
_LAST = 10  # logged steps


def curve(run: Path, key: str) -> dict[int, float]:
    """A figure of the log by step."""
    return {
        line["step"]: line[key]
        for line in read_metrics(run / METRICS)
        if isinstance(line.get(key), float)
    }


def worked_line(sides: Mapping[str, Sequence[Path]]) -> str:
    """The share of training answers with a working, in the last logged steps of each run."""
    ends = {
        name: [[*curve(run, WORKED).values()][-_LAST:] for run in runs]
        for name, runs in sides.items()
    }
    if not all(end for found in ends.values() for end in found):
        return ""
    means = {name: [100 * fmean(end) for end in found] for name, found in ends.items()}
    cells = (
        f"{fmean(values):5.1f} ({min(values):.1f} to {max(values):.1f})"
        for values in means.values()
    )
    return f"{'answers with a working':<28}{'':>13}  {''.join(f'{text:<24}' for text in cells)}".rstrip()


def draw_curves(sides: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Reward, share of workings, and held-out accuracy by kind where it was logged: a line for each
    run. A PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    logged = {
        key
        for runs in sides.values()
        for run in runs
        for line in read_metrics(run / METRICS)
        for key in line
    }
    accuracies = sorted(
        key for key in logged if key.startswith("eval_") and key.endswith("_accuracy")
    )
    titles = {"reward": "training reward", WORKED: "share of answers with a working"}
    titles |= {key: f"held-out accuracy, {key[5:-9].replace('_', ' ')}" for key in accuracies}
    fig, axes = pyplot.subplots(
        1, len(titles), figsize=(3.2 * len(titles), 2.7), constrained_layout=True
    )
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for colour, (name, runs) in enumerate(sides.items()):
            for number, run in enumerate(runs):
                points = curve(run, key)
                label = name if number == 0 else None
                axis.plot(
                    [*points],
                    [*points.values()],
                    color=f"C{colour}",
                    linewidth=1,
                    alpha=0.8,
                    label=label,
                )
        axis.set_title(title, fontsize=8)
        axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    axes[0].legend(fontsize=7)
    fig.savefig(path, dpi=80)
    pyplot.close(fig)


def attenuated(run: Path, kinds: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """For each kind, how many of the run's mixed groups (some right, some wrong) the criterion
    marked, and how many there were. `kinds`: by row id.
    """
    groups: dict[tuple[int, int], list[tuple[str, bool, float]]] = defaultdict(list)
    for part in sorted(run.glob("rollouts/*.parquet")):
        for row in pq.read_table(
            part, columns=["step", "group", "id", "tds", "reward"]
        ).to_pylist():
            groups[row["step"], row["group"]].append((row["id"], row["tds"], row["reward"]))
    found: dict[str, list[bool]] = defaultdict(list)
    for group in groups.values():
        if len({reward > 0.5 for _, _, reward in group}) > 1:
            found[kinds[group[0][0]]].append(group[0][1])
    return {kind: (sum(marked), len(marked)) for kind, marked in sorted(found.items())}


def attenuated_table(data: Path, sides: Mapping[str, Sequence[Path]]) -> list[str]:
    """The share of mixed groups that the length criterion marks, over all seeds and steps, by kind
    or else family.
    """
    metas = {row["id"]: row["meta"] for row in stored_rows(data, "train")}
    kinds = {
        row_id: ", ".join(filter(None, (meta["family"], meta["kind"])))
        for row_id, meta in metas.items()
    }
    counts = {name: [attenuated(run, kinds) for run in runs] for name, runs in sides.items()}
    lines = [f"{'marked, of mixed groups':<28}" + "".join(f"{name:<24}" for name in sides)]
    for kind in sorted(set(kinds.values())):
        cells = []
        for runs in counts.values():
            marked, mixed = (sum(run.get(kind, (0, 0))[i] for run in runs) for i in (0, 1))
            cells.append(f"{f'{marked / mixed:.2f} of {mixed}' if mixed else '-':<24}")
        lines.append(f"{kind:<28}{''.join(cells)}".rstrip())
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--key", metavar="KEY=VALUE", help="of the config's second side; default: GRPO and ADORA"
    )
    parser.add_argument(
        "--config", type=Path, default=DEMO, help="training config; default: the demo's"
    )
    parser.add_argument(
        "--accelerate", type=Path, default=REPOSITORY / "configs" / "accelerate" / "cpu.yaml"
    )
    parser.add_argument(
        "--data", type=Path, help="prepared data with a test split; default: the demo's"
    )
    parser.add_argument("--benchmark", default="problems", help="how the held-out split is scored")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "grpo_vs_adora")
    parser.add_argument(
        "--max-tokens", type=int, help="of a held-out answer; default: max_completion_length"
    )
    parser.add_argument("extra", nargs="*", help="further training options, after --")
    return parser.parse_args()


def main() -> None:
    options = parse()
    config = read_file(options.config)
    out = within(options.output)
    options.config, options.accelerate = within(options.config), within(options.accelerate)
    data = within(options.data) if options.data else out / "data"
    tokens = options.max_tokens or int(config.get("max_completion_length", 256))
    if not (REPOSITORY / data).is_dir():
        if options.data:
            sys.exit(
                f"--data: there is no folder {str(options.data)!r}; prepare it first (python -m "
                "data_prep --help)"
            )
        command(sys.executable, "-m", "data_prep", "synthetic", "--output", data, *DEMO_DATA)
    evaluate(local_model(str(config["model_name_or_path"])), out / "before", options, data, tokens)
    folders: dict[str, list[Path]] = {}
    for seed in range(options.seeds):
        for method, words in sides_of(config, options.key).items():
            folder = out / f"{method}-{seed}"
            one_run(
                folder,
                [*words, "--seed", str(seed), "--save_strategy", "no"],
                options,
                data,
                tokens,
            )
            folders.setdefault(method, []).append(REPOSITORY / folder)
            print(f"{folder.name} done", flush=True)
    print("\n".join(comparison_lines(*folders.values())))
    print("\n".join(["", *learned_lines(folders)]))
    print("\n".join(by_kind(REPOSITORY / out, REPOSITORY / data, folders)))
    draw_curves(folders, REPOSITORY / out / "curves.png")


if __name__ == "__main__":
    main()
