"""A cheap row or column of each table of figures on the pages is what its command prints."""

import json
import re

import pytest
import yaml

from adora_vl.train import main as train
from benchmarks import grading, lockstep, scanned, step, what_fits
from benchmarks.fake_card.tables import FLOPS_RESULT_FILE, flops_cells
from benchmarks.grading_corpus import cases
from data_prep.cli import main as data_prep
from eval.__main__ import main as evaluate
from tests.support.paths import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "benchmarks" / "README.md",
    *(REPOSITORY / "docs").glob("*.md"),
]
TEXT_OF_PAGES = "\n".join(page.read_text() for page in PAGES)
# Rows by the first column's title, where two rows or more have two figures or more.
ROWS_BY_TABLE = {}
for title, body in re.findall(
    r"^\| (.+?) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT_OF_PAGES, re.MULTILINE
):
    rows = [[cell.strip(" *") for cell in line[1:-1].split(" | ")] for line in body.splitlines()]
    if sum(sum(bool(re.match(r"[-+]?\d", cell)) for cell in row) > 1 for row in rows) > 1:
        ROWS_BY_TABLE[title] = rows


def gib_of_dry_run(folder, arguments):
    """Return what a dry run prints of memory: three phases and the largest batch, and the peak.

    In GiB, with texts as the tables have them.
    """
    all_layers = ["--adora_recompute", "all"]  # the least memory
    train([*arguments.split(), *all_layers, "--dry-run", "--json", str(folder / "dry_run.json")])
    result = json.loads((folder / "dry_run.json").read_text())
    phases = (
        result["phases"].get(name, {})
        for name in ("rollouts", "forward and backward", "optimizer step")
    )
    gib = [f"{sum(parts.values()) / 2**30:.1f}" for parts in phases]
    return [
        *gib,
        str(result["largest_per_device_train_batch_size"] or "none"),
    ], f"{result['peak_bytes'] / 2**30:.1f}"


def prediction_tables(folder, recipes, larger_models):
    """Compare each row of the tables of predicted memory with a dry run of its recipe.

    `recipes` and `larger_models` are the rows of the tables that begin with "GPUs" and "model".
    """
    keys_of_four_gpus = (
        TEXT_OF_PAGES.split("**Four GPUs.**")[1]
        .split("adora_7b_geo3k.yaml ")[1]
        .split(" --vllm")[0]
    )
    names = {"7B": "7b_geo3k", "3B, LoRA (1)": "3b_24gb", "3B, LoRA": "3b_1gpu_lora"}
    for gpus, model, launcher, card, share, *gib, _, batch, _ in recipes:
        arguments = (
            f"--config configs/train/adora_{names[model]}.yaml --vllm_gpu_memory_utilization "
            f"{share} --processes "
        )
        arguments += (
            f"{gpus} --accelerate-config configs/accelerate/{launcher.split('`')[1]}.yaml "
            f"--card-gib {card} "
        )
        arguments += (keys_of_four_gpus if gpus == "4" else "") + (
            " --beta 0" if "beta" in launcher else ""
        )
        assert gib_of_dry_run(folder, arguments)[0] == [
            *(cell.split()[0] for cell in gib),
            batch,
        ], arguments
    (command,) = re.findall(
        r"python -m adora_vl.train ((?:.*\\\n)*.*--machines 4.*)\n", TEXT_OF_PAGES
    )
    for model, machines, _, parallel, *printed in larger_models:
        arguments = (
            command.replace("\\\n", "")
            .replace("-32B-", f"-{model}-")
            .replace("size 4", f"size {parallel}")
        )
        assert (
            gib_of_dry_run(folder, arguments.replace("machines 4", f"machines {machines}"))[0]
            == printed
        ), arguments


