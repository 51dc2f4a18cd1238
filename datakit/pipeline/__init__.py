"""Pipeline: from text to token stores, in workers here or on Ray, with flat memory, continued after a kill."""
