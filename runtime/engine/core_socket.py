"""Where the process of a core and the one that serves meet, and how often it says that it lives."""

COMMANDS, OUTPUTS = "commands", "outputs"  # the names of the two sockets
HEARTBEAT_SECONDS = 0.5


def address(folder: str, name: str) -> str:
    """Returns the address of a socket in a folder."""
    return f"ipc://{folder}/{name}"
