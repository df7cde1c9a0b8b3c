"""What receivers do with a GPU, over a fake runtime whose work is done when the test says so."""
