"""Ed25519 signatures, through the cryptography package, which is only needed for them."""

from pathlib import Path
from types import ModuleType

from .errors import StoreError, UnsupportedError


class Signer:
    """The private key of a PEM file; called with bytes, gives public key and signature, both in hex."""

    def __init__(self, path: Path) -> None:
        serialization, ed25519 = _cryptography()
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} cannot be read as a private key: {error}; wanted PEM") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise StoreError(f"{path} holds another kind of key; wanted Ed25519")
        self._key = key

    def __call__(self, data: bytes) -> tuple[str, str]:
        public: bytes = self._key.public_key().public_bytes_raw()
        signed: bytes = self._key.sign(data)
        return public.hex(), signed.hex()


def read_public_key(path: Path) -> str:
    """The public key of a PEM file, in hex."""
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as a public key: {error}; wanted PEM") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise StoreError(f"{path} holds another kind of key; wanted Ed25519")
    raw: bytes = key.public_bytes_raw()
    return raw.hex()


def is_signed(data: bytes, signature: str, public_key: str) -> bool:
    """Whether the holder of the private key has signed these bytes."""
    _, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
            bytes.fromhex(signature), data
        )
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _cryptography() -> tuple[ModuleType, ModuleType]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UnsupportedError(
            "signatures need the cryptography package; pip install cryptography"
        ) from error
    return serialization, ed25519
