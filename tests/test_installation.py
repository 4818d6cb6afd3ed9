"""What a new user has: a wheel in an environment of its own, and a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWO_STEPS = (
    *("train", "--max-steps", "2", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=8"),
    *("model.device=cpu", "evaluate.skip=true", "track.report=false", "run.name=first"),
)


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command without this checkout on its path and without a network."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh environment with the wheel of this checkout; other packages are those of the tests."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("groupwise-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (*pip[:3], "--python", str(python), *pip[3:])
    run(*pip, "install", "--no-deps", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


def test_an_installed_wheel_prints_its_version_and_its_presets(environment, tmp_path):
    where = run(
        environment / "bin" / "python", "-c", "import groupwise; print(groupwise.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(environment)
    groupwise = environment / "bin" / "groupwise"
    assert run(groupwise, "--version", cwd=tmp_path).split()[-1][0].isdigit()
    assert "name: gsm8k" in run(groupwise, "config", "--preset", "gsm8k-quick", cwd=tmp_path)


def test_an_installed_wheel_trains_from_an_empty_folder(environment, tmp_path):
    run(environment / "bin" / "groupwise", *TWO_STEPS, cwd=tmp_path)
    assert (tmp_path / "runs" / "first" / "checkpoints" / "step-000002").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_notebook_of_the_examples_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear the outputs before you commit"
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    assert (tmp_path / "runs").is_dir()
    assert any("reward" in str(output.get("data", {}).get("text/html", "")) for output in shown)