def policy_step(folder, rows):
    """Compare the row's form with `page_row`, and each ratio with the seconds beside it."""
    figures_by_way = {
        step_way: {"backward": 1.0, "data": 9.0, "step_bytes_outside_head": 1.0}
        for step_way in step.STEP_WAYS
    }
    printed = step.page_row(figures_by_way, 697, step.answer_lengths(400, 1024, 8, equal=False))
    assert printed == f"| 697 | {rows[1][1]} | 1 | 1 | **1.00** | 1.00 |"
    for _, _, *cells, _ in rows:  # the ratio of rounded seconds
        for stock_seconds, our_seconds, ratio in zip(
            *(map(float, cell.split(", ")) for cell in cells), strict=True
        ):
            assert ratio == pytest.approx(our_seconds / stock_seconds, abs=0.011)


def simulated_card(folder, flops, memory):
    """Compare the operations with the stored counts, and each share with the memory beside it.

    The command takes minutes for each row, so what it has counted is in a file.
    """
    counted = json.loads(FLOPS_RESULT_FILE.read_text(encoding="utf-8"))
    assert flops == [[cell.strip("*") for cell in flops_cells(row)] for row in counted]
    assert {row["updates_per_generation"] for row in counted} == {2}, "the recipe's"
    for row in memory:
        first_peak, later_peak, predicted, share = map(float, row[-4:])
        assert share == pytest.approx(predicted / later_peak, abs=0.003)  # of rounded figures
        assert share == pytest.approx(1, abs=0.035)
        # It begins without gradients, which in 4 bits may be less than the last digit.
        assert 0.83 * predicted < first_peak <= later_peak


def ranks_in_lockstep(folder, rows):
    """Compare each row with the simulated micro-batches and ratios of its case."""
    for case, row in zip(lockstep.MEASURED_CASES, rows, strict=False):
        generation = lockstep.simulate_filled(case)
        ratio_without_filling = lockstep.simulate(case, lockstep.move_groups)
        figures = (generation.micro_batches, generation.lockstep_ratio, ratio_without_filling)
        assert row[0].startswith(f"{case.prompt:,}, {case.mean:,}, {case.longest:,}")
        assert row[1:] == [f"{figure:.2f}" for figure in figures]


def grader_tables(folder, rows):
    """Compare the row of our grader, and the sentences on the others, with the labelled cases."""
    correct = [grading.grade_by_ours(case) == (case.label == "correct") for case in cases()]
    counts = [[int(cell.replace(",", "")) for cell in row[1:]] for row in rows]
    assert counts[0] == [sum(correct), 0, 0, 0, 0, 0]
    assert {sum(row) for row in counts} == {len(correct)}
    assert f"right in all {len(correct):,} of our labelled cases" in TEXT_OF_PAGES
    assert f"is right in {rows[3][1]},\n  and hung in {rows[4][5]} (" in TEXT_OF_PAGES


def rows_not_printed(tables_text, tables):
    """Return the rows of pages that a command does not print."""
    printed = tables_text.replace("**", "")
    return [row for rows in tables for row in rows if f"| {' | '.join(row)} |" not in printed]


def scanned_digits_tables(folder, *tables):
    """Compare each row with the tables of the stored runs."""
    plan = yaml.safe_load(scanned.PLAN.read_text())
    tables_text = scanned.tables(plan, scanned.read_runs(scanned.STORED_RUNS))
    assert rows_not_printed(tables_text, tables) == []


def before_training(folder, plain, demo, budget):
    """Compare the accuracies before training with an evaluation, within a point.

    Another processor may answer a problem or two otherwise. `plain`, `demo` and `budget` are the
    rows of the tables that begin with "accuracy", "after 50 steps, in percent" and "task".
    """
    for model, arguments, cells in (
        ("tiny", ["600"], [plain[0][1], budget[0][5]]),
        ("tiny_perimeter", ["400", "--families", "perimeter"], [demo[0][1], budget[-1][5]]),
    ):
        data_prep(
            [
                "synthetic",
                "--output",
                f"{folder}/{model}-data",
                "--rows",
                "8",
                "--test-rows",
                *arguments,
            ]
        )
        options = [
            "--engine",
            "transformers",
            "--max-tokens",
            "60",
            "--model",
            model,
            "--data",
            f"{folder}/{model}-data",
        ]
        evaluate(["geometry3k", "run", *options, "--output", f"{folder}/{model}"])
        accuracy_in_percent = (
            100 * json.loads((folder / model / "score.json").read_text())["accuracy"]
        )
        assert [float(cell) for cell in cells] == pytest.approx(
            [accuracy_in_percent, accuracy_in_percent], abs=1
        ), model


