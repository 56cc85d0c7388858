"""Numbers: the devices that run a batch and move cells."""
