"""The load-balancing loss of a mixture of experts, as a term of the loss of all steps."""
