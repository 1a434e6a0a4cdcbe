r"""Which models are supported, and how they are loaded.

To add a family whose vision tower is the module `visual`, and whose `get_image_features` takes `pixel_values` and
`image_grid_thw` (others need code in `adora_vl.dedup.vision` first, as does a feature that enters in a third way):

1. Read its `modeling_*.py` in Transformers: which parameters does `visual` have, which fields of the vision output
   does the model's `forward` read, which `layer_types` does its text config know? Add an entry with the source to
   `families.FAMILIES`; `Vision` and `Family` say what each field is, and Qwen3-VL is an example.
2. Where the tokens around an image have other names than Qwen's, add them to `NEVER_SAMPLED` in
   `adora_vl.rollout.prompt_tokens`.
3. Add what you expect to `tests/unit/models/test_families.py`, a small config to `build` and `KINDS` in
   `tests/unit/dedup/test_shared_prompt.py`, and the family to `SEEING` in `test_shared_vision.py` beside it. The last
   two compare gradients in float64, and fail if features are left out.
4. Add a tiny config to `_OWN` in `adora_vl.builtin.tiny_vl`, and the family's classes to `processor_around` in
   `adora_vl.builtin.processor`. `tests/unit/models/test_families_run.py` then trains, resumes and evaluates it.
5. Compare the engine with the trainer. Every value of `gaps` in FILE.json should be under 1e-4, under `looks` the
   doctor's lines should have passed and both engines of the evaluators have answered alike, and `gap` should be under
   1e-4 with a LoRA adapter:

       python -m adora_vl.builtin --family FAMILY --steps 0 --output DIR
       accelerate launch --config_file configs/accelerate/cpu.yaml -m tests.parity.parity_run --model DIR \
         --output FILE.json --mixed --look doctor --look answers --look lora \
         per_device_train_batch_size=16 entropy_coef=1.0 learning_rate=0.003 max_steps=4

6. Add a row to `docs/hardware.md`, and the published config to `adora_vl/models/shapes` if a recipe names it.
"""
