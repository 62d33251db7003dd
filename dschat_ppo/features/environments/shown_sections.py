"""How responses of several turns are shown."""

from dschat_ppo.episodes.shown_turns import turns_of as sections_of

__all__ = ["sections_of"]
