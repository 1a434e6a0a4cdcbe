"""Every shipped config is parsed by the code of a real run.

Its arithmetic is checked for the GPUs that it names.
"""

import re
from dataclasses import asdict, fields
from typing import Any

import pytest
import yaml

from adora_vl.advantage import METHODS
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import BatchLayout, build_batch_layout, check_row_count
from adora_vl.config.command import read_config_file
from adora_vl.preflight.check_keys import check_keys
from adora_vl.preflight.request import ModelSource, RunRequest
from adora_vl.utils.cli import with_dotted_keys
from adora_vl.utils.errors import UserError
from tests.support.commands import parse
from tests.support.recipes import ACCELERATE_CONFIG_BY_RECIPE, CONFIGS_FOLDER, key_defaults

GEOMETRY3K_ROWS = 2101  # its training split
# the rows of the data of recipes that do not train on Geometry3K
ROWS = {
    "smoke_cpu": 4096,
    "demo_cpu": 2000,
    "smoke_text_cpu": 4096,
    "annotated": 4096,
    "adora_llm_kk": 4500,
    "tiny_zoom": 2000,
}


def parse_recipe(name: str) -> Any:
    """Build the config dataclasses of a shipped config, but for a machine without a GPU."""
    return parse(
        [
            "--config",
            str(CONFIGS_FOLDER / "train" / f"{name}.yaml"),
            "--use_cpu",
            "true",
            "--bf16",
            "false",
        ]
    )


def read_recipe(name: str) -> dict[str, Any]:
    """Return the keys and values of a shipped config, as its YAML has them."""
    return read_config_file(CONFIGS_FOLDER / "train" / f"{name}.yaml")


def test_every_shipped_config_is_in_the_pairs():
    """A config of configs/train or configs/accelerate that is added has to be tested."""
    assert {
        path.stem for path in (CONFIGS_FOLDER / "train").glob("*.yaml")
    } == ACCELERATE_CONFIG_BY_RECIPE.keys()
    names = {path.stem for path in (CONFIGS_FOLDER / "accelerate").glob("*.yaml")}
    assert names == {"cpu", "cpu_zero3", "gpu1", "zero2", "zero3", "zero3_offload", "zero3_nodes"}


def test_every_train_config_passes_the_checks_of_a_real_run(subtests):
    """Each recipe, with its number of processes, has valid keys and whole generations of rows."""
    for name, launcher in ACCELERATE_CONFIG_BY_RECIPE.items():
        with subtests.test(name):
            script, config, model = parse_recipe(name)
            accelerate_config = (CONFIGS_FOLDER / "accelerate" / f"{launcher}.yaml").read_text()
            processes = yaml.safe_load(accelerate_config)["num_processes"]
            check_keys(
                RunRequest(config=config, model=ModelSource(model_args=model), data_source=script)
            )
            plan = build_batch_layout(config, processes)
            check_row_count(plan, ROWS.get(name, GEOMETRY3K_ROWS))
            assert plan.generation_batch == plan.prompts_per_generation * config.num_generations
            assert model.model_name_or_path
            assert script.dataset_name
            # a micro-batch has whole groups, or half of one on the card with 16 GB
            if launcher != "cpu":
                parts = 2 if name == "adora_7b_16gb_4bit" else 1
                assert parts * config.per_device_train_batch_size % config.num_generations == 0


def test_each_config_s_header_names_its_accelerate_config():
    """A recipe whose header names accelerate configs names the one that the tests use it with.

    They are paired in `ACCELERATE_CONFIG_BY_RECIPE`, as {"smoke_cpu": "cpu"}.
    """
    for name, launcher in ACCELERATE_CONFIG_BY_RECIPE.items():
        header = (
            (CONFIGS_FOLDER / "train" / f"{name}.yaml").read_text().split("\nmodel_name_or_path")[0]
        )
        named_configs = set(re.findall(r"configs/accelerate/(\w+)\.yaml", header))
        assert not named_configs or launcher in named_configs, name
        assert "zero3_offload" not in named_configs, (
            "the optimizer in host memory is for cards where zero3 does not fit"
        )


