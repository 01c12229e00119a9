"""Requests, scheduling, the paged cache and the loop around the model."""

import time

IMPORT_STARTED = time.perf_counter()  # nothing heavy has been imported yet
