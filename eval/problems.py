"""`python -m eval.problems run ...`: problems of your own, drawn ones and mixtures, graded as in
training.
"""

from adora_vl.evals.prepared_benchmark import prepared_benchmark

# `eval.geometry3k` reads the same folders by the same rules. What others have published of
# Geometry3K says nothing of other problems, so they have a name of their own.
BENCHMARK = prepared_benchmark("problems")
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
