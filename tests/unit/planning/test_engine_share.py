"""The engine's share of a GPU: what the dry run proposes, and what the recipes ask for."""

from dataclasses import replace
from functools import cache

import pytest

from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.models.check import LOST_UPDATES_WARNING
from adora_vl.planning.memory import MemorySetup, predict_memory
from adora_vl.planning.memory_report import memory_lines, memory_remedy
from adora_vl.planning.plan import DryRunPlan, make_plan
from adora_vl.planning.what_fits import HEADROOM_SHARE, best_vllm_utilization, fits_into_gpu
from adora_vl.prepare import prepare
from adora_vl.utils.files import GIB
from tests.support.recipes import CONFIGS_FOLDER
from tests.support.tiny_run import tiny_run_arguments

# by recipe: the accelerate config, and the memory of the GPU in GB as it is sold
ACCELERATE_CONFIG_AND_GB_BY_RECIPE = {
    "adora_3b_12gb": ("gpu1", 12),
    "adora_7b_16gb_4bit": ("gpu1", 16),
    "adora_7b_24gb_4bit": ("gpu1", 24),
    "adora_3b_24gb": ("gpu1", 24),
    "adora_3b_1gpu_lora": ("gpu1", 40),
    "adora_qwen3_vl_2b_1gpu": ("gpu1", 80),
    "adora_qwen3_vl_4b_1gpu_lora": ("gpu1", 40),
    "adora_7b_geo3k": ("zero3", 80),
    "grpo_7b_geo3k": ("zero3", 80),
    "adora_qwen3_vl_8b_geo3k": ("zero3", 80),
}


@cache
def plan_for_recipe(name: str, *words: str) -> DryRunPlan:
    """Plan a recipe, with further `words` of its command, on the card that it is for.

    A plan takes a second, and no test changes it.
    """
    launcher, gigabytes = ACCELERATE_CONFIG_AND_GB_BY_RECIPE[name]
    card = gigabytes * 1e9 / GIB
    accelerate = CONFIGS_FOLDER / "accelerate" / f"{launcher}.yaml"
    command = ["--config", str(CONFIGS_FOLDER / "train" / f"{name}.yaml"), *words]
    return make_plan(
        parse_command(command), DryRunOptions(card_gib=card, accelerate_config=accelerate)
    )


def words_for_four_gpus() -> list[str]:
    """Read what the page on getting started tells owners of four GPUs to add."""
    page = (CONFIGS_FOLDER.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    command = page.split("**Four GPUs.**")[1].split("```")[1]
    assert "accelerate/zero3.yaml --num_processes 4 " in command
    return command.split("configs/train/adora_7b_geo3k.yaml")[1].split()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adora_7b_geo3k", words_for_four_gpus()),
        ("adora_llm_kk", ["--per_device_train_batch_size", "10"]),
    ],
)
def test_what_is_said_about_four_gpus_fits_them(name, words):
    """A recipe for eight GPUs of 80 GB fits on four with the words that adapt it.

    A generation keeps its number of rollouts.
    """
    command = ["--config", str(CONFIGS_FOLDER / "train" / f"{name}.yaml"), *words]
    accelerate = CONFIGS_FOLDER / "accelerate" / "zero3.yaml"
    plan = make_plan(
        parse_command(command),
        DryRunOptions(card_gib=80e9 / GIB, accelerate_config=accelerate, processes=4),
    )
    assert fits_into_gpu(plan.setup, plan.gpu_bytes)
    whole_plan = make_plan(
        parse_command(command[:2]), DryRunOptions(card_gib=80e9 / GIB, accelerate_config=accelerate)
    )
    on_four = plan.run.layout.generation_batch
    on_eight = whole_plan.run.layout.generation_batch
    assert on_four == on_eight, "a generation is as large as on eight"


