"""What a training step computes once instead of once per rollout.

`images` owns the distinct images of a generation. `processor` processes each prompt and image once. `image_bank` holds
the pixels of each image once. `shared_vision` runs the vision tower once per image, and `batched_windows` makes that
pass faster. `log_probabilities` and the layouts beside it compute the prompt of a group once.
"""
