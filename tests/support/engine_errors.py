"""Why a vLLM engine has ended, read from the functions in its traceback."""

import re

# The functions in which vLLM 0.31 (V1) asks for an image's features. They fail where the scheduler
# has noted the features and the runner lacks them ("Encoder cache miss"), has others (an assertion
# without words), or has more than the prompt has places for.
_FEATURE_ERROR_PATTERN = re.compile(
    r'^\s*File "[^"]*/vllm/.*, in (_gather_mm_embeddings|gather_mm_embeddings|_try_schedule_encoder_inputs|'
    r"check_and_update_cache|can_allocate|allocate|free_encoder_input|_merge_multimodal_embeddings)$"
    r"|^\S*(Error|Exception)\b.*encoder cache miss",
    re.MULTILINE | re.IGNORECASE,
)


def lost_image_features(output: str) -> bool:
    """Return whether an engine ended because an image's features were lost.

    `output`: what its process has printed. The words of the error change with vLLM's version, so
    the functions of the traceback decide.
    """
    return (
        _FEATURE_ERROR_PATTERN.search(re.sub(r"^\[rank\d+\]: ?", "", output, flags=re.MULTILINE))
        is not None
    )