def test_the_papers_recipe_learns_from_128_prompts_of_8_in_8_steps():
    """The recipes on 8 processes have the paper's batches, and save once per epoch."""
    for name in ("adora_7b_geo3k", "grpo_7b_geo3k", "adora_qwen3_vl_8b_geo3k"):
        config = parse_recipe(name)[1]
        plan = build_batch_layout(config, 8)
        assert plan.prompts_per_generation == 128
        assert plan.generation_batch == 128 * 8  # rollouts
        assert plan.updates_per_generation == 8
        assert plan.optimizer_batch == 128 * 8 // 8
        assert config.save_steps == GEOMETRY3K_ROWS // 128 * 8, "once per epoch"


def test_knights_and_knaves_has_the_optimizer_and_the_entropy_bonus_of_its_code():
    """ShadeCloak/ADORA, below ADORA/verl: ppo_trainer.yaml, and the defaults of fsdp_workers.py."""
    config = parse_recipe("adora_llm_kk")[1]
    assert (config.learning_rate, config.weight_decay, config.max_grad_norm) == (3e-7, 0.01, 1.0)
    assert (config.adam_beta1, config.adam_beta2) == (0.9, 0.999)
    assert (config.epsilon, config.beta, config.entropy_coef) == (0.2, 0.001, 0.001)


def differing_keys(name: str, other_name: str) -> set[str]:
    """Return the keys with other values in two shipped configs, or in one of them alone."""
    recipe = read_recipe(name)
    other_recipe = read_recipe(other_name)
    all_keys = recipe.keys() | other_recipe.keys()
    return {key for key in all_keys if recipe.get(key) != other_recipe.get(key)}


def test_recipes_that_are_compared_differ_only_in_what_is_compared():
    """ADORA is compared with GRPO, and Qwen2.5-VL with Qwen3-VL, whose images have other sizes."""
    pixels = {"model_name_or_path", "output_dir", "min_pixels", "max_pixels"}
    assert differing_keys("adora_7b_geo3k", "adora_qwen3_vl_8b_geo3k") == pixels
    baseline = differing_keys("adora_7b_geo3k", "grpo_7b_geo3k")
    assert {key for key in baseline if not key.startswith("adora_")} == {"output_dir"}
    assert parse_recipe("grpo_7b_geo3k")[1].adora_method == {"grpo": {}}


def test_an_accelerate_config_is_one_that_accelerate_reads():
    """accelerate reads each shipped config, which has the stage of ZeRO that its file name says."""
    from accelerate.commands.config.config_args import load_config_from_file

    for path in sorted((CONFIGS_FOLDER / "accelerate").glob("*.yaml")):
        config = load_config_from_file(str(path))
        assert config.num_processes >= 1
        assert (config.distributed_type.value == "DEEPSPEED") == ("zero" in path.stem), path
        assert "zero3" not in path.stem or config.deepspeed_config["zero_stage"] == 3, path


