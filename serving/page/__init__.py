"""The web page at /: one HTML file with its style and scripts, no framework, nothing from elsewhere."""
