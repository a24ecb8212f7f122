"""Measuring: what `topkapi bench` runs. Nothing else in the package imports this."""
