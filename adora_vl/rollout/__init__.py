"""Between policy and engine: what vLLM is asked, its weights, and whether both agree."""
