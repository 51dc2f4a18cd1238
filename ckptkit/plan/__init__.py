"""Pure plans: what a save writes, which bytes a load reads, and whether chunks cover their tensors."""
