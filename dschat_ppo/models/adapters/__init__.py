"""LoRA adapters of a model: added, merged, read from a folder, and several over one base."""
