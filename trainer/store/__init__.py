"""What a rank holds of the model: parameters, gradients and optimizer state, in buckets that their holders own."""
