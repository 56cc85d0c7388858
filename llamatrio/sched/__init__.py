"""Decisions: what runs in the next step, and which token comes next. Pure: no device, no Trio, time passed in."""
