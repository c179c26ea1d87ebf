"""Fine-tuning of language models from a YAML recipe, with its claims checked by the program itself."""

__version__ = "0.1.0"
