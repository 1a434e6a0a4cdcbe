"""A slice of Qwen2.5-VL-7B through the real training command: `python -m benchmarks.slice`.

Builds the model (published widths, few layers, random weights) and its data where they are missing,
trains with `configs/train/slice_7b_cpu.yaml` in one process and under ZeRO-3 with two, makes each
run's page, and prints a table: the distance of engine and trainer by position, the peak of a
process's memory against the prediction, seconds by phase, the page. What follows `--` goes to the
training (`-- --max_completion_length 64`). `python -m benchmarks.slice build` builds alone.

Each process of a run is `python -m benchmarks.slice --child`: the training command with an
observer. The run itself is unchanged.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from adora_vl.builtin.processor import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL_TOKENS,
    build_tokenizer,
)
from adora_vl.data.dataset import Manifest, Row, write_manifest, write_split
from adora_vl.data.output import complete_or_absent
from adora_vl.data.prompts import SYSTEM_PROMPT
from adora_vl.models.shape import SHAPES
from adora_vl.record.metrics import METRICS, read_metrics
from adora_vl.synthetic.generate import generate
from adora_vl.utils.files import GIB
from benchmarks.measure import PeakMemory

ROOT = Path(__file__).parents[1]
CONFIG = "configs/train/slice_7b_cpu.yaml"
# name -> accelerate config, and further words. Two processes keep a generation at two prompts. So
# that they fit into 24 GB, they divide one engine, and a micro-batch is half a group.
_DIVIDED = ["--vllm_tensor_parallel_size", "2", "--vllm_gpu_memory_utilization", "0.15"]
CASES: dict[str, tuple[str, list[str]]] = {
    "one": ("cpu", []),
    "zero3": ("cpu_zero3", ["--per_device_train_batch_size", "4", *_DIVIDED]),
}
ROWS = 8
PHASES = ("rollout", "policy", "sync", "grading", "other")
# the variable names the folder for what the observer sees
CHILD = "--child"
SEEN = "SLICE_SEEN"

PUBLISHED = "Qwen2.5-VL-7B-Instruct"
FIRST_SPECIAL = (
    151643  # the published id of <|endoftext|>; the others follow in the order of the tiny model's
)
FILLERS_A_BOX = 64
FULL_ATTENTION_EVERY = (
    8  # of the published tower's blocks: the last of each eight sees the whole image
)
SIDES = (504, 868)  # pixels: 324 and 961 image tokens
MIN_PIXELS = 56 * 56
MAX_PIXELS = 1280 * 28 * 28


def slice_config(layers: int, blocks: int, **widths: Any) -> Qwen2_5_VLConfig:
    """The published config with `layers` decoder layers and `blocks` vision blocks, the last of
    which sees the whole image, as the last of every eight does in the published tower.

    `widths`: other values, `vision_config` among them, for a test that has no memory for the real
    ones.
    """
    published = json.loads((SHAPES / PUBLISHED / "config.json").read_text(encoding="utf-8"))
    vision = published.pop("vision_config") | widths.pop("vision_config", {})
    full = [*range(FULL_ATTENTION_EVERY - 1, blocks, FULL_ATTENTION_EVERY), blocks - 1]
    vision |= {"depth": blocks, "fullatt_block_indexes": sorted(set(full))}
    text = published | widths | {"num_hidden_layers": layers, "max_window_layers": layers}
    return Qwen2_5_VLConfig(**text, vision_config=vision, pad_token_id=FIRST_SPECIAL)


def slice_tokenizer(answers: Sequence[str], texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """The tiny model's vocabulary, Qwen's special tokens at their published ids, and fillers
    between them, which a random model samples and which decode to short texts. One filler in 64 is
    a box around an answer, so that chance solves some of the problems and a reward has something to
    tell apart.

    `answers`: what the boxes hold. `texts`: what the vocabulary of prompts is learnt from.
    """
    learnt = json.loads(build_tokenizer(texts).backend_tokenizer.to_str())
    words = sorted(learnt["model"]["vocab"], key=learnt["model"]["vocab"].get)
    words = [word for word in words if word not in SPECIAL_TOKENS]
    vocabulary = {word: number for number, word in enumerate(words)}
    for number in range(len(words), FIRST_SPECIAL):
        box, place = divmod(number, FILLERS_A_BOX)
        vocabulary[_box(answers[box % len(answers)], box) if place == 0 else f"Ġw{number:x}"] = (
            number
        )
    vocabulary |= {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIAL_TOKENS)}
    whole = Tokenizer.from_str(json.dumps({**learnt, "added_tokens": []}))
    merges = [tuple(merge) for merge in learnt["model"]["merges"]]
    whole.model = models.BPE(vocab=vocabulary, merges=merges)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS),
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _box(answer: str, number: int) -> str:
    """A vocabulary has every text once, so each box has a number before it.

    `Ġ` is the space of byte-level BPE.
    """
    return f"Ġ({number:x})Ġ\\boxed{{{answer}}}"


def build_model(folder: Path, config: Qwen2_5_VLConfig, rows: Sequence[Row], seed: int = 0) -> int:
    """Write model, tokenizer and processor into `folder`.

    Returns the number of parameters.

    The weights are drawn in bfloat16 with the published standard deviation, the same for the same
    seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.generation_config.update(
        eos_token_id=[config.get_text_config().eos_token_id, FIRST_SPECIAL],
        pad_token_id=FIRST_SPECIAL,
    )
    model.save_pretrained(folder)
    save_processor(folder, rows)
    return sum(parameter.numel() for parameter in model.parameters())


