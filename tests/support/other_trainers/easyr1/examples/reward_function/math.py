"""A reward function in EasyR1's form, which scores all answers of a batch at once."""

from typing import Any


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return nine tenths for an answer that ends as the right one does, and one for a box."""
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        response = reward_input["response"]
        accuracy = float(response.endswith(str(reward_input["ground_truth"])))
        form = float("\\boxed{" in response)
        overall = 0.9 * accuracy + 0.1 * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
