"""`python -m eval.geometry3k`: Geometry3K, graded as in training."""

from dataclasses import replace

from .problems import BENCHMARK as PROBLEMS

# Another name of the benchmark `problems`, for commands, score files and logs.
BENCHMARK = replace(PROBLEMS, name="geometry3k")
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
