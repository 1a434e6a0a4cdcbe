"""`--dry-run` on every shipped config.

Further tests have rows that are too long, and GPUs that are too small.
"""

import json
import shutil
from dataclasses import replace

import pytest

from adora_vl.builtin import TINY_FAMILIES
from adora_vl.builtin.processor import processor_around
from adora_vl.builtin.small_model import train_and_save
from adora_vl.builtin.tiny_text import TextStart, prepare_text
from adora_vl.builtin.tiny_vl import build_config
from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions, split_dry_run_options
from adora_vl.data.dataset import load_split
from adora_vl.data.overlong_prompts import PromptLengthFilter
from adora_vl.data.prompt_lengths import PromptLengths, pixel_limits_of
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.data.token_counters import tokenizer_counter
from adora_vl.models.load import PRETRAINED_FOLDER, limit_pixels, load_processor
from adora_vl.planning.plan import make_plan
from adora_vl.planning.report import batch_lines, learning_rate_line, length_lines
from adora_vl.train import main
from adora_vl.utils.errors import UserError
from data_prep.cli import main as data_prep
from tests.support.commands import parse
from tests.support.recipes import ACCELERATE_CONFIG_BY_RECIPE, CONFIGS_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_weights")]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Return a folder of 40 drawn problems for training, and 5 for testing."""
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    arguments = [
        "synthetic",
        "--output",
        str(folder),
        "--rows",
        "40",
        "--test-rows",
        "5",
        "--size",
        "140",
    ]
    assert data_prep(arguments) == 0
    return folder


# they train on drawn problems, which the fixture makes
RECIPES_WITH_DRAWN_DATA = (
    "smoke_cpu",
    "demo_cpu",
    "annotated",
)


def test_every_shipped_config_has_a_dry_run_on_a_machine_without_a_gpu(
    tmp_path, capsys, data_folder, subtests
):
    """Every shipped config has a dry run that fits on its machine, without a GPU or a hub.

    Most have no data set here either.
    """
    for name in ACCELERATE_CONFIG_BY_RECIPE:
        with subtests.test(name):
            (tmp_path / name).mkdir()
            check_dry_run_of_config(name, tmp_path / name, capsys, data_folder)


