"""Choosing a method by key: its settings and options, and one clear line for each mistake."""

import copy
import json
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from adora_vl.advantage import METHODS, Groups, Method, Schedule, group_advantages
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.methods import build_pipeline, check_methods, notes_on_methods
from adora_vl.utils.convert import field_default
from adora_vl.utils.errors import UserError
from tests.support.commands import parse
from tests.support.examples import example_entry
from tests.support.reward_groups import final_advantages

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]


def training_config_of(method: str = "adora", options: str = "", **keys: object) -> AdoraGRPOConfig:
    """Return the training config of a command with these methods and keys.

    `method`: names of methods, joined by `+`. `options`: those of the last method, as YAML.
    """
    *first_names, last_name = method.split("+")
    methods_value = method
    if options:
        first_entries = "".join(f"{name}: {{}}, " for name in first_names)
        methods_value = f"{{{first_entries}{last_name}: {options}}}"
    value_by_key = {"adora_method": methods_value, **keys}
    arguments = [f"--{key}={value}" for key, value in value_by_key.items()]
    _, training_config, _ = parse([*CPU, *arguments])
    return training_config


def test_the_default_is_adora_by_its_own_keys():
    """Without `adora_method` a run uses ADORA; with `mode: off` the advantages are TRL's."""
    training_config = training_config_of(
        options="{factor: 0.3, tau: 0.4, criteria: [length, difficulty]}"
    )
    assert isinstance(training_config.adora_method, dict)
    assert training_config.adora_method["adora"]["factor"] == 0.3
    assert training_config.loss_type == "dapo"  # TRL's default is left alone
    options = build_pipeline(training_config).adora_options
    assert options.factor == Schedule(start=0.3)
    assert options.tau == Schedule(start=0.4)
    assert options.mode == "attenuation"
    assert not build_pipeline(training_config).keeps_trl_advantages
    assert notes_on_methods(training_config) == []
    assert build_pipeline(training_config_of(options="{mode: off}")).keeps_trl_advantages


@pytest.mark.parametrize(
    ("options", "idle_options"),
    [
        ("{}", []),
        ("{mode: 'off', factor: 0.1}", []),  # its default
        ("{mode: 'off', factor: 0.3}", ["factor: 0.3 does nothing with mode: off"]),
        # The log still has what the criteria decide.
        ("{mode: 'off', criteria: [difficulty], tau: 0.4}", []),
        ("{mode: 'off', steps: [0, 30]}", ["steps: [0, 30] does nothing with mode: off"]),
        (
            "{needs_correct: true, tau: 0.4, combine: all}",
            [
                "combine: all does nothing with one criterion",
                "tau: 0.4 does nothing with criteria without difficulty",
                "needs_correct: true does nothing with criteria without difficulty",
            ],
        ),
        ("{no_figure: keep}", ["no_figure: keep does nothing with criteria without working"]),
        (
            "{criteria: [difficulty], ties: keep, tau: 0.4}",
            ["ties: keep does nothing with difficulty as the only criterion"],
        ),
        ("{criteria: [working], ties: keep, no_figure: keep}", []),
    ],
)
def test_an_option_that_changes_nothing_beside_the_others_is_named(options, idle_options):
    """A run begins with a line for each such option; an option at its default gets none."""
    notes = notes_on_methods(training_config_of(options=options))
    assert notes == [f"adora_method.adora.{line}" for line in idle_options]


def test_a_method_sets_the_keys_of_trl_that_belong_to_it_and_says_so():
    """A method sets TRL's keys that belong to it, with a note, but not those in `keep_settings`.

    `dr_grpo` sets loss_type, and `dapo` epsilon_high.
    """
    training_config = training_config_of("dr_grpo", loss_type="grpo")
    assert (training_config.loss_type, training_config.scale_rewards) == ("dr_grpo", "none")
    assert any("loss_type: dr_grpo (was grpo" in line for line in notes_on_methods(training_config))
    dapo = training_config_of("dapo+adora")
    assert (dapo.epsilon_high, dapo.mask_truncated_completions) == (0.28, True)
    config_with_kept_key = training_config_of("dapo", '{"keep_settings": ["epsilon_high"]}')
    assert config_with_kept_key.epsilon_high is None
    assert config_with_kept_key.loss_type == "dapo"
    assert all(
        hasattr(training_config, key) for method in METHODS.values() for key in method.settings
    )


