"""Tensor-parallel generation: ranks divide the decoder layers of the actor."""
