"""From graph pieces to code: Inductor, its wrapper, launches."""
