"""From a model function to a captured graph, split at attention."""
