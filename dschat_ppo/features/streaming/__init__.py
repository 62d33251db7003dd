"""Streaming: training rows that are read and tokenised while the run trains."""
