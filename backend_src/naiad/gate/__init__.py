"""The gate: the process that listens on Triton's ports where others can reach them.

What it lets through it has checked; tritonserver itself listens on loopback. Its answers pass unread.
"""
