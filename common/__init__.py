"""What every layer shares: errors, environment variables, the content-addressed store, logging."""
