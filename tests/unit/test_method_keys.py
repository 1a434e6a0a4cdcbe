"""Choosing a method by key: its settings, its options, and one clear line where something does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from adora_vl.advantage import METHODS, Schedule
from adora_vl.config.advantage import (
    check_method,
    chosen_methods,
    method_needs,
    method_run,
    option_defaults,
)
from adora_vl.config.command_line import parse
from adora_vl.errors import UserError

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]


def config(*arguments):
    return parse([*CPU, *arguments])[1]


def test_the_default_is_adora_by_its_own_keys():
    ours = config("--adora_factor", "0.3", "--adora_tau", "0.4")
    assert ours.adora_method == "adora" and ours.loss_type == "dapo"  # TRL's default is left alone
    options = chosen_methods(ours)["adora"]
    assert (options.factor, options.tau, options.mode) == (Schedule(0.3), Schedule(0.4), "attenuation")
    assert not method_run(ours).is_plain and method_needs(ours) == []
    assert method_run(config("--adora_mode", "off")).is_plain


def test_a_method_sets_the_keys_of_trl_that_belong_to_it_and_says_so():
    ours = config("--adora_method", "dr_grpo", "--loss_type", "grpo")
    assert (ours.loss_type, ours.scale_rewards) == ("dr_grpo", "none")
    assert any("loss_type: dr_grpo (was grpo" in line for line in method_needs(ours))
    lite = config("--adora_method", "lite_ppo", "--loss_type", "grpo")
    assert (lite.loss_type, lite.scale_rewards) == ("dapo", "batch")
    dapo = config("--adora_method", "dapo+adora")
    assert (dapo.epsilon_high, dapo.mask_truncated_completions) == (0.28, True)
    kept = config("--adora_method", "dapo", "--adora_method_options", '{"keep_settings": ["epsilon_high"]}')
    assert kept.epsilon_high is None and kept.loss_type == "dapo"


def test_every_setting_is_a_key_of_trl():
    ours = config()
    assert all(hasattr(ours, key) for method in METHODS.values() for key in method.settings)


def test_options_come_from_a_yaml_block(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "adora_method: adora\nadora_method_options:\n  steps: [0, 50]\n"
        "  factor: {start: 0.1, end: 1.0, shape: cosine, steps: [0, 40]}\n"
    )
    options = method_run(config("--config", str(path))).judged_by
    assert options.factor == Schedule(0.1, 1.0, "cosine", (0, 40)) and options.steps == (0, 50)


def test_no_option_name_belongs_to_two_methods():
    names = [name for method in METHODS for name in option_defaults(method)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adora_method", "darro"], "adora_method: unknown method 'darro'.*did you mean 'daro'"),
        (["--adora_method", "adora+adora"], "names a method twice"),
        (["--adora_method", "adora+ngrpo"], "ngrpo starts from the rewards, so it must stand first"),
        (["--adora_method_options", '{"factr": 1}'], "unknown option 'factr' of adora.*did you mean 'factor'"),
        (["--adora_method_options", '{"factor": 1.5}'], "factor: 1.5.*at most 1"),
        (["--adora_method_options", '{"factor": "much"}'], "factor: 'much' is not a number"),
        (["--adora_method_options", '{"tau": {"begin": 1}}'], "tau: unknown 'begin'"),
        (["--adora_method_options", '{"tau": {"start": 0.5, "end": 1, "shape": "line"}}'], "tau: shape: 'line'"),
        (["--adora_method_options", '{"steps": [3]}'], r"steps: \[3\] must be a list of 2"),
        (["--adora_method_options", '{"steps": [5, 2]}'], r"steps: \[5, 2\] must be"),
        (["--adora_method_options", '{"mode": "amplify"}'], "mode: 'amplify' is not one of"),
        (["--adora_method_options", "{"], "not JSON"),
        (["--adora_method_options", '{"keep_settings": ["beta"]}'], "keep_settings.*adora sets: none"),
        (["--adora_method", "daro", "--adora_method_options", '{"bin_loss": "mean"}'], "bin_loss: 'mean'"),
        (["--adora_method", "a_grae", "--adora_method_options", '{"alpha": 0}'], "alpha: 0.0 must be above 0"),
        (["--adora_method", "d3s", "--adora_method_options", '{"keep": 0}'], "keep.*above 0"),
        (["--adora_method", "rrb", "--adora_method_options", '{"full_range": 0}'], "full_range: 0.0 must be above 0"),
        (["--adora_method", "mc_grpo"], "num_generations: 8 is even.*the median: 9"),
        (["--adora_method", "canon"], "canon with measure: entropy needs use_vllm"),
        (["--adora_method", "ngrpo", "--multi_objective_aggregation", "normalize_then_sum"], "ngrpo needs multi_"),
        (
            [
                "--adora_method",
                "daro",
                "--loss_type",
                "grpo",
                "--adora_method_options",
                '{"keep_settings": ["loss_type"]}',
            ],
            "loss_type: grpo with adora_method: daro",
        ),
        (["--adora_method", "dapo", "--adora_method_options", '{"overlong_cache": 9999}'], "overlong_cache: 9999"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(UserError, match=message):
        check_method(config(*arguments))


def test_what_a_method_needs_stands_in_the_runs_first_lines():
    ours = config("--adora_method", "mc_grpo", "--num_generations", "9", "--per_device_train_batch_size", "9")
    check_method(ours)
    assert method_needs(ours) == ["mc_grpo: of 9 rollouts per prompt, the median is not learned from"]
    assert "7 learned weights, saved in every checkpoint" in " ".join(method_needs(config("--adora_method", "daro")))


@pytest.mark.parametrize("name", METHODS)
def test_the_documentation_lists_the_method_with_its_options(name):
    text = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` "))  # of the table of methods
    if name != "adora":  # whose options are the adora_* keys
        for option, default in option_defaults(name).items():
            shown = {"True": "true", "False": "false", "None": "null"}.get(str(default), str(default))
            assert f"`{option}: {shown}`" in row, option
