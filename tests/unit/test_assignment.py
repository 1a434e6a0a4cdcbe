"""Who gets ADORA's weights: the controls attenuate as much as the criteria do, but other groups, or the rate."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from adora_vl.advantage import Groups, MethodRun, Schedule, group_advantages
from adora_vl.advantage.grpo import is_constant
from adora_vl.advantage.options import AdoraOptions
from adora_vl.config.advantage import check_method, method_run
from adora_vl.config.command_line import parse
from adora_vl.errors import UserError
from adora_vl.learning_rate import ScaledRate
from tests.tiny_run import train

CONTROLS = ("random", "reversed", "rate")


def groups(seed=0, step=0, prompts=40) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([0.0, 1.0])[torch.randint(0, 2, (prompts, 4), generator=generator)]
    rewards[0], rewards[1] = 0.0, 1.0  # without signal
    lengths = torch.randint(1, 100, (prompts, 4), generator=generator)
    return Groups(rewards, lengths, torch.zeros_like(lengths, dtype=torch.bool), step=step)


def judged(assign, batch, seed=5, **options):
    return MethodRun({"adora": AdoraOptions(assign=assign, **options)}, seed=seed).judge(batch)


def applied(assign, batch, **options):
    run = MethodRun({"adora": AdoraOptions(assign=assign, **options)}, seed=5)
    return run(batch, group_advantages(batch.rewards_PG)), run


@pytest.mark.parametrize("assign", CONTROLS)
@pytest.mark.parametrize("neutral", [{"mode": "off"}, {"factor": Schedule(1.0)}], ids=["off", "factor 1"])
def test_the_neutral_setting_is_grpo_to_the_bit(assign, neutral):
    advantages, run = applied(assign, groups(), **neutral)
    assert run.is_plain and run.rate == 1.0
    assert torch.equal(advantages, group_advantages(groups().rewards_PG))


@pytest.mark.parametrize("seed", range(5))
def test_random_attenuates_as_many_groups_with_signal_but_others(seed):
    batch = groups(seed)
    by_criterion, by_chance = judged("criterion", batch), judged("random", batch)
    signal = ~is_constant(batch.rewards_PG)
    wanted, given = by_criterion.weights_P[signal], by_chance.weights_P[signal]
    assert torch.equal(given.sort().values, wanted.sort().values) and not torch.equal(given, wanted)
    assert torch.equal(by_chance.weights_P[~signal], by_criterion.weights_P[~signal])
    assert torch.equal(by_chance.tds_P, by_criterion.tds_P), "what the criteria say stays in the log"


def test_random_depends_on_the_runs_seed_and_step_alone():
    before = torch.random.get_rng_state()
    first = judged("random", groups(step=3)).weights_P
    assert torch.equal(torch.random.get_rng_state(), before), "no global state is touched"
    torch.manual_seed(99)
    resumed = judged("random", groups(step=3)).weights_P  # a process of its own would do the same
    assert torch.equal(first, resumed)
    assert not torch.equal(first, judged("random", groups(step=4)).weights_P)
    assert not torch.equal(first, judged("random", groups(step=3), seed=6).weights_P)


def test_every_group_is_chosen_equally_often_by_chance():
    chosen = torch.stack([judged("random", groups(), seed=seed).weights_P < 1 for seed in range(400)]).double()
    signal = ~is_constant(groups().rewards_PG)
    share = (judged("criterion", groups()).weights_P[signal] < 1).double().mean()
    assert (chosen.mean(0)[signal] - share).abs().max() < 0.12  # 4.8 standard deviations of 400 draws at most


@pytest.mark.parametrize(("mode", "factor"), [("attenuation", 0.1), ("amplification", 2.0)])
def test_reversed_gives_the_factor_to_the_other_side(mode, factor):
    batch = groups()
    options = {"mode": mode, "factor": Schedule(factor)}
    right, wrong = judged("criterion", batch, **options), judged("reversed", batch, **options)
    marked, swapped = right.weights_P != 1, wrong.weights_P != 1
    assert marked.any() and swapped.any() and not (marked & swapped).any()
    neither = ~right.tds_P & ~right.tas_P
    assert torch.equal(marked | swapped, ~neither), "a group without a right rollout keeps its weight"
    assert bool((wrong.weights_P[swapped] == torch.tensor(factor).float()).all())


def test_rate_is_the_mean_weight_of_the_groups_with_signal_and_leaves_the_advantages():
    batch = groups()
    advantages, run = applied("rate", batch)
    assert torch.equal(advantages, group_advantages(batch.rewards_PG))
    signal = ~is_constant(batch.rewards_PG)
    assert run.rate == judged("criterion", batch).weights_P[signal].mean().item()
    assert 0.1 < run.rate < 1 and run.figures == {"rate_scale": run.rate}
    assert bool((run.weighting.weights_P == 1).all())


def test_rate_is_one_where_nothing_has_signal():
    batch = groups(prompts=2)
    assert applied("rate", batch)[1].rate == 1.0


def test_rate_survives_a_checkpoint_between_two_updates_of_a_generation():
    _, run = applied("rate", groups())
    resumed = MethodRun({"adora": AdoraOptions(assign="rate")}, seed=5)
    resumed.load(json.loads(json.dumps(run.state())))
    assert resumed.rate == run.rate != 1.0
    assert MethodRun({"adora": AdoraOptions()}).state() == {}


def test_the_optimizer_steps_with_the_scaled_rate_and_has_its_own_again():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, factors = torch.optim.SGD([weight], lr=0.3), iter([0.7, 1.0])
    callback = ScaledRate(lambda: next(factors))
    moved = []
    for _ in range(2):
        weight.grad = torch.ones(1)
        callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        before = weight.item()
        optimizer.step()
        callback.on_optimizer_step(None, None, None, optimizer=optimizer)
        moved.append(before - weight.item())
        assert optimizer.param_groups[0]["lr"] == 0.3
    assert moved == pytest.approx([0.21, 0.3])


@pytest.mark.slow
def test_a_run_takes_its_steps_with_the_logged_rate(tmp_path, monkeypatch):
    """The real training command, which notes the learning rate of every optimizer step."""
    stock, rates = AcceleratedOptimizer.step, []

    def noted(self, *arguments):
        rates.append(self.param_groups[0]["lr"])
        return stock(self, *arguments)

    monkeypatch.setattr(AcceleratedOptimizer, "step", noted)
    options = '{"assign": "rate", "criteria": ["difficulty"], "tau": 0.25}'
    folder = train(tmp_path / "run", save_strategy="no", adora_method_options=options, max_steps=3)
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    scales = [entry["adora/rate_scale"] for entry in log if "adora/rate_scale" in entry]
    assert rates == pytest.approx([1e-3 * scale for scale in scales], rel=1e-4)
    assert len(rates) == 3 and min(scales) < 1
    assert all("adora/reflective_per_1000_tokens" in entry for entry in log if "adora/rate_scale" in entry)


def test_off_outside_its_steps():
    inside, outside = groups(step=1), groups(step=2)
    assert bool((judged("random", inside, steps=(0, 2)).weights_P < 1).any())
    assert bool((judged("random", outside, steps=(0, 2)).weights_P == 1).all())
    assert applied("rate", outside, steps=(0, 2))[1].rate == 1.0


def config(*arguments):
    return parse(["--use_cpu", "true", "--bf16", "false", "--output_dir", "x", *arguments])[1]


def test_the_key_and_what_does_not_fit_it():
    words = ["--adora_method_options", '{"assign": "random"}', "--seed", "7"]
    assert (method_run(config(*words)).judged_by.assign, method_run(config(*words)).seed) == ("random", 7)
    with pytest.raises(UserError, match="assign: 'randm' is not one of criterion, random, reversed, rate"):
        method_run(config("--adora_method_options", '{"assign": "randm"}'))


RATE = ["--adora_method_options", '{"assign": "rate"}', "--gradient_accumulation_steps", "4"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--adora_dynamic_sampling", "2"], "adora_dynamic_sampling: 2 with assign: rate"),
        (["--steps_per_generation", "2"], "steps_per_generation: 2 with assign: rate, .*accumulation_steps: 4"),
        (["--steps_per_generation", "6"], "steps_per_generation: 6 with assign: rate"),
    ],
)
def test_a_step_has_one_rate(words, said):
    """Of two generations in one optimizer step, the step would take the rate of the second alone."""
    for fits in (["8"], ["2", "--num_iterations", "2"]):
        check_method(config(*RATE, "--steps_per_generation", *fits))
    with pytest.raises(UserError, match=said):
        check_method(config(*RATE, *words))


def test_a_rate_is_not_scaled_under_deepspeed():
    ours = config(*RATE)
    check_method(ours)
    ours.deepspeed_plugin = object()
    with pytest.raises(UserError, match="assign: rate does not work with DeepSpeed"):
        check_method(ours)
