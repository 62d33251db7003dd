"""Files and hub data sets to token rows to padded batches."""
