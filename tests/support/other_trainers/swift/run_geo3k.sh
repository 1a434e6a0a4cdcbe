#!/bin/bash
# One GPU, LoRA and a colocated engine

SYSTEM_PROMPT="Think about the problem first. The reasoning and the answer are enclosed within <think> </think> and <answer> </answer> tags, i.e., <think> reasoning </think><answer> answer </answer>"

CUDA_VISIBLE_DEVICES=0 \
MAX_PIXELS=401408 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-VL-3B-Instruct \
    --reward_funcs accuracy format \
    --reward_weights 1.0 0.1 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.45 \
    --vllm_tensor_parallel_size 1 \
    --vllm_max_model_len 4096 \
    --sleep_level 1 \
    --tuner_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --dataset 'hf::hiyouga/geometry3k:train' \
    --val_dataset 'hf::hiyouga/geometry3k:test' \
    --load_from_cache_file true \
    --max_length 2048 \
    --max_completion_length 1024 \
    --num_train_epochs 3 \
    --per_device_train_batch_size 2 \
    --per_device_eval_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.05 \
    --save_steps 50 \
    --eval_strategy steps \
    --eval_steps 50 \
    --deepspeed zero3 \
    --output_dir output/grpo_geo3k \
    --num_generations 4 \
    --temperature 1.0 \
    --system "$SYSTEM_PROMPT" \
    --log_completions true \
    --report_to tensorboard \
    --max_grad_norm 1.0 \
    --beta 0.001
