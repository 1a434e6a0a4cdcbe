"""What one training step would compute twice, and computes once.

`images`, `processor`, `image_bank`, `shared_vision`: each image is processed once, held once and seen by the vision
tower once; `windows`: the tower's windows in one call. `policy_pass`: a group's prompt once, by `shared_prompt` (which
token goes where) and `split_attention` (who attends to whom), or rows end to end (`flat`).
"""