def test_the_launcher_of_several_processes_gives_a_stopped_run_time_to_save(monkeypatch):
    """`shutdown_timeout` of the ZeRO configs reaches torch's launcher: 3600 seconds to save.

    accelerate passes the key on without knowing it.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import _filter_args
    from torch.distributed import run

    for path in sorted((CONFIGS_FOLDER / "accelerate").glob("*zero*.yaml")):
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
        launch_arguments = launch_command_parser().parse_args(
            ["--config_file", str(path), "-m", "adora_vl.train"]
        )
        script_arguments = [
            "--training_script",
            launch_arguments.training_script,
            "--training_script_args",
            launch_arguments.training_script_args,
        ]
        # As accelerate calls torch's launcher.
        arguments, _, _ = _validate_launch_command(launch_arguments)
        torch_arguments = _filter_args(arguments, run.get_args_parser(), script_arguments)
        torch_config, _, _ = run.config_from_args(torch_arguments)
        assert torch_config.shutdown_timeout == 3600, path


def config_with(**changes: Any) -> AdoraGRPOConfig:
    """Return a config with groups of 8 and 4 micro-batches of 8 rollouts, but for `changes`."""
    keys = {
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "gradient_accumulation_steps": 4,
    }
    return AdoraGRPOConfig(
        use_cpu=True,
        bf16=False,
        output_dir="nowhere",
        **{**keys, **changes},
    )


def layout_with(**changes: Any) -> BatchLayout:
    """Return the batch sizes of `config_with` on two processes."""
    return build_batch_layout(config_with(**changes), 2)


def test_the_numbers_of_a_run():
    """The sizes of a run's batches follow from its keys by TRL's rules.

    `layout_with` has two processes, each with 4 micro-batches of 8 rollouts in a generation and in
    a step.
    """
    layout = layout_with()
    assert layout.global_batch == 2 * 8
    assert layout.optimizer_batch == 2 * 8 * 4
    assert layout.generation_batch == 2 * 8 * 4
    assert layout.prompts_per_generation == 64 // 8
    assert layout.micro_batches_per_generation == 4
    assert "8 prompts per generation (64 rollouts)" in layout.describe()
    # half a group in a micro-batch of each process
    half_groups = layout_with(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert half_groups.prompts_per_generation == 2 * 4 * 2 // 8
    for updates, changes in (
        (1, {}),
        (8, {"steps_per_generation": 32}),
        (3, {"num_iterations": 3}),
        (1.5, {"steps_per_generation": 6}),
    ):
        assert layout_with(**changes).updates_per_generation == updates
        assert (
            f"{updates} optimizer step{'' if updates == 1 else 's'} a generation"
            in layout_with(**changes).describe()
        )


def test_batches_that_are_not_whole_groups_and_too_few_rows_are_errors():
    """A generation that is no multiple of the groups is refused, and so are too few rows for one.

    64 rollouts are no multiple of 12, and 7 rows are fewer than its 8 prompts.
    """
    config = config_with()
    config.num_generations = 12  # planned for other processes than TRL has checked it for
    with pytest.raises(
        UserError, match="64 sequences does not divide into groups of num_generations: 12; make"
    ):
        build_batch_layout(config, 2)
    check_row_count(layout_with(), 8)
    with pytest.raises(UserError, match="7 rows cannot fill one generation of 8 prompts"):
        check_row_count(layout_with(), 7)


def defaults_in_comments() -> dict[str, str]:
    """Return the default that the comment above each key of the annotated config states, by key.

    A comment begins with `# [default VALUE]`. The keys of a mapping have dotted names.
    """
    default_by_key: dict[str, str] = {}
    last_default = ""
    # The names from the outermost mapping to the present line.
    path: list[str] = []
    for line in (CONFIGS_FOLDER / "train" / "annotated.yaml").read_text().splitlines():
        text = line.strip()
        comment = re.match(r"# \[default (\[.*?\]|.*?)\] \S", text)
        if comment is not None:
            last_default = comment[1]
        elif not text.startswith("#") and text:
            key, _, value = text.partition(":")
            depth = (len(line) - len(text)) // 2
            path = [*path[:depth], key]
            if value:
                default_by_key[".".join(path)] = last_default
                last_default = ""
    return default_by_key


def test_every_key_of_the_annotated_config_has_a_comment_with_the_default_of_the_code():
    """The file and its comments have the same keys, and a comment the default of the code."""
    text_by_key = defaults_in_comments()
    keys = {
        name
        for key, value in read_recipe("annotated").items()
        for name in with_dotted_keys(key, value)
    }
    assert text_by_key.keys() == keys
    assert len(keys) > 50
    default_by_key: dict[str, Any] = dict(key_defaults())
    for option in fields(METHODS["adora"]):
        default_by_key[f"adora_method.adora.{option.name}"] = option.default
    for key, text in text_by_key.items():
        default = default_by_key[key]
        if isinstance(default, tuple):
            default = [*default]
        stated: object = yaml.safe_load(text)
        if isinstance(default, float):
            stated = float(text)
        elif isinstance(default, str) and not text.startswith('"'):
            stated = text
        assert stated == default, key


def test_the_annotated_config_trains_what_the_smoke_test_trains():
    """annotated.yaml and smoke_cpu.yaml differ, after parsing, only in where they write."""
    value_by_key: dict[str, dict[str, Any]] = {"annotated": {}, "smoke_cpu": {}}
    for name, values in value_by_key.items():
        for dataclass in parse_recipe(name):
            values.update(asdict(dataclass))
    annotated = value_by_key["annotated"]
    smoke_test = value_by_key["smoke_cpu"]
    different_keys = {key for key in annotated if annotated[key] != smoke_test[key]}
    assert different_keys <= {"output_dir", "logging_dir", "run_name"}
