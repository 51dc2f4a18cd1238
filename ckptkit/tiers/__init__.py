"""The places that a run's steps are kept in, and the copies that slower ones still lack."""
