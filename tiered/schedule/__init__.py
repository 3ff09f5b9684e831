"""What moves when. Knows pages, sizes and order; never tensors, files or parameters."""
