"""Several engines of one model behind one client: which of them takes a request, and what all are asked."""
