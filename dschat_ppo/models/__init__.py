"""Hugging Face models: loading, the scalar head, forward passes, saving."""
