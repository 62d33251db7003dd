"""Files and hub data sets -> token rows -> batches."""
