"""The run folder: manifest, metrics, checkpoints and report."""
