"""The head of a model: find the layer that gives the logits, fold a calibration into it, or attach one."""
