"""`python -m eval.knights {infer,score,run}`."""

import sys

from eval.command import main
from eval.knights.benchmark import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
