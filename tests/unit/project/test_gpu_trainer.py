"""The check of a GPU that lays steps of stock TRL beside ours: order of turns, seconds, memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from adora_vl.config import AdoraGRPOConfig
from adora_vl.utils.files import GIB
from benchmarks.gpu import trainer
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import CheckResult
from benchmarks.gpu.trainer import OURS, OURS_RECOMPUTED, STOCK, WAYS, MeasuredRun
from tests.support.gpu_checks import SMALL_CHECKS_ON_CPU, failed_lines

CARD = Setting(full=True, device=torch.device("cuda", 0))
PEAK_BYTES = {STOCK: 40 * GIB, OURS: 60 * GIB, OURS_RECOMPUTED: 30 * GIB}


def measured_run(seconds: float, peak_bytes: int) -> MeasuredRun:
    """Return a turn of two counted steps, of which the policy's part takes three quarters."""
    phases = {"log-probabilities": [seconds / 4] * 2, "backward": [seconds / 2] * 2}
    return MeasuredRun(seconds=[seconds] * 2, phases=phases, peak=peak_bytes, prompt=300)


real_trainer_config = trainer.trainer_config


def config_of_small_checks(setting, *arguments):
    """Return the config of the small checks on a CPU in the place of one for a GPU."""
    return real_trainer_config(SMALL_CHECKS_ON_CPU, *arguments)


SECONDS = {STOCK: 2.0, OURS: 1.0, OURS_RECOMPUTED: 1.5}
TURN_BY_WAY = {way: measured_run(SECONDS[way], PEAK_BYTES[way]) for way in WAYS}


@pytest.fixture
def ways_of_turns(monkeypatch) -> list[str]:
    """Let every turn of the check be that of `TURN_BY_WAY`; return the list of their ways."""
    ways: list[str] = []

    def run_turn(setting, *, way, **_):
        ways.append(way)
        return TURN_BY_WAY[way]

    monkeypatch.setattr(trainer, "_run_turn", run_turn)
    monkeypatch.setattr(trainer, "run_in_process", lambda turn: turn())
    monkeypatch.setattr(trainer, "predict_peak_bytes", lambda *_, **__: 61 * GIB)
    return ways


def test_each_way_has_a_turn_and_its_line_before_any_has_a_second(ways_of_turns):
    """A line is there as soon as its turn ends, so that an interrupted check keeps it."""
    lines = trainer.run(CARD)
    for number in (1, 2):
        for way in WAYS:
            line = next(lines)
            assert line.what == f"{way}: turn {number}"
            assert ways_of_turns[-1] == way
            assert len(ways_of_turns) == 3 * (number - 1) + WAYS.index(way) + 1
    assert "2, 2 s a step, peak 40 GiB" in trainer.turn_line("x", TURN_BY_WAY[STOCK]).figure


@pytest.mark.usefixtures("ways_of_turns")
def test_both_ways_of_ours_are_judged_by_stock():
    """Ours takes 1 and 1.5 s of stock's 2, and with all layers recomputed less memory."""
    lines = list(trainer.run(CARD))
    assert failed_lines(lines) == []
    line_by_name = {line.what: line for line in lines}
    assert line_by_name[f"{OURS}, of stock's seconds: whole step"].figure == "0.5"
    assert line_by_name[f"{OURS_RECOMPUTED}, of stock's seconds: whole step"].figure == "0.75"
    assert "step 1.5 s" in line_by_name[f"{OURS_RECOMPUTED}: seconds"].figure
    peak_line = line_by_name[f"{OURS_RECOMPUTED}: peak memory"]
    assert (peak_line.figure, peak_line.bound) == ("30 GiB", "<= 40 GiB")
    assert line_by_name[f"{STOCK}: peak memory"].figure == "40 GiB"
    assert line_by_name[f"{OURS}: peak memory"].figure == "60 GiB"


def test_more_memory_than_stock_with_all_layers_recomputed_fails():
    """41 GiB over the 40 of stock fail, and the 60 GiB of the other way do not."""
    peak_bytes = {**PEAK_BYTES, OURS_RECOMPUTED: 41 * GIB}
    (line,) = failed_lines(list(trainer.memory_lines(CARD, peak_bytes, 61 * GIB)))
    assert line.what == f"{OURS_RECOMPUTED}: peak memory"


def test_a_turn_without_gradients_fails():
    """A turn whose gradient norms are not finite, or all 0, is a failure of its own line."""
    broken_turn = replace(TURN_BY_WAY[OURS], finite=False)
    assert trainer.turn_line("x", broken_turn).verdict is CheckResult.FAIL


def test_one_way_of_ours_recomputes_all_layers(tmp_path):
    """The two ways of ours differ in the key `adora_recompute`, and stock has no such key."""
    recompute_by_way = {}
    for way in (OURS, OURS_RECOMPUTED):
        args = trainer.trainer_config(SMALL_CHECKS_ON_CPU, way, 56, 8, tmp_path)
        assert isinstance(args, AdoraGRPOConfig)
        recompute_by_way[way] = args.adora_recompute
    assert recompute_by_way == {OURS: "auto", OURS_RECOMPUTED: "all"}
    stock_args = trainer.trainer_config(SMALL_CHECKS_ON_CPU, STOCK, 56, 8, tmp_path)
    assert not hasattr(stock_args, "adora_recompute")


@pytest.mark.parametrize("card_gib", [24, 140])
def test_the_prediction_is_made_for_the_memory_of_the_card(monkeypatch, card_gib):
    """The default recomputes as few layers as the card's own memory allows."""
    memory_sizes = []

    def predict_memory(setup, gpu_bytes):
        memory_sizes.append(gpu_bytes)
        return SimpleNamespace(peak_bytes=20 * GIB)

    properties = SimpleNamespace(total_memory=card_gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(trainer, "predict_memory", predict_memory)
    # A config for a GPU cannot be made without one.
    monkeypatch.setattr(trainer, "trainer_config", config_of_small_checks)
    config = trainer.model_shapes(SMALL_CHECKS_ON_CPU)
    trainer.predict_peak_bytes(CARD, config, side=56, completion=8, prompt=300)
    assert memory_sizes == [card_gib * GIB]
