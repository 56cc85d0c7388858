"""What the model file says. No device, no Trio."""
