"""The functions that models call: stack, pipeline, train_step, manual regions, experts."""
