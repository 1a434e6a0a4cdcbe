"""Why a vLLM engine has ended, read from the functions in its traceback."""

import re

# Where vLLM 0.31 (V1) asks for an image's features: the scheduler's books say that it has them, the
# runner has them not ("Encoder cache miss"), has others (an assertion without words), or as many as
# there are not places for.
_FEATURES = re.compile(
    r'^\s*File "[^"]*/vllm/.*, in (_gather_mm_embeddings|gather_mm_embeddings|_try_schedule_encoder_inputs|'
    r"check_and_update_cache|can_allocate|allocate|free_encoder_input|_merge_multimodal_embeddings)$"
    r"|^\S*(Error|Exception)\b.*encoder cache miss",
    re.MULTILINE | re.IGNORECASE,
)


def lost_image_features(output: str) -> bool:
    """Tell from a process's output whether its engine ended because an image's features were lost.

    The words of the error change with vLLM's version, so the functions of the traceback decide.
    """
    return _FEATURES.search(re.sub(r"^\[rank\d+\]: ?", "", output, flags=re.MULTILINE)) is not None
