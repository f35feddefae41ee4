"""What the wheel and the sdist carry, and that the wheel works away from the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = (".*", "*.egg-info", "build", "dist", "__pycache__", "results")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not run from a checkout")


def run(*command: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel (made from the sdist, as a user's pip does) and sdist of a copy of the checkout."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("build") / "source", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=source)
    return out


@pytest.fixture(scope="module")
def wheel_names(dist: Path) -> set[str]:
    return set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())


def source_files(folder: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}


def test_wheel_holds_every_module(wheel_names: set[str]):
    linked = {f"attnpatch/{name}" for folder in ("kernels", "rewrites") for name in source_files(folder)}
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attnpatch").glob("*.py")}
    assert linked
    assert linked | own | {"attnpatch/py.typed"} <= wheel_names


def test_wheel_has_one_top_level_package(wheel_names: set[str]):
    assert {name.split("/")[0] for name in wheel_names} == {"attnpatch", "attnpatch-0.1.0.dist-info"}


def test_wheel_metadata(dist: Path):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        entry_points = wheel.read("attnpatch-0.1.0.dist-info/entry_points.txt").decode()
        metadata = wheel.read("attnpatch-0.1.0.dist-info/METADATA").decode()
    assert "[torch_dynamo_backends]\nattnpatch = attnpatch.backend:attnpatch_backend" in entry_points
    assert "[console_scripts]\nattnpatch = attnpatch.cli:main" in entry_points
    assert "License-Expression: MIT" in metadata


def test_sdist_holds_real_files(dist: Path):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {member.name.split("/", 1)[1]: member for member in sdist.getmembers() if "/" in member.name}
    assert {f"attnpatch/{name}" for name in source_files("kernels")} <= set(members)
    assert "LICENSE" in members
    assert not any(member.issym() for member in members.values())


def test_installed_wheel_imports_away_from_the_checkout(dist: Path, tmp_path: Path):
    wheel = str(next(dist.glob("*.whl")))
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        "site",
        wheel,
        cwd=tmp_path,
    )
    code = (
        "import sys; sys.path.insert(0, 'site')\n"
        "import importlib.util, attnpatch, attnpatch.kernels.reference\n"
        "print(attnpatch.__file__, attnpatch.kernels.reference.__file__, importlib.util.find_spec('kernels'))"
    )
    package, reference, top_level = run(sys.executable, "-I", "-c", code, cwd=tmp_path).split()
    assert Path(package).is_relative_to(tmp_path) or package.startswith("site")
    assert "attnpatch/kernels/reference.py" in reference
    assert top_level == "None"
