"""LoRA: its flags, what they refuse and change, and what a run is told of them. How a model gets an
adapter is in `models/adapters/`."""
