"""Test with the lowest versions that the extras allow: `python -m tests.langgraph.lowest [more for pytest]`

It makes an environment of its own in a temporary folder, and needs a package index.
"""

import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("langgraph", "agents")


def lowest() -> list[str]:
    """The lower bounds of the extras, as pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(each) for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    bounds = {each.name: [s.version for s in each.specifier if s.operator == ">="] for each in wanted}
    return [f"{name}=={versions[0]}" for name, versions in sorted(bounds.items()) if name != project["name"]]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="polykv-lowest-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pins = Path(folder) / "pins.txt"
        pins.write_text("\n".join(lowest()) + "\n", encoding="utf-8")
        print(f"installing {', '.join(lowest())}", flush=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(pins)]
        subprocess.run([*install, "--editable", f"{ROOT}[dev]"], check=True)
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/langgraph", *sys.argv[1:]]
        return subprocess.run(tests, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
