"""Columns of token rows, and of the records of step 3."""

IMAGES = "images"  # of token rows: a text for each image
SPANS = "image_spans"  # the range of each image in the prompt
ROW_OF_IMAGES = "images"
# (B,) int64, the number of the row's prompt (`ImageStore.number_prompts`), -1: without an image
COLUMNS = {ROW_OF_IMAGES: "row"}
