"""One thin launcher per kernel of `cuda_src`, of the kernel's name.

Every launcher takes a `Launcher` first, then device addresses in the kernel's own order, then sizes by keyword. It
checks what would be a misuse (ValueError), picks variant, grid and block, and enqueues: it never waits or allocates.
"""
