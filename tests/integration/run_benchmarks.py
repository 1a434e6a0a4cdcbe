"""Runs three benchmarks by their commands, all with one engine.

`python -m tests.integration.run_benchmarks MODEL FOLDER`. The commands are those of a user; only
the engine is built once, since starting it takes longer than all the rest.
"""

import dataclasses
import sys
from pathlib import Path
from unittest import mock

from adora_vl.evals import asking
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings
from eval import command
from eval.geometry3k import BENCHMARK as GEOMETRY3K
from eval.mathvista import BENCHMARK as MATHVISTA
from eval.mmstar import BENCHMARK as MMSTAR
from tests.support.launch import cli_arguments

_ENGINE_BY_SETTINGS: dict[str, AnswerEngine] = {}


def build_engine_once(settings: AnswerEngineSettings) -> AnswerEngine:
    """Return one engine for all benchmarks, whose limits hold for each of them."""
    common = dataclasses.replace(settings, max_images=1, max_text_bytes=700)
    assert settings.max_text_bytes <= common.max_text_bytes
    if repr(common) not in _ENGINE_BY_SETTINGS:
        _ENGINE_BY_SETTINGS[repr(common)] = build_engine(common)
    return _ENGINE_BY_SETTINGS[repr(common)]


def main(model: str, folder: Path) -> int:
    """Run each benchmark by its command, all with one engine that is built once."""
    mock.patch.object(asking, "build_engine", build_engine_once).start()
    for benchmark, name, options in (
        (GEOMETRY3K, "geometry3k", []),
        (MATHVISTA, "mathvista", ["--rules", "vlmevalkit"]),
        (MMSTAR, "mmstar_blind", ["--no-image"]),
        (MMSTAR, "mmstar", ["--without-image", str(folder / "mmstar_blind" / "predictions.jsonl")]),
    ):
        data = folder / "data" / name.removesuffix("_blind")
        argv = [
            "run",
            "--model",
            model,
            *cli_arguments(data=data, output=folder / name, engine="vllm"),
        ]
        if command.main(benchmark, [*argv, "--max-tokens", "32", *options]) != 0:
            return 1
    assert len(_ENGINE_BY_SETTINGS) == 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