def test_options_come_from_a_yaml_block(tmp_path):
    """Options of a method may be a YAML block; one with `start`, `end`, `shape` is a schedule."""
    path = tmp_path / "c.yaml"
    factor = "{start: 0.1, end: 1.0, shape: cosine, steps: [0, 40]}"
    path.write_text(f"adora_method:\n  adora:\n    steps: [0, 50]\n    factor: {factor}\n")
    options = build_pipeline(parse([*CPU, "--config", str(path)])[1]).adora_options
    assert options.factor == Schedule(start=0.1, end=1.0, shape="cosine", steps=(0, 40))
    assert options.steps == (0, 50)


# the method, its options, other keys, and a pattern for the error line
WRONG: list[tuple[str, str, dict[str, object], str]] = [
    ("darro", "", {}, "adora_method: unknown method 'darro'.*did you mean 'daro'"),
    (
        "gspo",
        "",
        {},
        "adora_method: gspo is in TRL's own keys; set importance_sampling_level: sequence",
    ),
    (
        "CISPO",
        "",
        {},
        "adora_method: CISPO is in TRL's own keys; set loss_type: cispo, epsilon_high: 5.0, and adora_method",
    ),
    ("adora+adora", "", {}, "names a method twice"),
    (
        "adora",
        '{"factr": 1}',
        {},
        "^adora_method.adora: unknown option 'factr', it has mode, .*did you mean 'factor'",
    ),
    (
        "adora",
        '{"factor": 0.5, "mode": "amplification"}',
        {},
        "^adora_method.adora.factor: 0.5 must be at least 1 with",
    ),
    (
        "adora",
        '{"criteria": []}',
        {},
        r"^adora_method.adora.criteria: \[\] is empty; name one or more of length, diff",
    ),
    ("adora", "3", {}, "^adora_method.adora: 3 is not a mapping of its options"),
    ("adora", '{"factor": "much"}', {}, "factor: 'much' is not a number"),
    ("adora", '{"factor": true}', {}, "factor: True is not a number"),
    ("adora", '{"tau": {"begin": 1}}', {}, "tau: unknown option 'begin'"),
    ("adora", '{"tau": {"start": "a"}}', {}, "tau: 'a' is not a number"),
    ("adora", '{"tau": {"start": 0.5, "end": 1, "shape": "line"}}', {}, "tau.shape: 'line'"),
    ("adora", '{"steps": [3]}', {}, r"steps: \[3\] is not a list of 2"),
    ("adora", '{"steps": [5, 2]}', {}, r"steps: \[5, 2\] must be"),
    ("adora", '{"mode": "amplify"}', {}, "mode: 'amplify' is not one of"),
    (
        "adora",
        '{"keep_settings": ["beta"]}',
        {},
        "adora_method.adora.keep_settings.*adora sets: none",
    ),
    ("daro", '{"bin_loss": "mean"}', {}, "bin_loss: 'mean'"),
    (
        "lite_ppo",
        "",
        {},
        "lite_ppo is in TRL's own keys; set scale_rewards: batch, loss_type: dapo, and adora_method",
    ),
    (
        example_entry("ngrpo.py:Ngrpo"),
        '{"virtual": -1}',
        {},
        "^adora_method.Ngrpo.virtual: -1 must",
    ),
    (
        example_entry("canon.py:Canon"),
        '{"inter": 2}',
        {},
        r"inter: \(2.0, 2.0\) must lie between 0 and 1",
    ),
    (
        example_entry("canon.py:Canon"),
        "",
        {},
        "^adora_method.Canon.measure: entropy needs use_vllm",
    ),
    (
        example_entry("ngrpo.py:Ngrpo"),
        "",
        {"multi_objective_aggregation": "normalize_then_sum"},
        "Ngrpo needs multi_",
    ),
    (
        "daro",
        '{"keep_settings": ["loss_type"]}',
        {"loss_type": "grpo"},
        "loss_type: grpo with adora_method: daro",
    ),
    ("dapo", '{"overlong_cache": 9999}', {}, "overlong_cache: 9999"),
    (
        "dapo",
        '{"keep_settings": ["loss_type"]}',
        {"loss_type": "grpo"},
        "^loss_type: grpo with adora_method: dapo, .*set .*dapo.drop_constant: false",
    ),
]


