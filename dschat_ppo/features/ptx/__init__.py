"""The loss of plain text beside PPO (Ouyang et al. 2022, PPO-ptx): its data, and its term of the
actor's loss."""
