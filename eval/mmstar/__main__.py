"""`python -m eval.mmstar {infer,score,run}`."""

import sys

from eval.command import main
from eval.mmstar.benchmark import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
