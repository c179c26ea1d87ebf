"""The base model, its quantization and its adapter."""