def test_a_run_that_fits_with_a_smaller_share_alone_is_told_that_first():
    """A run that would fit with a smaller share for the engine gets that as its first remedy.

    It is the recipe of eight GPUs on four.
    """
    command = ["--config", str(CONFIGS_FOLDER / "train" / "adora_7b_geo3k.yaml")]
    accelerate = CONFIGS_FOLDER / "accelerate" / "zero3.yaml"
    plan = make_plan(
        parse_command(command),
        DryRunOptions(card_gib=80e9 / GIB, accelerate_config=accelerate, processes=4),
    )
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    assert utilization is not None
    assert not fits_into_gpu(plan.setup, plan.gpu_bytes)
    assert memory_remedy(plan).startswith(
        f"Try, in this order: vllm_gpu_memory_utilization: {utilization:g}; the optimizer in host"
    )
    assert fits_into_gpu(with_utilization(plan.setup, utilization), plan.gpu_bytes)


def with_utilization(setup: MemorySetup, utilization: float) -> MemorySetup:
    """Return the same setup with another share of the GPU for the engine."""
    assert setup.engine is not None
    return replace(setup, engine=replace(setup.engine, utilization=utilization))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCELERATE_CONFIG_AND_GB_BY_RECIPE)
def test_a_recipe_fits_and_takes_nearly_all_that_is_free_on_its_card(name):
    """A recipe's share is at most what the dry run proposes, and at most 0.05 less."""
    plan = plan_for_recipe(name)
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    engine = plan.setup.engine
    assert fits_into_gpu(plan.setup, plan.gpu_bytes)
    assert utilization is not None
    assert engine is not None
    assert utilization - 0.05 <= engine.utilization <= utilization


@pytest.mark.slow
def test_no_recipe_trains_weights_whose_updates_rounding_swallows():
    """No recipe has the warning on updates lost to bfloat16; with `--dtype bfloat16` one has it.

    At a learning rate of 1e-6 Adam moves a weight of 0.02 by less than half of what bfloat16 can
    tell apart there.
    """
    assert not [
        name
        for name in ACCELERATE_CONFIG_AND_GB_BY_RECIPE
        if LOST_UPDATES_WARNING in plan_for_recipe(name).notes
    ]
    plan = plan_for_recipe("adora_qwen3_vl_2b_1gpu", "--dtype", "bfloat16")
    assert LOST_UPDATES_WARNING in plan.notes
    # DeepSpeed, which a dry run only plans for, keeps a float32 copy
    planned_for_deepspeed = plan_for_recipe("adora_7b_geo3k", "--dtype", "bfloat16")
    assert LOST_UPDATES_WARNING not in planned_for_deepspeed.notes


def test_a_run_whose_updates_rounding_swallows_says_so_at_its_start(tmp_path, capsys):
    """Weights in bfloat16 are warned of; `auto` is the tiny model's own dtype, float32."""
    for dtype, warns in (
        ("bfloat16", True),
        ("float32", False),
        ("auto", False),
    ):
        prepare(parse_command(tiny_run_arguments(tmp_path / dtype, dtype=dtype)))
        assert (LOST_UPDATES_WARNING in capsys.readouterr().out) == warns


def test_the_proposed_share_has_room_for_the_most_rollouts_and_leaves_some_memory_free():
    """The proposed share lets the most rollouts run at once, and is the smallest that does.

    Every share from 0.01 to 0.99 is tried. Those that leave less than `HEADROOM_SHARE` of the card
    free do not count.
    """
    plan = plan_for_recipe("adora_3b_1gpu_lora")
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    assert utilization is not None
    rollouts_by_utilization = {}
    for hundredths in range(1, 100):
        prediction = predict_memory(with_utilization(plan.setup, hundredths / 100), plan.gpu_bytes)
        if (
            prediction.peak_bytes <= (1 - HEADROOM_SHARE) * plan.gpu_bytes
            and prediction.engine is not None
        ):
            rollouts_by_utilization[hundredths / 100] = prediction.engine.concurrent_rollouts
    most_rollouts = rollouts_by_utilization[utilization]
    assert most_rollouts == max(rollouts_by_utilization.values()) > 0
    for lower_utilization, count in rollouts_by_utilization.items():
        if lower_utilization < utilization:
            assert count < most_rollouts, "no more memory than is of use"


