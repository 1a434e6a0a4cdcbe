"""Whether the model hub answers: asked once and briefly, for the hub's library tries each file again for minutes."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

_HUB_SECONDS = 5.0
_SERVER_ERROR = 500


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached and works, within five seconds; later calls know it.

    The time limit is over everything. The one that an HTTP client takes is for each piece of the answer, so a proxy
    that sends a byte now and then would hold it for good.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answered: list[bool] = []

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS).status_code
        except Exception:  # of a library that has changed its HTTP client before
            return
        answered.append(status < _SERVER_ERROR)

    asking = threading.Thread(target=ask, name="hub-answers", daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    return answered == [True]


def only_here(name: str) -> bool:
    """Whether to look on this machine alone: for a folder, and for a hub id where the hub does not answer.

    It is what `local_files_only` of Transformers takes.
    """
    return Path(name).is_dir() or not hub_answers()
