"""The family of advantages: worked examples, invariances, the way back to GRPO, and groups that break careless
formulas.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adora_vl.advantage import METHODS, Groups, MethodRun, Schedule, group_advantages
from adora_vl.advantage.options import (
    AdoraOptions,
    AGraeOptions,
    CanonOptions,
    D3sOptions,
    DapoOptions,
    DaroOptions,
    McGrpoOptions,
    NgrpoOptions,
    NoOptions,
    RrbOptions,
    SsbOptions,
)
from adora_vl.rollout.environment import free_port
from tests.unit.methods_support import batch, float64, run  # noqa: F401

NAN = float("nan")
BY_SETTINGS = {"grpo", "dr_grpo", "lite_ppo"}  # TRL's own keys are all there is to them
# The setting of each method at which it is GRPO: (options, the scale of the GRPO that it then is)
NEUTRAL = {
    "grpo": (NoOptions(), "group"),
    "dr_grpo": (NoOptions(), "none"),
    "lite_ppo": (NoOptions(), "batch"),
    "dapo": (DapoOptions(drop_constant=False), "group"),
    "adora": (AdoraOptions(mode="off"), "group"),
    "daro": (DaroOptions(learning_rate=0.0, by_bin_tokens=False, drop_outside=False), "group"),
    "mc_grpo": (McGrpoOptions(centre="mean", spread="std", exclude_pivot=False), "group"),
    "ngrpo": (NgrpoOptions(virtual=0), "group"),
    "a_grae": (AGraeOptions(curriculum=False, alpha=None), "group"),
    "canon": (CanonOptions(inter=Schedule(0.5)), "none"),
    "d3s": (D3sOptions(keep=Schedule(1.0)), "group"),
    "ssb": (SsbOptions(share=0.0), "group"),
    "rrb": (RrbOptions(range_power=0.0), "group"),
}


def random_batch(prompts=40, generations=8, seed=0) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([0.0, 0.1, 1.0])[torch.randint(0, 3, (prompts, generations), generator=generator)]
    rewards[0], rewards[1] = 0.1, 1.0  # without signal
    lengths = torch.randint(1, 110, (prompts, generations), generator=generator)
    surprisal = torch.rand(prompts, generations, generator=generator)
    return Groups(rewards, lengths, lengths >= 100, surprisal_PG=surprisal)


def test_every_method_has_a_neutral_setting_and_a_source():
    assert NEUTRAL.keys() == METHODS.keys()
    assert all(method.source.startswith("arXiv") for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_the_neutral_setting_is_grpo_to_the_bit(name):
    options, scale = NEUTRAL[name]
    for seed in range(3):
        groups = random_batch(seed=seed)
        assert torch.equal(run(name, groups, options, scale), group_advantages(groups.rewards_PG, scale=scale))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_SETTINGS])
def test_the_default_is_not_grpo(name):
    """So that the test before can fail."""
    groups = random_batch()
    assert not torch.equal(run(name, groups), group_advantages(groups.rewards_PG))


def test_plain_is_what_the_trainer_leaves_untouched():
    plain = {name for name, (options, _) in NEUTRAL.items() if MethodRun({name: options}).is_plain}
    assert plain == BY_SETTINGS | {"dapo", "adora", "a_grae", "ssb", "rrb"}
    assert MethodRun({"adora": AdoraOptions(factor=Schedule(1.0))}).is_plain
    assert not any(MethodRun({n: METHODS[n].options()}).is_plain for n in METHODS if n not in BY_SETTINGS)


def test_ours_is_trls_group_normalisation_to_the_bit():
    """What TRL 1.16 writes out in `_generate_and_score_completions`, with its own helper."""
    from trl.trainer.utils import nanstd

    rewards = random_batch().rewards_PG
    rewards[3, 2] = NAN
    mixed = rewards[(rewards.nan_to_num() != rewards.nan_to_num()[:, :1]).any(dim=1)]
    centred = mixed - torch.nanmean(mixed, dim=1, keepdim=True)
    for scale, deviation in (("group", nanstd(mixed, dim=1, keepdim=True)), ("batch", nanstd(mixed.flatten()))):
        theirs = torch.nan_to_num(centred / (deviation + 1e-4))
        assert torch.equal(group_advantages(mixed, scale=scale), theirs), scale


@pytest.mark.parametrize("name", METHODS)
def test_permuting_a_group_permutes_its_advantages(name):
    groups = random_batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    moved = Groups(
        groups.rewards_PG[:, order],
        groups.lengths_PG[:, order],
        groups.truncated_PG[:, order],
        surprisal_PG=groups.surprisal_PG[:, order],
    )
    torch.testing.assert_close(run(name, moved), run(name, groups)[:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_shift_of_all_rewards_changes_nothing(name):
    """The threshold of a right answer and the highest reward shift with them."""
    groups = random_batch()
    shifted = Groups(
        groups.rewards_PG + 2,
        groups.lengths_PG,
        groups.truncated_PG,
        surprisal_PG=groups.surprisal_PG,
        correct_above=2.5,
    )
    options = NgrpoOptions(max_reward=3.0) if name == "ngrpo" else None
    torch.testing.assert_close(run(name, shifted, options), run(name, groups), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_scale_of_all_rewards_changes_nothing_or_scales_what_is_not_divided(name):
    groups = random_batch()
    scaled = Groups(
        groups.rewards_PG * 4,
        groups.lengths_PG,
        groups.truncated_PG,
        surprisal_PG=groups.surprisal_PG,
        correct_above=2.0,
    )
    undivided = METHODS[name].settings.get("scale_rewards") == "none"
    scale = "none" if undivided else "group"
    options = {"ngrpo": NgrpoOptions(max_reward=4.0), "rrb": RrbOptions(full_range=4.0)}.get(name)
    expected = run(name, groups, scale=scale) * (4 if undivided else 1)
    # eps is added to a deviation that is four times as large
    torch.testing.assert_close(run(name, scaled, options, scale), expected, rtol=5e-3, atol=1e-3)


DEGENERATE = {
    "all right": [[1.0] * 4],
    "all wrong": [[0.0] * 4],
    "all a little": [[0.1] * 4],
    "one rollout": [[1.0]],
    "two rollouts": [[1.0, 0.0]],
    "huge": [[1e30, -1e30, 1e30, 0.0]],
    "huge and constant": [[1e30] * 4],
    "none scored": [[NAN] * 4],
    "one scored": [[NAN, 1.0, NAN, NAN]],
    "some unscored": [[NAN, 1.0, 0.0, 0.1]],
    "mixed batch": [[1.0, 0.0, 0.0, 0.1], [NAN] * 4, [1.0] * 4, [1e30, 0.0, 0.0, 0.0]],
}


@pytest.mark.parametrize("case", DEGENERATE, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_everything_stays_finite(name, case):
    groups = batch(DEGENERATE[case])
    result = run(name, groups)
    assert result.shape == groups.rewards_PG.shape and result.isfinite().all()
    assert (result[groups.rewards_PG.isnan()] == 0).all()
    if case in ("all right", "none scored") or (case.startswith("all") and name != "ngrpo"):
        assert (result == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dapo", "adora", "daro", "mc_grpo", "ngrpo", "d3s", "ssb", "rrb"])
def test_a_better_reward_never_has_a_lower_sign_than_a_worse_one_in_its_group(name):
    """Under every method that compares whole groups no wrong rollout is lifted while a right one is pushed down."""
    groups = random_batch(generations=9 if name == "mc_grpo" else 8)
    result = run(name, groups)
    best = torch.where(groups.rewards_PG == groups.rewards_PG.amax(1, keepdim=True), result, torch.inf).amin(1)
    worst = torch.where(groups.rewards_PG == groups.rewards_PG.amin(1, keepdim=True), result, -torch.inf).amax(1)
    assert (best >= worst).all()


RANKS = """
import sys, torch, torch.distributed as dist
from adora_vl.advantage import METHODS, Groups, MethodRun, group_advantages
from adora_vl.advantage.options import AdoraOptions
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
cases = [(name, METHODS[name].options()) for name in METHODS]
cases += [("adora", AdoraOptions(assign=assign)) for assign in ("random", "reversed", "rate")]
for name, options in cases:
    method = MethodRun({name: options}, seed=3)
    for step in range(3):
        rewards = torch.tensor([0.0, 0.1, 1.0])[torch.randint(0, 3, (6, 4), generator=generator)]
        lengths = torch.randint(1, 50, (6, 4), generator=generator)
        whole = MethodRun({name: options}, seed=3) if step == 0 else whole
        def groups(r, l):
            return Groups(r, l, l > 45, surprisal_PG=l / 50, step=step)
        alone = whole(groups(rewards, lengths), group_advantages(rewards))
        # this rank graded its half of the sequences: a group may lie over both ranks
        def gathered(values):
            mine = values.flatten().chunk(2)[rank].contiguous()
            parts = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(parts, mine)
            return torch.cat(parts).view(6, 4)
        both = method(groups(gathered(rewards), gathered(lengths)), group_advantages(gathered(rewards)))
        assert torch.equal(alone, both) and method.rate == whole.rate, name
    states = [None, None]
    dist.all_gather_object(states, method.state())
    assert states[0] == states[1] == whole.state(), name
print("same")
"""


def test_two_ranks_compute_what_one_does(tmp_path):
    """Real processes, gathered tensors, every method and control, three steps with what they remember."""
    port = str(free_port())
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(r), port], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": root, "PATH": ""}
        )
        for r in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["same", "same"]
