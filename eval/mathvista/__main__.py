"""`python -m eval.mathvista {infer,score,run}`."""

import sys

from eval.command import main
from eval.mathvista.benchmark import BENCHMARK

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
