"""What the trainer's process and its writer process share: the messages, the signals, the layout of blocks."""
