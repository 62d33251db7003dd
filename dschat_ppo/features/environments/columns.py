"""Columns of the records of step 3."""

COLUMNS = {
    "turn_rewards": "token",  # (B, R) fp32, on the last token of each action
    "failed": "row",  # (B,) bool, True where the environment failed
    "episode_ids": "row",  # (B,) int64, key of the row's episode in `EpisodeRollouts.messages`
}
