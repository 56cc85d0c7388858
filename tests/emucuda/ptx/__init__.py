"""PTX, as NVRTC writes it for sm_80, to C++ that the emulated driver runs.

parser reads the text into statements; translate writes one kernel as a C++ file; the modules of `rules` say, opcode
family by opcode family, what an instruction becomes.
"""
