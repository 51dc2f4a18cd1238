"""Names of other programs: what a flag or key of Megatron-LM, torchtitan, DeepSpeed or Hugging Face is here.

The tables are the TOML files of this folder; `megatron.toml` says how they are read. Nothing of them is read while a
command line has our own flags alone.
"""
