"""From a checkpoint to a bundle: recipe, calibration layer by layer, export."""
