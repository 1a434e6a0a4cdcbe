"""Standard output and error after their reader is gone: a closed terminal, or a `tee` that Ctrl-C has ended too."""

from __future__ import annotations

import os
import select

_GONE = select.POLLERR | select.POLLHUP


def mute_lost_outputs() -> None:
    """Redirect an output without a reader to nowhere. Otherwise the next line would end the run with an `OSError`.

    The descriptors are replaced, since tqdm and loggers keep the stream objects that they were made with.
    """
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    for descriptor, state in outputs.poll(0):
        if state & _GONE:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