def save_processor(folder: Path, rows: Sequence[Row]) -> None:
    """Write tokenizer and processor into `folder`."""
    texts = [f"system user assistant {SYSTEM_PROMPT}\n", *(row["problem"] for row in rows)]
    tokenizer = slice_tokenizer([row["answer"] for row in rows], texts)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def draw_rows(rows: int, seed: int = 0) -> list[Row]:
    """Drawn problems, their pictures by turns as large as `SIDES` say."""
    drawn = [
        generate(-(-rows // len(SIDES)), seed=seed + place, size=side)
        for place, side in enumerate(SIDES)
    ]
    return [row for rows_of_sides in zip(*drawn, strict=True) for row in rows_of_sides][:rows]


def write_data(folder: Path, rows: Sequence[Row]) -> Manifest:
    """A prepared dataset of these rows, complete or absent."""
    arguments = {"rows": len(rows), "sides": list(SIDES)}
    description = {"source": "synthetic", "input": None, "revision": None, "arguments": arguments}
    with complete_or_absent(folder, description) as partial:
        return write_manifest(partial, description, {"train": write_split(rows, partial, "train")})


def build(folder: Path, layers: int, blocks: int) -> None:
    """Model and data of the slice, unless they are there; the model is renamed into place when it
    is whole.
    """
    rows = draw_rows(ROWS)
    write_data(folder / "data", rows)
    if _layers_of(folder / "model") == (layers, blocks):
        return
    partial = folder / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    count = build_model(partial, slice_config(layers, blocks), rows)
    shutil.rmtree(folder / "model", ignore_errors=True)
    partial.rename(folder / "model")
    print(f"{folder / 'model'}: {count / 1e9:.2f} billion parameters", flush=True)


def _layers_of(model: Path) -> tuple[int, int] | None:
    file = model / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"]


def child(words: Sequence[str]) -> int:
    """The training command; writes down this process's memory, and how far the engine is from it."""
    from adora_vl.train import main
    from adora_vl.utils.launch import prepare_engine_environment

    prepare_engine_environment()
    observe(Path(os.environ[SEEN]), os.environ.get("RANK", "0"))
    return main(words)


def observe(folder: Path, rank: str) -> None:
    """Into `folder` goes `rank-N.jsonl`, a line per comparison of a micro-batch with the absolute
    differences in nats at each place of the answer, and `rank-N.memory.json`, peaks in bytes.
    """
    from adora_vl.trainer import AdoraGRPOTrainer
    from adora_vl.training.guards import DriftGuard

    check = DriftGuard.check
    train = AdoraGRPOTrainer.train
    watch = PeakMemory(mapped=False, every=0.05)
    libraries = watch.now()
    gaps_file = folder / f"rank-{rank}.jsonl"

    def checked(self: Any, logps_BC: Any, sampling_BC: Any, mask_BC: Any, step: int) -> None:
        gaps_BC = (logps_BC - sampling_BC).abs().float()
        columns = [
            gaps_BC[mask_BC[:, place].bool(), place].tolist() for place in range(gaps_BC.shape[1])
        ]
        with gaps_file.open("a") as stream:
            stream.write(json.dumps({"step": step, "gaps": columns}) + "\n")
        check(self, logps_BC, sampling_BC, mask_BC, step)

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = watch.restart()
        try:
            return train(self, *args, **kwargs)
        finally:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            peaks = {
                "libraries": libraries,
                "start": start,
                "training": watch.restart(),
                "resident": resident,
            }
            (folder / f"rank-{rank}.memory.json").write_text(json.dumps(peaks))

    DriftGuard.check = checked  # type: ignore[method-assign]
    AdoraGRPOTrainer.train = trained  # type: ignore[method-assign]


def _launch(name: str, module: Sequence[str], folder: Path, words: Sequence[str]) -> list[str]:
    accelerate, case = CASES[name]
    own = [
        "--model_name_or_path",
        str(folder / "model"),
        "--dataset_name",
        str(folder / "data"),
        *case,
    ]
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    launcher += ["--config_file", f"configs/accelerate/{accelerate}.yaml"]
    return [*launcher, "-m", *module, "--config", CONFIG, *own, *words]


def predicted(name: str, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """The dry run's prediction for the same command."""
    file = folder / "dry_run.json"
    command = _launch(name, ["adora_vl.train"], folder, [*words, "--dry-run", "--json", str(file)])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def train(name: str, folder: Path, words: Sequence[str]) -> float:
    """Run it, and leave what the observer saw in `NAME-seen`. Returns seconds."""
    seen = folder / f"{name}-seen"
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir()
    own = [*words, "--output_dir", str(folder / name), "--overwrite_output_dir", "true"]
    began = time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        command = _launch(name, ["benchmarks.slice", CHILD], folder, own)
        environment = {**os.environ, SEEN: str(seen)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit(
            f"{name}: exit code {done.returncode}\n{(folder / f'{name}.log').read_text()[-3000:]}"
        )
    return time.perf_counter() - began


def peaks(seen: Path) -> dict[str, int]:
    """The largest of all ranks, in bytes: of the libraries alone, until the first step, in
    training; and resident with mapped files.
    """
    ranks = [json.loads(file.read_text()) for file in sorted(seen.glob("rank-*.memory.json"))]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def gaps_by_place(folder: Path) -> list[list[float]]:
    """Absolute differences in nats at each place of the answers, over all ranks and steps."""
    places: list[list[float]] = []
    for file in sorted(folder.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines():
            for place, gaps in enumerate(json.loads(line)["gaps"]):
                places.extend([[] for _ in range(place + 1 - len(places))])
                places[place] += gaps
    return places


def by_quarters(places: Sequence[Sequence[float]]) -> list[tuple[int, int, float, float]]:
    """(first place, last place, mean, largest) of four equal parts of the answers."""
    ends = [round(len(places) * part / 4) for part in range(5)]
    spans = list(itertools.pairwise(ends))
    parts = [
        (first, last - 1, [gap for place in places[first:last] for gap in place])
        for first, last in spans
    ]
    return [(first, last, statistics.fmean(gaps), max(gaps)) for first, last, gaps in parts if gaps]


def page(run: Path) -> tuple[float, float]:
    """Seconds to make the report page, and its megabytes."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "adora_vl.report", str(run)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - began, (run / "report.html").stat().st_size / 1e6


def report(name: str, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """One run with all its figures."""
    plan = predicted(name, folder, words)
    seconds = train(name, folder, words)
    seen = folder / f"{name}-seen"
    metrics = read_metrics(folder / name / METRICS)
    steps = [
        {
            key: line.get(key)
            for key in ("reward", "adora/drift", "grad_norm", *(f"seconds/{p}" for p in PHASES))
        }
        for line in metrics
        if line["kind"] == "train"
    ]
    figures = {
        "seconds": seconds,
        "peaks": peaks(seen),
        "predicted_bytes": plan["peak_bytes"],
        "phases": plan["phases"],
        "steps": steps,
        "drift": by_quarters(gaps_by_place(seen)),
        "page": page(folder / name),
    }
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1))
    return figures


def table(name: str, figures: dict[str, Any]) -> str:
    """The report as lines for a person."""
    made, size = figures["page"]
    gib = {name: value / GIB for name, value in figures["peaks"].items()}
    own = gib["training"] - gib["libraries"]
    plan = figures["predicted_bytes"] / GIB
    starting = gib["start"] - gib["libraries"]
    lines = [
        f"{name}: {figures['seconds']:.0f} s in all; page made in {made:.1f} s, {size:.2f} MB",
        f"  memory of a process in training {own:.2f} GiB beside {gib['libraries']:.2f} of "
        "libraries",
        f"  predicted {plan:.2f} ({plan / own - 1:+.0%}); while the engine starts {starting:.2f}",
        f"  resident at most {gib['resident']:.2f} GiB, mapped weights included",
    ]
    for number, step in enumerate(figures["steps"], start=1):
        phases = ", ".join(
            f"{p} {step[f'seconds/{p}']:.1f}" for p in PHASES if step[f"seconds/{p}"] is not None
        )
        drift = step["adora/drift"]
        lines.append(
            f"  step {number}: drift {drift if drift is None else f'{drift:.5f}'}, seconds: "
            f"{phases}"
        )
    for first, last, mean, largest in figures["drift"]:
        lines.append(
            f"  tokens {first:>4} to {last:>4}: mean {mean:.5f}, largest {largest:.5f} nats"
        )
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("build", "run"), default="run")
    parser.add_argument("--layers", type=int, default=1, help="decoder layers (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="vision blocks (%(default)s)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/slice"))
    words = sys.argv[1:]
    own, more = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    options = parser.parse_args(own)
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown:
        sys.exit(f"--cases: {unknown[0]!r} is not one of {', '.join(CASES)}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(folder, options.layers, options.blocks)
    for name in options.cases.split(",") if options.what == "run" else []:
        print(table(name, report(name, folder, more)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
