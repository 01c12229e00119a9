"""The loop around the model, and what turns its tokens into answers."""
