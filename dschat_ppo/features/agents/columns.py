"""Columns of the records of step 3, beside those of environments."""

COLUMNS = {
    "agent_scores": "row",  # (B,) fp32, the reward of the episode; NaN where the agent gave none
}
