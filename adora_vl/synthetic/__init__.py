"""Synthetic geometry: problems drawn by us, deterministic from a seed, at any resolution.

To add a family, write one whose figures carry letters, in `families`. A family with numbers changes
the problems from which the tiny model was made, and a test notices that. It also needs an entry in
`SLIP_SHARE_BY_FAMILY` of `adora_vl.builtin.tiny_vl`; its right working must be longer than its slip
in every kind of problem (`tests/unit/builtin/test_tiny_teacher.py` says why). Then `make
tiny-model`. `perimeter` is for the demo alone, and `corners` for `tiny_zoom`.
"""
