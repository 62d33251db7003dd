"""Programs beside the three steps."""
