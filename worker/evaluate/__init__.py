"""`python -m worker evaluate`: the worker's own loop over a data set, at full speed, and how good it was."""
