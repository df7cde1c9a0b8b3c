"""Benchmarks and what they share with the demo: worker processes, tables, a clock for the loop.

One module per benchmark, each with ``async def measure(options) -> Result``; `aioarena.cli` runs them.
"""
