"""Everything outside this process, one thing per file.

support.py      which operating systems, CPUs and Pythons this runs on
memory.py       shared segments: create, attach, check that the memory is there
process.py      who a process is and whether it lives
wire.py         the ZMQ sockets: wake-ups, frames, joining and leaving
accelerator.py  CUDA: pinning and events
"""
