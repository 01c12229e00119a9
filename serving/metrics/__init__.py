"""Figures for Prometheus, and traces."""
