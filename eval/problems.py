"""`python -m eval problems run ...`: problems of your own, drawn ones and mixtures, graded as in
training.
"""

from dataclasses import replace

from adora_vl.utils.cli import imports

with imports():
    from eval.command import main
    from eval.geometry3k import BENCHMARK as GEOMETRY3K

# `eval.geometry3k` reads the same folders by the same rules. What others have published of
# Geometry3K says nothing of other problems, so they have a name of their own.
BENCHMARK = replace(GEOMETRY3K, name="problems", published=None)
if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
