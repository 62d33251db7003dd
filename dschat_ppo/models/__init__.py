"""Hugging Face models in and out: loading, the scalar head, forward passes, saving."""
