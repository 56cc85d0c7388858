"""Bookkeeping of KV cells and of the prompt cache. Pure: no device, no Trio, time passed in."""
