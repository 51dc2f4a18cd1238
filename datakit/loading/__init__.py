"""Steps of a rank, made ahead, and read ahead of what they are made of."""
