"""Build the wheel from a clean copy, compare its files with the tree, install it alone, use it from /.

The example of a model in a package of its own is installed beside it, as its users would. With the demo model
its main job is done cold and warm; with --torch VERSION in an empty venv that pip fills, as a new user's is.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path("src") / "lamina"
SHIPPED = {".py", ".typed", ".cu", ".cuh", ".cpp", ".h", ".json", ".css", ".html", ".js"}
OUTSIDE_MODEL = Path("examples") / "olmo2"
MODEL = ROOT / "cache_dir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAIN_JOB = Path(__file__).resolve().parent / "main_job.py"
SMOKE_TEST = Path(__file__).resolve().parent / "smoke.py"


def copy_tree(target: Path) -> None:
    """What git knows or would add, links kept as links: no build/ or egg-info of an earlier build."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def build_wheel(tree: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, tree]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = target.glob("*.whl")
    return wheel


def compare(wheel: Path, tree: Path) -> int:
    """The number of files the wheel and the tree have in common, which must be all of them."""
    package = tree / PACKAGE
    files = (Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
    wanted = {str(path.relative_to(package.parent)) for path in files if path.suffix in SHIPPED}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if wanted != found:
        sys.exit(
            f"wheel and tree differ: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}"
        )
    return len(found)


def install(packages: Sequence[Path], venv: Path) -> Path:
    """A venv's Python that has these, and sees what this Python has installed save Lamina itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    site = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # A .pth inside a folder that a .pth names is not followed, so the editable install stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", *packages], check=True)
    return python


def install_by_pip(wheel: Path, venv: Path, torch: str) -> Path:
    """An empty venv's Python with the wheel and what pip resolves to, of torch that version."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel, f"torch{torch}"], check=True)
    return python


def do_main_job(python: Path, folder: Path, settings: Sequence[str]) -> None:
    """The demo model's answers, from a cold and a warm cache, with the Python of a venv and no checkout."""
    if not MODEL.exists():
        print(f"{MODEL.name} is not there: `make test` fetches it; the main job was not done")
        return
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(folder)}
    command = [python, MAIN_JOB, MODEL, folder / "job", "--only", *settings]
    subprocess.run(command, cwd="/", env=environment, check=True)


def smoke(python: Path, home: Path) -> None:
    """From / and with an empty home, so that nothing of the checkout can help."""
    environment = {"PATH": f"{python.parent}:{os.defpath}", "HOME": str(home)}
    for command in ([python.parent / "lamina", "info"], [python, SMOKE_TEST, python.parent.parent]):
        subprocess.run(command, cwd="/", env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", help="install by pip into an empty venv, torch of this version: ==2.14.1")
    parser.add_argument("--only", nargs="+", default=["bfloat16"], help="bfloat16, float32, int8: main job")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = folder / "tree"
        copy_tree(tree)
        wheel = build_wheel(tree, folder / "dist")
        print(f"{wheel.name} holds the tree's {compare(wheel, tree)} files")
        if asked.torch is not None:
            python = install_by_pip(wheel, folder / "venv", asked.torch)
        else:
            python = install([wheel, tree / OUTSIDE_MODEL], folder / "venv")
            smoke(python, folder)
        do_main_job(python, folder, asked.only)
    print("the wheel works by itself, and finds a model that another package brings")


if __name__ == "__main__":
    main()
