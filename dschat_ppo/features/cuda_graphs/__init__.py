"""CUDA graphs: on a GPU, decode steps of rollouts are recorded once and replayed."""
