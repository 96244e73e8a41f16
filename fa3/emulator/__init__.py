"""Compiled kernels on the CPU: the very PTX that was compiled for sm_90a, and the asynchronous machine around it.

`docs/emulator.md` tells how it works; `fa3.emulate` runs calls on it.
"""
