"""The processes of a job: how they start together, agree, exchange bytes and report what ended them."""
