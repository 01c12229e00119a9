"""The container files: linted, and naming only what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_image_serves_as_a_user_without_rights_and_leaves_out_what_is_not_the_library(path):
    text = path.read_text()
    assert re.findall(r"^USER (\d+)$", text, re.MULTILINE) not in ([], ["0"])
    assert 'ENTRYPOINT ["lamina", "serve"]' in text  # a shell in between would keep signals from it
    ignored = (FOLDER / f"{path.name}.dockerignore").read_text().splitlines()
    assert {".git", ".venv*", "cache_dir"} <= set(ignored)


def test_the_composition_names_files_and_services_that_there_are():
    services = COMPOSE["services"]
    build = services["lamina"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    assert f"AS {build['target']}\n" in (FOLDER / build["context"] / build["dockerfile"]).read_text()
    mounted = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    assert all((FOLDER / name).exists() for name in mounted if name.startswith("../"))
    assert {name for name in mounted if "/" not in name} == set(COMPOSE["volumes"])
    prometheus = yaml.safe_load((FOLDER / "../monitoring/prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]]
    assert targets == [["lamina:8000"]]
