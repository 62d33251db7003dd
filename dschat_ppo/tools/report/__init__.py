"""The command `python -m dschat_ppo.tools.report`."""
