"""Values that this feature adds to flags."""

CHOICES = {
    "data_format": dict.fromkeys(("stepwise", "prm800k", "math_shepherd"), ""),
    "objective": {"process": "trains a reward model on labelled steps"},
}
