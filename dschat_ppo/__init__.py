"""RLHF training in one deepspeed launch: SFT, reward model, PPO."""

__version__ = "0.1.0"
