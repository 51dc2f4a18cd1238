"""Rows of a store: made by a packing index or in the order of Megatron, recorded; what packs documents into them."""
