"""From recipe and parts to a trained model."""
