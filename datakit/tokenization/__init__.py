"""Tokenization: tokenizer files, the engines that run them, and the proof that their ids are the same."""
