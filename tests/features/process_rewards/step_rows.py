"""Rows with labelled steps, of the shape that data sets have."""

STEPS = {"prompt": "1+2+3=", "completions": ["1+2=3", "3+3=7"], "labels": [True, False]}
SHEPHERD = {
    "input": "Two and two? Step 1: Take two. ки\nStep 2: Add two: 5 ки",
    "label": "Two and two? Step 1: Take two. +\nStep 2: Add two: 5 -",
    "task": "GSM8K",
}


def option(text: str, rating: int | None) -> dict:
    return {"text": text, "rating": rating, "flagged": None}


PRM800K = {
    "question": {"problem": "2x = 4?", "ground_truth_answer": "2"},
    "label": {
        "steps": [
            {
                "completions": [option("a", 1), option("b", -1), option("c", None)],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [option("d", -1)],
                "human_completion": {"text": "h", "rating": None},
                "chosen_completion": None,
            },
            {
                "completions": [option("e", 0), option("f", -1)],
                "human_completion": None,
                "chosen_completion": None,
            },
        ],
        "finish_reason": "found_error",
    },
}
