"""The stream in a run's configuration: its tables alone."""