def test_where_all_rollouts_run_at_once_no_more_is_proposed():
    """The proposed share is no larger than what all rollouts of a generation need at once.

    Answers of 64 tokens need a cache of less than half the card.
    """
    short = ["--max_completion_length", "64", "--vllm_max_model_length", "700"]
    plan = plan_for_recipe("adora_qwen3_vl_2b_1gpu", *short)
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    assert utilization is not None
    assert utilization < 0.5
    engine = predict_memory(with_utilization(plan.setup, utilization), plan.gpu_bytes).engine
    assert engine is not None
    assert engine.concurrent_rollouts == plan.setup.sequences_per_generation


def test_without_room_or_without_an_engine_nothing_is_proposed():
    """A card of 8 GiB, a run without vLLM, and a run on a CPU."""
    plan = plan_for_recipe("adora_3b_1gpu_lora")
    assert best_vllm_utilization(plan.setup, 8 * GIB) is None
    assert best_vllm_utilization(replace(plan.setup, engine=None), plan.gpu_bytes) is None
    assert best_vllm_utilization(replace(plan.setup, on_gpu=False), plan.gpu_bytes) is None


@pytest.mark.slow
def test_the_dry_run_names_the_share_only_where_it_helps():
    """A better share for the engine is printed if the recipe's is too low or does not fit.

    0.35 is too low, and with 0.95 the run does not fit. With the best share nothing is printed.
    """
    low = plan_for_recipe("adora_3b_1gpu_lora", "--vllm_gpu_memory_utilization", "0.35")
    plan_with_right_share = plan_for_recipe("adora_3b_1gpu_lora")
    utilization = best_vllm_utilization(low.setup, low.gpu_bytes)
    plan_with_right_share = replace(
        plan_with_right_share, setup=with_utilization(plan_with_right_share.setup, utilization or 0)
    )
    line = f"vllm_gpu_memory_utilization: {utilization:g} instead of 0.35 lets 150 run at once"
    assert any(memory_line.startswith(line) for memory_line in memory_lines(low))
    assert not any(
        "instead of" in memory_line and "run at once" in memory_line
        for memory_line in memory_lines(plan_with_right_share)
    )
    much = plan_for_recipe("adora_3b_1gpu_lora", "--vllm_gpu_memory_utilization", "0.95")
    assert not fits_into_gpu(much.setup, much.gpu_bytes)
    assert any(
        f"{utilization:g} instead of 0.95" in memory_line for memory_line in memory_lines(much)
    )


def test_a_card_that_is_too_small_for_16_bits_is_told_of_4():
    """A run whose weights leave no room on the card is told of 4 bits, and of no lower share.

    The recipe for 24 GB is planned on 12 GB, where the engine has no cache left that a lower share
    would free.
    """
    command = ["--config", str(CONFIGS_FOLDER / "train" / "adora_3b_24gb.yaml")]
    plan = make_plan(parse_command(command), DryRunOptions(card_gib=12e9 / GIB))
    assert not fits_into_gpu(plan.setup, plan.gpu_bytes)
    remedy = memory_remedy(plan)
    assert "load_in_4bit: true" in remedy
    assert "vllm_gpu_memory_utilization" not in remedy


def test_one_process_that_trains_all_weights_is_told_of_several_gpus():
    """A 7B model with its optimizer needs more than one card of 80 GB."""
    command = ["--config", str(CONFIGS_FOLDER / "train" / "adora_7b_geo3k.yaml")]
    plan = make_plan(parse_command(command), DryRunOptions(card_gib=80e9 / GIB))
    assert "--accelerate-config configs/accelerate/zero3.yaml" in memory_remedy(plan)
