"""Tests of aioarena._core: one process, no event loop, plain memory or a simulated one."""
