"""Columns of the records of step 3."""

COLUMNS = {
    "agent_scores": "row",  # (B,) fp32, the reward that the agent gave; NaN where it gave none
}
