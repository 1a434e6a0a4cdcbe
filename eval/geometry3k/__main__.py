"""`python -m eval.geometry3k {infer,score,run}`."""

import sys

from eval.command import main
from eval.geometry3k.benchmark import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
