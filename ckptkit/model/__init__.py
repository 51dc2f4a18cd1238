"""What a saved state is: layouts, placements, tensors and the boxes of them that ranks hold. Pure."""