def test_what_does_not_fit_is_named():
    """Each case of `WRONG` is refused in one line."""
    unexpected_lines = {}
    for method, options, keys, expected in WRONG:
        try:
            check_methods(training_config_of(method, options, **keys))
        except UserError as error:
            if not re.search(expected, str(error)) or "\n" in str(error):
                unexpected_lines[method, options] = str(error)
        else:
            unexpected_lines[method, options] = "taken"
    assert unexpected_lines == {}


def test_a_method_that_is_set_once_the_config_is_made_is_refused():
    """Its keys of TRL would be those of the method before."""
    training_config = training_config_of("dapo")
    training_config.adora_method = "grpo"
    with pytest.raises(UserError, match="^adora_method: it was set after the config was made"):
        check_methods(training_config)


def test_what_a_method_needs_stands_in_the_runs_first_lines():
    """DARO learns a weight for each of its seven bins of difficulty."""
    assert "7 learned weights, saved in every checkpoint" in " ".join(
        notes_on_methods(training_config_of("daro"))
    )


@pytest.fixture
def folder_with_methods(tmp_path, monkeypatch):
    """Write the example of docs/methods.md and a file with faulty methods into a working directory.

    Returns the directory.
    """
    page = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    (tmp_path / "my_methods.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "bad.py").write_text(
        "def raises(groups, advantages): return 1 / 0\ndef sums(groups, advantages): return "
        "advantages.sum()\nx = 1"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_method_may_come_from_a_file_as_a_function_or_with_options_and_a_signal(
    folder_with_methods, monkeypatch
):
    """A method in a user's file may be a function, or a class that also chooses groups with signal.

    `Solvable`, of docs/methods.md, finds no signal in the first group, so its advantages become 0.
    The file is looked for beside the config, and its text is part of the run's hashes.
    """
    # two groups of eight rollouts, with one and with two right answers
    groups = Groups(
        torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0, 1, 0, 0, 0, 0, 0, 0]]),
        torch.ones(2, 8),
        torch.zeros(2, 8, dtype=torch.bool),
    )
    trl_advantages = group_advantages(groups.rewards_PG)

    with_function = training_config_of("grpo+my_methods.py:cautious", '{"most": 0.5}')
    check_methods(with_function)
    clamped = final_advantages(build_pipeline(with_function), groups, trl_advantages)
    assert torch.equal(clamped, trl_advantages.clamp(-0.5, 0.5))

    with_class = build_pipeline(training_config_of("my_methods.py:Solvable+adora"))
    assert with_class.groups_with_signal(groups).tolist() == [False, True]
    assert not final_advantages(with_class, groups, trl_advantages)[0].any()

    (folder_with_methods / "elsewhere").mkdir()
    (folder_with_methods / "c.yaml").write_text("adora_method: my_methods.py:cautious")
    monkeypatch.chdir(folder_with_methods / "elsewhere")
    check_methods(parse([*CPU, "--config", str(folder_with_methods / "c.yaml")])[1])
    monkeypatch.chdir(folder_with_methods)

    hashes_before = with_function.methods.hashes
    file = folder_with_methods / "my_methods.py"
    file.write_text(file.read_text() + "# edited")
    assert hashes_before.keys() == {"my_methods.py"}
    assert training_config_of("my_methods.py:cautious").methods.hashes != hashes_before


