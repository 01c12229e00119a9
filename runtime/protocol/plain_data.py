"""What travels at every step: objects that msgspec writes and reads by itself, as arrays of their fields."""

import msgspec


class PlainData(msgspec.Struct, frozen=True, eq=False, array_like=True, forbid_unknown_fields=True):
    """Named fields that do not change; two objects are the same or they are not, as arrays do not compare."""
