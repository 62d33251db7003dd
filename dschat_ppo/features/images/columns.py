"""Columns of the records of step 3."""

ROW_OF_IMAGES = "images"
# (B,) int64, the number of the row's prompt (`ImageStore.number_prompts`), -1: without an image
COLUMNS = {ROW_OF_IMAGES: "row"}
