"""What each step computes: requests, their order, and the running batch."""
