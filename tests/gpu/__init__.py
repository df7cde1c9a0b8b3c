"""What only a real GPU can show. All of it: `python -m pytest tests/gpu -q`, under five minutes, skipped without CUDA."""