def test_a_mistake_in_a_method_of_a_file_is_named(folder_with_methods):
    """A method of a file that is misspelt, has wrong options or fails is refused with the mistake.

    Each case: the method, its options, and a pattern for the error line.
    """
    for method, options, expected in (
        (
            "my_methods.py:Solvible",
            "",
            "no method 'Solvible' there; it has cautious, Solvable; did you mean",
        ),
        (
            "my_methods.py:Solvable",
            '{"leest": 1}',
            "Solvable: unknown option 'leest', it has least; did you mean 'least'",
        ),
        ("bad.py:x", "", r"x is no method \(it is of type int\)"),
        ("bad.py:raises", "", "adora_method: raises, tried before the run: ZeroDivisionError"),
        (
            "bad.py:sums",
            "",
            r"sums, tried before the run: it returned .*, not finite advantages of shape \(2, 8\)",
        ),
    ):
        with pytest.raises(UserError, match=expected):
            check_methods(training_config_of(method, options))


def defaults_of(name: str) -> dict[str, object]:
    """Return the default of each option of a method; of a schedule its first value."""
    default_by_option: dict[str, object] = {}
    for option in fields(METHODS[name]):
        default = field_default(option)
        default_by_option[option.name] = default.start if isinstance(default, Schedule) else default
    return default_by_option


def test_the_documentation_lists_every_method_with_its_options():
    """The row of a method in docs/methods.md has each option with its default, as YAML has it."""
    lines = (Path(__file__).parents[3] / "docs" / "methods.md").read_text().splitlines()
    yaml_word_by_python = {"True": "true", "False": "false", "None": "null"}
    missing = []
    for name in METHODS:
        # the method's row in the table of methods
        row = next((line for line in lines if line.startswith(f"| `{name}` ")), "")
        if not row:
            missing.append((name, ""))
        # ADORA's options have a table of their own.
        default_by_option = {} if name == "adora" else defaults_of(name)
        for option, default in default_by_option.items():
            default_text = yaml_word_by_python.get(str(default), str(default))
            if f"`{option}: {default_text}`" not in row:
                missing.append((name, option))
    assert missing == []


def halved(groups, advantages_PG):
    """Return half of every advantage."""
    return advantages_PG / 2


class Doubled(Method):
    """Twice every advantage."""

    def apply(self, groups, advantages_PG, run):
        """Return twice the advantages."""
        return advantages_PG * 2


def test_python_passes_a_function_or_a_class_in_place_of_a_name():
    """Python code may pass a function or a class as a method, which is recorded by its name.

    `halved` and `Doubled` change the advantages by a factor.
    """
    keys: dict[str, Any] = {"use_cpu": True, "bf16": False}
    rewards_PG = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    expected_PG = group_advantages(rewards_PG)
    method: Any
    for method, factor in (
        (halved, 0.5),
        (Doubled, 2.0),
        ({"grpo": {}, halved: {}}, 0.5),
    ):
        training_config = AdoraGRPOConfig("x", adora_method=method, **keys)
        check_methods(training_config)
        name, applied = list(training_config.methods.by_name.items())[-1]
        advantages_PG = applied.apply(None, expected_PG, build_pipeline(training_config))
        assert torch.equal(advantages_PG, expected_PG * factor)
        assert name in training_config.methods.hashes, "another text of it is another run"
        assert name in json.dumps(training_config.to_dict()["adora_method"])
        assert (
            copy.copy(training_config).methods.by_name.keys()
            == training_config.methods.by_name.keys()
        )
        assert name in pickle.loads(pickle.dumps(training_config)).adora_method  # noqa: S301
    no_method: Any = int
    with pytest.raises(UserError, match="no subclass of adora_vl.advantage.Method"):
        AdoraGRPOConfig("x", adora_method=no_method, **keys)

    def adora(groups: Groups, advantages_PG: torch.Tensor) -> torch.Tensor:
        return advantages_PG

    same_name: Any = adora

    with pytest.raises(UserError, match="has the name of a method that is here; rename it"):
        AdoraGRPOConfig("x", adora_method=same_name, **keys)
    with pytest.raises(UserError, match="unknown method 'haved'"):
        AdoraGRPOConfig("x", adora_method="haved", **keys)
