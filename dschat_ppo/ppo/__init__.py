"""Step 3: the PPO loop and what each of its lines does."""