def check_dry_run_of_config(name, tmp_path, capsys, data):
    """Check what the dry run of a shipped config prints, what it writes as JSON, and that it fits.

    `data`: the folder of drawn problems for the configs that train on them, with 40 training rows.
    """
    arguments = [
        "--config",
        str(CONFIGS_FOLDER / "train" / f"{name}.yaml"),
        "--dry-run",
        "--json",
        str(tmp_path / "d.json"),
    ]
    arguments += [
        "--accelerate-config",
        str(CONFIGS_FOLDER / "accelerate" / f"{ACCELERATE_CONFIG_BY_RECIPE[name]}.yaml"),
    ]
    # The recipe's own folder holds a finished run where somebody has tried it here.
    arguments += ["--output_dir", str(tmp_path / "runs")]
    if name in RECIPES_WITH_DRAWN_DATA:
        arguments += ["--dataset_name", str(data)]
    if name == "tiny_zoom":  # where the user has not made them yet
        arguments += ["--dataset_name", str(tmp_path / "zoom")]
    if name == "smoke_text_cpu":  # a stand-in for the model, which takes a minute to make
        train_and_save(tmp_path / "model", TextStart(steps=2, batch_size=4, rows=8), prepare_text)
        arguments += [
            "--model_name_or_path",
            str(tmp_path / "model"),
            "--adora_synthetic_rows",
            "64",
        ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    figures = json.loads((tmp_path / "d.json").read_text())
    assert "It fits" in text
    assert figures["fits"]
    assert figures["largest_per_device_train_batch_size"] >= 1
    assert "prompts are sampled together" in text
    assert "at the first update" in text
    assert figures["learning_rate"]["last"] <= figures["learning_rate"]["first"]
    has_images = name not in ("smoke_text_cpu", "adora_llm_kk")
    assert ("Largest max_pixels that fits" in text) == has_images, (
        "only a policy that sees has images"
    )
    if name in RECIPES_WITH_DRAWN_DATA:
        assert "Not known here" not in text
        assert "40 rows make 2 optimizer steps an epoch; 8 rows left out" in text
        assert "no GPU" not in text
    elif name != "smoke_text_cpu":  # whose puzzles are made on the spot, or were
        assert figures["rows"] is None
        assert "The number of rows is not known" in text
        # for a CPU, with its model; its drawn pictures are made beforehand
        shipped = name == "tiny_zoom"
        assert ("and on a GPU in parts" in text) != shipped
        assert len(figures["unknown"]) == (
            1 if shipped else 4
        )  # the machine, config, processor, dataset
    assert not list(tmp_path.glob("runs*")), "nothing is written"


def test_the_papers_recipe_takes_eight_updates_a_generation_along_its_cosine():
    """A generation of the paper's recipe is learned from in 8 updates, 15 epochs long.

    With the same files on half of the GPUs a generation and an update are half as large, and there
    are twice as many.
    """
    for processes, generation, update in ((8, 1024, 128), (4, 512, 64)):
        check_updates_of_recipe(processes, generation, update)


def check_updates_of_recipe(processes, generation, update):
    """Check the sizes and steps that the dry run prints for the paper's recipe on so many GPUs.

    `generation`: rollouts per generation. `update`: rollouts per optimizer step.
    """
    arguments = ["--config", str(CONFIGS_FOLDER / "train" / "adora_7b_geo3k.yaml")]
    plan = make_plan(
        parse_command(arguments),
        DryRunOptions(
            card_gib=80.0,
            accelerate_config=CONFIGS_FOLDER / "accelerate" / "zero3_offload.yaml",
            processes=processes,
        ),
    )
    plan = replace(plan, row_count=2101)  # Geometry3K's
    text = " ".join(batch_lines(plan))
    assert f"8 rollouts of each: {generation} rollouts per generation" in text
    assert f"An optimizer step learns from {update} of them: " in text
    assert f" x {processes} processes. Optimizer steps a generation: 8." in text
    other_process_counts = text.split("with another --num_processes:")[1].split(".")[0]
    assert (
        "4 processes 512 and 64" if processes == 8 else "8 processes 1024 and 128"
    ) in other_process_counts
    assert f"{processes} processes" not in other_process_counts
    # 2,101 rows fill 16 generations of 128 prompts or 32 of 64, with 8 steps each, in 15 epochs
    steps = (plan.steps_per_epoch, plan.total_steps)
    assert steps == ((128, 1920) if processes == 8 else (256, 3840))
    assert (
        "cosine_with_min_lr, 1e-06 at the first update, 5.5e-07 half-way, 1e-07 at the last."
        in text
    )


def learning_rate_in_words(**changed):
    """Return the line of the dry run about the learning rate of 100 steps, with these keys."""
    arguments = [f"--{key}={value}" for key, value in changed.items()]
    config = parse(["--use_cpu", "true", "--bf16", "false", *arguments])[1]
    return learning_rate_line(config, 100)


def test_the_learning_rates_are_those_of_transformers_schedules():
    """The dry run prints Transformers' rates at the first, middle and last of 100 updates."""
    assert (
        "constant, 1e-06 at the first update, 1e-06 half-way, 1e-06 at the "
        in learning_rate_in_words(lr_scheduler_type="constant")
    )
    assert "linear, 0.001 at the first update, 0.0005 half-way, 1e-05 at" in learning_rate_in_words(
        learning_rate="1e-3"
    )
    assert "linear, 0 at the first update, 0.000556 half" in learning_rate_in_words(
        learning_rate="1e-3", warmup_steps="10"
    )
    plateau = learning_rate_in_words(
        lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps="10"
    )
    assert plateau.endswith("1e-06 on, as the training goes.")


def test_the_parts_of_the_memory_are_listed_where_they_matter(data_folder, capsys):
    """The parts of the memory are listed on a card of 4 GiB, but not on one of 1,000 GiB."""
    arguments = [
        "--config",
        str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml"),
        "--dataset_name",
        str(data_folder),
        "--dry-run",
    ]
    for gib, listed in ((1000, False), (4, True)):
        assert main([*arguments, "--card-gib", str(gib)]) == 0
        text = capsys.readouterr().out
        assert "It fits" in text
        assert ("GiB per card" in text) == listed == ("KV cache" in text)


def test_a_card_that_is_too_small_is_told_in_words_what_would_help(capsys):
    """A run that does not fit ends with 1 and the changes that would help.

    ZeRO-2 keeps the 7B's weights on each card, and `beta: 0.0` would save the reference.
    """
    arguments = [
        "--config",
        str(CONFIGS_FOLDER / "train" / "adora_7b_geo3k.yaml"),
        "--dry_run",
        "--card_gib",
        "80",
    ]
    arguments += ["--accelerate_config", str(CONFIGS_FOLDER / "accelerate" / "zero2.yaml")]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "It does NOT fit: rollouts would take 98" in text
    assert "ZeRO-3" in text
    assert "beta: 0.0" in text


def test_wrong_input_is_refused_as_a_run_would(capsys):
    assert main(["--dry-run", "--card-gib", "-4"]) == 2
    assert "--card_gib/--card-gib: '-4' is not a number from 0.1 to" in capsys.readouterr().err


def test_a_damaged_processor_is_not_taken_for_a_hub_that_is_away(tmp_path, data_folder):
    """A processor that cannot be read is an error of a dry run, unlike one on an unreachable hub.

    Without the hub a dry run plans with the processor's defaults.
    """
    model = shutil.copytree(PRETRAINED_FOLDER, tmp_path / "model")
    (model / "processor_config.json").write_text("{")
    arguments = [
        "--config",
        str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml"),
        "--dataset_name",
        str(data_folder),
    ]
    with pytest.raises(
        UserError,
        match=r"^model_name_or_path: the processor of .* cannot be loaded \(.*_config.json",
    ):
        make_plan(parse_command([*arguments, "--model_name_or_path", str(model)]), DryRunOptions())


@pytest.mark.core
def test_the_written_config_is_the_run_again(tmp_path, data_folder, capsys):
    """A config that `--write-config` wrote, with all keys, gives the same run as its source."""
    file = tmp_path / "all.yaml"
    source = [
        "--config",
        str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml"),
        "--dataset_name",
        str(data_folder),
        "--beta",
        "0.02",
    ]
    assert main([*source, "--dry-run", "--write-config", str(file)]) == 0
    first = parse(source)
    again = parse(["--config", str(file)])
    for before, after in zip(first, again, strict=True):
        differing = set()
        for key in vars(before):
            original = getattr(before, key)
            written = getattr(after, key)
            if written != original and str(written) != str(original):
                differing.add(key)
        # The methods are built from adora_method, which is compared.
        derived = {"distributed_state", "_n_gpu", "logging_dir", "deepspeed_plugin", "methods"}
        assert differing <= derived, differing
    assert file.read_text().splitlines()[0].startswith(("dataset_name", "output_dir")), (
        "what differs from the defaults comes first"
    )


def test_lengths_are_those_of_the_trainers_processor(data_folder, subtests):
    for family in TINY_FAMILIES:
        with subtests.test(family):
            check_lengths_of_family(data_folder, family)


def check_lengths_of_family(data, family):
    """Check that a dry run measures the prompts' lengths as the family's own processor does.

    `data`: a folder of drawn problems, of which every fifth is compared.
    """
    processor = processor_around(load_processor(str(PRETRAINED_FOLDER)).tokenizer, family)
    limit_pixels(processor, None, 9000)  # some images are made smaller
    counter = tokenizer_counter(processor, SYSTEM_PROMPT)
    pixel_limits = pixel_limits_of(processor, build_config(processor.tokenizer, family), None, 9000)
    rows = load_split(data, "train")
    overlong = PromptLengthFilter(
        None,
        counter=counter,
        pixels=pixel_limits,
        error_or_drop="error",
        prints_warnings=False,
        is_dry_run=True,
    )
    assert len(overlong.rows_to_train_on(rows, rows["problem"])) == len(rows)
    lengths = overlong.lengths
    assert lengths is not None
    for number in range(0, len(rows), 5):
        row = rows[number]
        text = processor.apply_chat_template(
            conversation_with_images(row["problem"], 1), add_generation_prompt=True, tokenize=False
        )
        ids = processor(text=[text], images=row["images"])["input_ids"][0]
        assert lengths.prompt_tokens[number] == len(ids)
        assert lengths.image_tokens[number] == list(ids).count(processor.image_token_id)


def test_rows_above_the_prefill_budget_are_counted(data_folder):
    """Prompts longer than the engine reads in a step are counted, with the number that holds all.

    Of four prompts of 50, 90, 91 and 130 tokens the last two exceed 90.
    """
    arguments = [
        "--config",
        str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml"),
        "--dataset_name",
        str(data_folder),
    ]
    plan = make_plan(
        parse_command([*arguments, "--adora_vllm_max_num_batched_tokens", "90"]), DryRunOptions()
    )
    plan = replace(plan, lengths=PromptLengths(["a", "b", "c", "d"], [50, 90, 91, 130], [4] * 4))
    assert (
        length_lines(plan)[-1]
        == "2 prompts exceed adora_vllm_max_num_batched_tokens: 90; raise it to 130."
    )


def test_both_spellings_and_what_is_left_for_trl():
    """Options of a dry run may have dashes or underscores; all other words are left for TRL.

    Without `--dry-run` there are no such options, and None is returned for them.
    """
    assert split_dry_run_options(["--dry-run"])[0] == DryRunOptions()
    assert split_dry_run_options(["--config", "x"])[0] is None
    options, words_for_trl = split_dry_run_options(
        ["--config", "x.yaml", "--dry_run", "--card_gib=24", "--seed", "3", "--rows", "9"]
    )
    assert words_for_trl == ["--config", "x.yaml", "--seed", "3"]
    assert options.card_gib == 24.0
    assert options.rows == 9
    with pytest.raises(UserError, match="--processes: '0' is not a whole number from 1 on; see"):
        split_dry_run_options(["--processes", "0"])


SMOKE_CONFIG = ["--config", str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml")]


def test_the_verdict_stands_last_with_the_command_that_comes_next(data_folder, tmp_path, capsys):
    """The last lines of a dry run are its verdict and, if the run fits, the command to start it.

    Without an accelerate config that command is plain Python.
    """
    arguments = [*SMOKE_CONFIG, "--use_vllm", "false", "--output_dir", str(tmp_path / "run")]
    assert main([*arguments, "--dry-run"]) == 0
    verdict, next_command = capsys.readouterr().out.splitlines()[-2:]
    assert verdict.startswith("It fits: ")
    assert verdict.endswith(" GiB.")
    assert next_command == f"Next: python -m adora_vl.train {' '.join(arguments)}"
    launcher = str(CONFIGS_FOLDER / "accelerate" / "cpu.yaml")
    assert main([*arguments, "--dry-run", "--accelerate-config", launcher, "--processes", "1"]) == 0
    next_command = capsys.readouterr().out.splitlines()[-1]
    assert next_command.startswith(
        f"Next: accelerate launch --config_file {launcher} --num_processes"
    )
    assert main([*arguments, "--dry-run", "--card-gib", "0.1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("It does NOT fit: ")


def test_memory_is_shown_also_where_the_rows_do_not_fill_a_generation(
    data_folder, tmp_path, capsys
):
    """A dry run with too few rows for a generation prints the memory, and then ends with the error.

    64 micro-batches have more prompts than the 40 rows of the data. No config is written.
    """
    arguments = [*SMOKE_CONFIG, "--use_vllm", "false", "--dataset_name", str(data_folder)]
    arguments += ["--output_dir", str(tmp_path / "run"), "--steps_per_generation", "64"]
    written = tmp_path / "ours.yaml"
    assert main([*arguments, "--dry-run", "--write-config", str(written)]) == 2
    captured = capsys.readouterr()
    assert "Memory, predicted" in captured.out
    assert captured.out.splitlines()[-1].startswith("It fits: ")
    [error] = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert "cannot fill one generation" in error
    assert not written.exists()
    with pytest.raises(UserError, match="cannot fill one generation"):
        make_plan(parse_command(arguments), DryRunOptions())
    assert main(arguments) == 2
    assert "cannot fill one generation" in capsys.readouterr().err


def test_a_generation_of_all_processes_is_planned_where_one_alone_does_not_divide(tmp_path, capsys):
    """Rollouts are divided into groups over all processes: 8 processes with one each are one group.

    With 4 processes, or one, there is less than a group of 8, which is refused.
    """
    arguments = [*SMOKE_CONFIG, "--use_vllm", "false", "--output_dir", str(tmp_path / "run")]
    arguments += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"]
    arguments += ["--steps_per_generation", "1", "--num_generations", "8", "--dry-run"]
    assert main([*arguments, "--processes", "8"]) == 0
    assert "8 rollouts per generation" in capsys.readouterr().out
    assert main([*arguments, "--processes", "4"]) == 2
    assert (
        "per_device_train_batch_size: 1 x steps_per_generation: 1 x 4 processes = 4 rollouts, "
        "which do not divide into groups"
    ) in capsys.readouterr().err
    assert main(arguments) == 2
    assert "do not divide into groups of num_generations: 8" in capsys.readouterr().err


def test_a_generation_batch_size_is_that_of_all_processes(tmp_path, capsys):
    """`generation_batch_size: 64` is 64 rollouts on two processes together, not on each."""
    arguments = [*SMOKE_CONFIG, "--use_vllm", "false", "--output_dir", str(tmp_path / "run")]
    arguments += [
        "--per_device_train_batch_size",
        "8",
        "--generation_batch_size",
        "64",
        "--dry-run",
    ]
    assert main([*arguments, "--processes", "2"]) == 0
    assert "64 rollouts per generation" in capsys.readouterr().out


def test_a_tiny_model_with_rows_of_ones_own_is_named_at_the_start(data_folder, tmp_path, capsys):
    """The tiny model is warned of with other data than drawn problems, on which it was trained.

    The other data are the drawn problems with another source in their manifest.
    """
    arguments = [
        *SMOKE_CONFIG,
        "--use_vllm",
        "false",
        "--output_dir",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    assert main(arguments) == 0
    assert "knows the built-in problems alone" not in capsys.readouterr().out
    own_rows = shutil.copytree(data_folder, tmp_path / "own")
    manifest = json.loads((own_rows / "manifest.json").read_text())
    (own_rows / "manifest.json").write_text(json.dumps({**manifest, "source": "own/file"}))
    assert main([*arguments, "--dataset_name", str(own_rows)]) == 0
    assert "tiny knows the built-in problems alone" in " ".join(capsys.readouterr().out.split())


def test_a_peft_that_switches_an_optimisation_off_is_named(
    data_folder, tmp_path, capsys, monkeypatch
):
    """A version of peft that nobody has tried gives a note, if an adapter is trained."""
    monkeypatch.setattr("adora_vl.models.lora_branch.installed_version", lambda name: "0.99.0")
    note = "peft 0.99.0 is installed, and an adapter's products"
    arguments = ["--config", str(CONFIGS_FOLDER / "train" / "smoke_cpu.yaml"), "--dry-run"]
    arguments += ["--dataset_name", str(data_folder), "--output_dir", str(tmp_path / "run")]
    arguments += ["--use_vllm", "false"]
    assert main([*arguments, "--use_peft", "true"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--use_peft", "false"]) == 0
    assert note not in " ".join(capsys.readouterr().out.split())


def test_data_that_is_missing_is_named_beside_the_next_command(tmp_path, capsys):
    """A dry run plans without the data, and says what has to be prepared."""
    arguments = [*SMOKE_CONFIG, "--use_vllm", "false", "--output_dir", str(tmp_path / "run")]
    arguments += ["--dataset_name", str(tmp_path / "none"), "--dry-run"]
    assert main(arguments) == 0
    first, next_command = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith(f"First: prepare the data, {tmp_path / 'none'} ")
    assert next_command.startswith("Next: ")
