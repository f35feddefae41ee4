"""kernels/ and rewrites/ are linked into the package, and never stand in for Hugging Face's `kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "rewrites")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not run from a checkout")

FAKE_KERNELS = """
from unittest.mock import MagicMock

def use_kernel_forward_from_hub(name):
    return lambda cls: cls

def use_kernelized_func(function):
    return lambda cls: cls

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""


@pytest.fixture
def hf_kernels(tmp_path: Path) -> Path:
    """A folder with a regular package `kernels` of a version that transformers accepts."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    version = import_utils.KERNELS_MIN_VERSION
    site = tmp_path / "site"
    package, metadata = site / "kernels", site / f"kernels-{version}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(FAKE_KERNELS)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return site


def run_python(code: str, cwd: Path, python_path: Path | None = None) -> str:
    """What ``python -c code`` prints: the current folder is first on its sys.path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_is_no_package_by_itself(name: str):
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative(name: str):
    assert os.readlink(ROOT / "attnpatch" / name) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_every_subpackage_is_a_regular_package(name: str):
    folders = [path for path in (ROOT / name).rglob("*") if path.is_dir() and any(path.glob("*.py"))]
    assert all((folder / "__init__.py").exists() for folder in folders)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["root", "elsewhere"])
def test_a_regular_kernels_package_wins(hf_kernels: Path, tmp_path: Path, elsewhere: bool):
    code = "import attnpatch.kernels, kernels; print(kernels.__file__, *attnpatch.kernels.__path__)"
    theirs, ours = run_python(code, tmp_path if elsewhere else ROOT, hf_kernels).split()
    assert Path(theirs) == hf_kernels / "kernels" / "__init__.py"
    assert Path(ours).resolve() == ROOT / "kernels"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["root", "elsewhere"])
def test_transformers_gets_the_regular_kernels_package(hf_kernels: Path, tmp_path: Path, elsewhere: bool):
    code = (
        "import attnpatch.kernels, sys\n"
        "from transformers.models.llama import modeling_llama\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available(), sys.modules['kernels'].__file__)"
    )
    available, theirs = run_python(code, tmp_path if elsewhere else ROOT, hf_kernels).split()
    assert available == "True"
    assert Path(theirs) == hf_kernels / "kernels" / "__init__.py"


def test_transformers_does_not_take_ours_for_theirs():
    pytest.importorskip("transformers")
    code = (
        "import attnpatch.kernels\n"
        "from transformers.models.llama import modeling_llama\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())"
    )
    assert run_python(code, ROOT) == "False"
