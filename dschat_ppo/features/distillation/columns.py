"""Columns of the records of step 3."""

COLUMNS = {
    "teachers": "row",  # (B,) int64, index of the row's teacher, -1: none
    # (B, P) as `prompt_ids` and `prompt_mask`: what a teacher reads in their place, where it reads
    # something else
    "teacher_prompt_ids": "prompt",
    "teacher_prompt_mask": "prompt_mask",
    "teacher_logprobs": "token",  # (B, R) fp32, log-probs under the teacher
}
