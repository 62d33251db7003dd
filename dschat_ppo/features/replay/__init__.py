"""The replay of a NaN or infinity: a bad optimizer step is written to a repro bundle, which one
process repeats.

A bundle lies in `OUTPUT/nonfinite/step_*_rank_*/`: `config.yaml` holds the flags, `model/` the
weights before the update, and `bundle.pt`, which is written last, the rank's micro-batches with
everything else that the loss needs: tensors and plain values, no code.
"""
