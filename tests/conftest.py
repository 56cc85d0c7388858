"""What all tests share: the fixtures of the emulated CUDA driver, and how hypothesis runs."""

import os

from hypothesis import settings

from tests.emucuda.plugin import emucuda, emucuda_checked

__all__ = ["emucuda", "emucuda_checked"]

# No deadlines: they measure the machine. On CI the same examples every time, so that a failure there is about the
# change; at home new ones, which is how faults are found.
settings.register_profile("home", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "home")
