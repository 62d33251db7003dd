"""Metrics: reduced over ranks, written to JSONL and TensorBoard, watched for trouble, shown to a person."""
