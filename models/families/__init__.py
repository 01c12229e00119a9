"""Model families, a file each; importing this registers them."""
