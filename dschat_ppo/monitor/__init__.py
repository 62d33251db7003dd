"""Metrics: reduction over ranks, writers of files, and health warnings."""
