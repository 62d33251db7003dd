"""What each token of an answer received, and why: a record of some answers of training, and
`dschat-explain`, which shows them.

A run writes `OUTPUT/record/step_*.safetensors` with the numbers that the loss of the actor
received; nothing is computed again to be shown.
"""
