"""What a process has imported from which tests fork commands."""

from adora_vl.utils.launch import without_garbage_collection

with without_garbage_collection():
    import adora_vl.trainer  # noqa: F401
