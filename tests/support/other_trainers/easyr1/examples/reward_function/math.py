"""A reward function in EasyR1's form, which scores all answers of a batch at once."""

from typing import Any


def compute_score(
    reward_inputs: list[dict[str, Any]], format_weight: float = 0.1
) -> list[dict[str, float]]:
    """Return `format_weight` for a box, and the rest for an answer that ends as the right one."""
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        response = reward_input["response"]
        accuracy = float(response.endswith(str(reward_input["ground_truth"])))
        form = float("\\boxed{" in response)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