def small_card_table(folder, rows):
    """Compare the rows of 12 and 24 GB with what the command prints."""
    printed = [*what_fits.table_rows((12, 24))][2:]
    assert [f"| {' | '.join(row)} |" for row in rows if row[0] in ("12", "24")] == printed


def rented_card_table(folder, rows):
    """Hours and cost follow from the seconds and the price, which are estimates."""
    for _, _, seconds, rollouts, hours, price, cost in rows:
        exact = float(seconds) * int(rollouts.replace(",", "")) / 256 / 3600
        assert int(hours) == pytest.approx(exact, abs=0.6)
        assert int(cost) == pytest.approx(exact * float(price), abs=0.6)


TABLE_HEADS_BY_CHECK = {
    rented_card_table: ["recipe, on a rented card"],
    small_card_table: ["card, GB"],
    prediction_tables: ["GPUs", "model"],
    policy_step: ["prompt, tokens"],
    simulated_card: ["prompt", "recipe, on a simulated card"],
    ranks_in_lockstep: ["prompt, mean answer, longest"],
    grader_tables: ["grader"],
    before_training: ["accuracy", "after 50 steps, in percent", "task"],
    scanned_digits_tables: [
        f"{case}: {title}"
        for case in ("long is better", "short is as good")
        for title in ("arm", "difference in points [95 %]")
    ],
}
# The tests of the rewards hold the presets; the others are read, take an engine for half an hour or
# a card, are seconds of one machine, or are of experiments whose pages name the commit at which
# their commands run.
TABLES_NOT_COMPARED = {
    "R2, recipe and arm",
    "accuracy, end (seeds)",
    "texts",  # first readings, which cannot be made again
    "accuracy, mean over steps (seeds)",
    "arm",
    "difference in points [95 %]",
    "reward",
    "two CPU cores, 24 GiB",
    "trainer",  # on a card
    "steps on a card",  # the same by phase
    "rule",
    "verdict",
    "7B, what is computed",  # minutes for each run
    "work",
    "median",
    "start",
    "generations ahead",
    "on an H200",
    "prompt, rollouts x tokens",
    "on Geometry3K",
    "a rule for diagrams",
    "card",
    "task, by a model of under 1 M parameters",
    "task, accuracy at the end in percent",
    "published, 7B on Geometry3K",
    "check of training answers (seed 2026)",  # by hand
    "tests of others",
    "evaluator",  # published files, of which none lies here
    "order of the groups",
    "attention, micro-batches",  # all layers on a simulated card
    "layers, 3B with LoRA",  # minutes on a simulated card
    "operations a group, forward and backward",
}


def test_every_table_of_figures_is_compared():
    """Each table on the pages is compared by a check, or is named in `TABLES_NOT_COMPARED`."""
    assert ROWS_BY_TABLE.keys() - TABLES_NOT_COMPARED == {
        title for titles in TABLE_HEADS_BY_CHECK.values() for title in titles
    }


@pytest.mark.slow
@pytest.mark.parametrize("check", TABLE_HEADS_BY_CHECK)
def test_a_cheap_part_is_what_the_command_prints(check, tmp_path, monkeypatch):
    """Each check gets the rows of its tables, and compares those that take seconds."""
    monkeypatch.chdir(REPOSITORY)
    check(tmp_path, *(ROWS_BY_TABLE[title] for title in TABLE_HEADS_BY_CHECK[check]))
