"""The formulas, as functions of tensors: no engine, no collective, no configuration object.

Shapes: B rows, R response tokens, T tokens of a row, V vocabulary. Every mask is True on tokens
that count.
"""
