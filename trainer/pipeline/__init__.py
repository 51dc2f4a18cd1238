"""Pipeline schedules as data: made by pure functions, widened by passes, simulated, drawn and executed."""
