"""`python -m eval.knights {infer,score,run}`."""

import sys

from adora_vl.commands import imports

if __name__ == "__main__":
    with imports():
        from eval.command import main
        from eval.knights.benchmark import BENCHMARK
    sys.exit(main(BENCHMARK))
