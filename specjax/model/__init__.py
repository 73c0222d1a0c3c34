"""The model: its configuration, parameters, KV cache, and one pure forward pass for every
family."""
