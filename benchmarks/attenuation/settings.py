"""The experiment's settings, from the YAML file beside this module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.attenuation.task import Regime

SETTINGS = Path(__file__).with_name("settings.yaml")


@dataclass(frozen=True)
class Teaching:
    """How a start learns: `arithmetic_steps` of right chains, then `steps` of the teacher's answers.

    `operations`: chains are as long as these, in equal shares.
    """

    arithmetic_steps: int
    steps: int
    batch_size: int
    learning_rate: float
    operations: tuple[int, ...]
    layers: int
    width: int


@dataclass(frozen=True)
class Trial:
    """One run. Those that differ in their arm alone are a pair: start, problems and seeds are the same."""

    regime: str
    loss: str
    seed: int
    arm: str
    engine: bool  # whether vLLM samples the rollouts, or Transformers

    @property
    def name(self) -> str:
        return f"{self.regime}-{self.loss}-{self.seed}-{self.arm}{'-engine' if self.engine else ''}"


@dataclass(frozen=True)
class Settings:
    """`runs`: regime, loss_type, number of seeds; optionally arms, the first seed, and whether to use the engine."""

    start: Teaching
    steps: int
    prompts: int
    generations: int
    eval_every: int
    eval_problems: int
    regimes: dict[str, Regime]
    arms: dict[str, dict[str, Any]]
    runs: list[dict[str, Any]]

    def jobs(self) -> Iterator[Trial]:
        """Seed by seed within an entry of `runs`, so that what is unfinished is the same with fewer seeds."""
        for entry in self.runs:
            first = entry.get("first_seed", 0)
            for seed in range(first, first + entry["seeds"]):
                for arm in entry.get("arms", self.arms):
                    yield Trial(entry["regime"], entry["loss"], seed, arm, entry.get("engine", False))


def read_settings(path: Path = SETTINGS) -> Settings:
    told = yaml.safe_load(path.read_text())
    start = {**told.pop("start")}
    start["operations"] = tuple(start["operations"])
    regimes = {name: Regime(**regime) for name, regime in told.pop("regimes").items()}
    return Settings(start=Teaching(**start), regimes=regimes, **told)
