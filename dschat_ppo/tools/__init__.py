"""Programs other than the three steps."""
