"""What the process imports that those of `bench compare` and `remote` are forked from, so that they start in no time."""

import warnings

# Importing numpy starts threads, which wait for work. What is forked never had any, and starts its own if it needs them.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

import aioarena._bench.compare  # noqa: E402, F401
