"""What commands are built from: training data, objectives, what is trainable, several processes."""
