"""Runs behind the interfaces of other libraries: DCP's storage, Hugging Face's Trainer, Lightning."""
