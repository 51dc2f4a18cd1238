"""A checkpoint under the rules of a mapping file: tensors renamed, dropped, split, fused, grown; layers reordered."""
