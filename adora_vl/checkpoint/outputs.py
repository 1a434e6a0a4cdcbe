"""Standard output and error whose other end is gone: a closed terminal, or a `tee` that Ctrl-C has ended as well."""

from __future__ import annotations

import os
import select

_GONE = select.POLLERR | select.POLLHUP


def mute_lost_outputs() -> None:
    """Point each of the two that nobody reads any more to nowhere: the next line would end the run with an `OSError`.

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
